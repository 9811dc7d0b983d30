"""FedMM as a bare loop in plain torch: DANN with the small convolutional net, one client after another.

A client holds examples of one kind, with labels or without. In direction space a step is z - lr (d + mu (z - z_0) + dual).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import lists
from benchmarks.peers import workload
from benchmarks.peers.workload import CLASSES, Case
from fedfleet.tasks import adaptation_nets

MU, ETA3, NU = 0.5, 0.3, 1.0


class Player(nn.Module):
    """Extractor, head and adversary, able to give a client's direction."""

    def __init__(self, case: Case):
        super().__init__()
        nets = adaptation_nets.build("cnn", case.shape, CLASSES, (), "features", 0.0, case.seed)
        assert nets.adversary is not None
        self.features, self.head, self.adversary = nets.features, nets.head, nets.adversary
        self.z = list(self.parameters())
        self.ascends = [name.startswith("adversary") for name, _ in self.named_parameters()]

    def direction(self, x: Tensor, y: Tensor | None) -> list[Tensor]:
        """Return the gradient of a batch, with labels or of a target, that of the adversary for its own loss."""
        h = self.features(x)
        judged = self.adversary(h)[:, 0]
        value = -NU * F.softplus(-judged if y is None else judged).mean()
        if y is not None:
            value = value + F.cross_entropy(self.head(h), y)
        found = torch.autograd.grad(value, self.z, allow_unused=True)
        return [
            torch.zeros_like(p) if g is None else -g / NU if up else g
            for p, g, up in zip(self.z, found, self.ascends, strict=True)
        ]


def is_target(client: int) -> bool:
    """Say whether a client has no labels: every second one."""
    return client % 2 == 1


def fedmm(case: Case) -> tuple[Callable[[int], None], Player]:
    """Return a function that runs round t, and the point that it moves. Duals are zero before a client is first asked."""
    x, y = workload.data(case)
    now, local = Player(case), Player(case)
    duals: dict[int, list[Tensor]] = {}
    mean = lists.zeros(now.z)

    def train(client: int, dual: list[Tensor]) -> None:
        lists.copy(local.z, now.z)
        for _ in range(case.epochs):
            for rows, labels in zip(x[client].split(case.batch), y[client].split(case.batch), strict=True):
                step = local.direction(rows, None if is_target(client) else labels)
                lists.add(step, local.z, MU)
                lists.add(step, now.z, -MU)
                lists.add(step, dual)
                lists.add(local.z, step, -case.lr)
        lists.add(dual, local.z, MU)
        lists.add(dual, now.z, -MU)

    def round(t: int) -> None:
        clients, total = workload.cohort(case, t), lists.zeros(now.z)
        for client in clients:
            train(client, duals.setdefault(client, lists.zeros(now.z)))
            lists.add(total, local.z)
        lists.scale(total, 1 / len(clients))
        share = len(clients) / case.clients
        lists.add(mean, total, share * MU)
        lists.add(mean, now.z, -share * MU)
        lists.copy(now.z, total)
        lists.add(now.z, mean, ETA3 / MU)

    return round, now
