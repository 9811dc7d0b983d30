"""Attackers among the clients: a list, or a share of all that is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng


@dataclass(frozen=True)
class Attackers:
    """Clients that attack, their numbers (A,) int64, rising."""

    clients: Tensor

    def __len__(self) -> int:
        return len(self.clients)

    def among(self, clients: Tensor) -> Tensor:
        """Return which of some clients are among them, a mask of their shape."""
        return torch.isin(clients, self.clients.to(clients.device))


def drawn(seed: int, clients: int, share: float) -> Attackers:
    """Return floor(share N + 1/2) of N clients, from the seed of a run alone: those of a share are among those of a larger one."""
    size = int(share * clients + 0.5 + 1e-9)
    return Attackers(rng.permutation(rng.fold(rng.key(seed), "attackers"), clients)[:size].sort().values)
