"""Clients whose examples are poisoned where they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfleet.middleware.attacks.attackers import Attackers
from fedfleet.simulator.population import LocalData, Population, Summary, shuffled

Poison = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Inputs (n, ...) as they are stored and labels (n,) -> what they become."""


@dataclass(frozen=True)
class Poisoned:
    """A population in which the attackers hold other examples than they were dealt.

    Of a client's n examples floor(share n + 1/2) are poisoned, drawn from ``seed`` and the client alone. Those held out of its work
    are left as they are.
    """

    whole: Population
    attackers: Attackers
    poison: Poison
    share: float
    seed: int

    @property
    def size(self) -> int:
        """Number of clients, N."""
        return self.whole.size

    def num_examples(self, ids: Tensor) -> Tensor:
        """Return the number of examples of each client."""
        return self.whole.num_examples(ids)

    def summary(self) -> Summary:
        """Return what is known of all clients."""
        return self.whole.summary()

    def domains(self, ids: Tensor) -> Tensor:
        """Return the domain of each client."""
        return self.whole.domains(ids)

    def grouped(self, domain: Tensor) -> Poisoned:
        """Return the population with other domains."""
        return replace(self, whole=self.whole.grouped(domain))

    def to(self, device: torch.device) -> Poisoned:
        """Return the population with its tensors on a device."""
        return replace(self, whole=self.whole.to(device))

    def local_data(self, ids: Tensor) -> LocalData:
        """Return what the clients hold, in tensors of this block's own where one of them attacks."""
        local, theirs = self.whole.local_data(ids), self.attackers.among(ids)
        if not theirs.any():
            return local
        clients, longest = local.rows.shape
        held = local.rows[:, :0] if local.held is None else local.held.rows
        every = torch.cat([local.rows.flatten(), held.flatten()])
        data = {name: column[every] for name, column in local.data.items()}
        rows, at = torch.arange(len(every), device=every.device).split([local.rows.numel(), held.numel()])
        rows = rows.view(clients, longest)
        turned = rows[self._chosen(ids, local.counts, longest) & theirs[:, None]]
        data["x"][turned], data["y"][turned] = self.poison(data["x"][turned], data["y"][turned])
        held_out = local.held and local.held._replace(rows=at.view(held.shape))
        return local._replace(data=data, rows=rows, held=held_out)

    def _chosen(self, ids: Tensor, counts: Tensor, longest: int) -> Tensor:
        """Return which rows of the clients (C, n) are poisoned."""
        wanted = torch.floor(counts.double() * self.share + 0.5).long()
        place = torch.arange(longest, device=ids.device).expand(len(ids), -1)
        order = shuffled(self.seed, "poisoned", ids, counts, longest)
        return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, place < wanted[:, None])
