"""What clients keep between rounds, keyed by client."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedfleet.simulator import tree as T
from fedfleet.simulator.tree import Tree


class ClientStore:
    """Client states, made the first time a client is heard; writes of a round are staged and committed together."""

    def __init__(self) -> None:
        self._committed: dict[int, Tree] = {}
        self._staged: dict[int, Tree] = {}

    def get(self, clients: Tensor, fresh: Callable[[], Tree]) -> Tree:
        """Return the states of clients (C,), stacked; staged writes of this round are visible."""
        made = None
        rows = []
        for c in clients.tolist():
            row = self._staged.get(c, self._committed.get(c))
            if row is None:
                made = fresh() if made is None else made
                row = made
            rows.append(row)
        return T.stack(rows)

    def stage(self, clients: Tensor, states: Tree) -> None:
        """Stage the stacked states of clients (C,)."""
        for i, c in enumerate(clients.tolist()):
            self._staged[c] = T.map(torch.clone, T.index(states, i))

    def commit(self) -> None:
        """Accept the round."""
        self._committed |= self._staged
        self._staged = {}

    def discard(self) -> None:
        """Forget the round."""
        self._staged = {}

    def __len__(self) -> int:
        return len(self._committed)
