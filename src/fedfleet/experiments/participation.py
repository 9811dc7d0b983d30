"""Counts of what befell each client of a run, in the place of a row an invitation: they grow with clients, not with rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.simulator.fleet.buffer import USED
from fedfleet.simulator.fleet.responses import Outcome

COLUMNS = (*(outcome.name.lower() for outcome in sorted(Outcome)), "rounds_invited", "rounds_heard")
"""Counts of a client: its outcomes in all phases and attempts; rounds in which it was invited, and in which its answer was used."""
WAITING = 1 << 20  # entries that wait to be added to the counts, at most


class Participation:
    """Counts of every client that was invited, by ``COLUMNS``; from what ``state`` returned, where that is given."""

    def __init__(self, state: Mapping[str, Tensor] | None = None):
        self._clients = np.empty(0, np.int64) if state is None else state["clients"].numpy()
        self._counts = np.empty((0, len(COLUMNS)), np.int64) if state is None else state["counts"].numpy()
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, phases: Sequence[PhaseRecord], *, in_vain: bool = False) -> None:
        """Count the phases of one round, all attempts at it; ``in_vain`` is one of which no answer was used."""
        if not phases:
            return
        last = max(p.attempt for p in phases)
        invited = np.unique(np.concatenate([p.clients.numpy() for p in phases]))
        used = [] if in_vain else [p for p in phases if p.attempt == last]
        heard = [p.clients.numpy()[np.isin(p.responses.outcome.numpy(), USED)] for p in used]
        entries = [(p.clients.numpy(), p.responses.outcome.numpy().astype(np.int64)) for p in phases]
        for name, clients in (
            ("rounds_invited", invited),
            ("rounds_heard", np.unique(np.concatenate([*heard, invited[:0]]))),
        ):
            entries.append((clients, np.full(len(clients), COLUMNS.index(name))))
        self._waiting += entries
        if sum(len(clients) for clients, _ in self._waiting) > WAITING:
            self._settle()

    def _settle(self) -> None:
        """Add what waits to the counts."""
        if not self._waiting:
            return
        clients, columns = map(np.concatenate, zip(*self._waiting, strict=True))
        known, width = np.union1d(self._clients, clients), len(COLUMNS)
        at = np.searchsorted(known, clients) * width + columns
        counts = np.bincount(at, minlength=len(known) * width).reshape(len(known), width)
        counts[np.searchsorted(known, self._clients)] += self._counts
        self._clients, self._counts, self._waiting = known, counts, []

    def state(self) -> dict[str, Tensor]:
        """Return the counts as tensors: clients (n,) ascending, counts (n, columns), both int64."""
        self._settle()
        return {"clients": torch.from_numpy(self._clients), "counts": torch.from_numpy(self._counts)}

    def table(self, also: Sequence[PhaseRecord] = ()) -> pa.Table:
        """Return a row a client, ascending; ``also`` are phases that are counted in it alone."""
        whole = self
        if also:
            whole = Participation(self.state())
            whole.add(also, in_vain=True)
        of = whole.state()
        return pa.table({"client": of["clients"].numpy(), **dict(zip(COLUMNS, of["counts"].numpy().T, strict=True))})
