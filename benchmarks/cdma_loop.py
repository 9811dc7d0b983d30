"""CDMA-ADA on the AUC task as a bare loop in plain torch: two phases, one client after another.

z = (net, a, b; alpha) descends in all but the dual alpha. Phase 1 averages full local gradients at z_t and z_{t-1} into u_t
(Eq. 2 of the paper); in phase 2 clients step along u_t + g(z^(k); b) - g(z_t; b) (Eq. 3), whose first step is u_t alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from benchmarks import lists
from benchmarks.peers import workload
from benchmarks.peers.workload import CLASSES, Case

ALPHA = 0.9  # of the recursion; below 1, so that phase 1 takes its two gradients
PRIOR = 1 / CLASSES
POSITIVE, SCORE = 0, 1  # the positive class, and the output that is the score


class Point(nn.Module):
    """A point z, able to give its gradient: the net, a and b, and the dual variable last."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = deepcopy(net)
        self.a, self.b, self.alpha = (nn.Parameter(torch.zeros(())) for _ in range(3))
        self.z = list(self.parameters())
        dual = next(i for i, p in enumerate(self.z) if p is self.alpha)
        self.sign = [-1.0 if i == dual else 1.0 for i in range(len(self.z))]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the minimax objective of AUC on a batch."""
        h = self.net(x).softmax(-1)[:, SCORE]
        pos = (y == POSITIVE).to(h.dtype)
        neg = 1 - pos
        fit = (1 - PRIOR) * pos * (h - self.a) ** 2 + PRIOR * neg * (h - self.b) ** 2
        margin = 2 * (1 + self.alpha) * (PRIOR * neg - (1 - PRIOR) * pos) * h
        return (fit + margin).mean() - PRIOR * (1 - PRIOR) * self.alpha**2

    def direction(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the gradient, its dual part negated, so that every part descends."""
        gradient = torch.autograd.grad(self(x, y), self.z)
        return [g if s > 0 else -g for g, s in zip(gradient, self.sign, strict=True)]


def cdma_ada(case: Case, model: nn.Module) -> tuple[Callable[[int], None], Point]:
    """Return a function that runs round t, and the point z_t that it moves."""
    x, y = workload.data(case)
    now, before, local = Point(model), Point(model), Point(model)
    u: list[Tensor] | None = None

    def estimate(clients: list[int]) -> list[Tensor]:
        total = lists.zeros(now.z)
        for client in clients:
            lists.add(total, now.direction(x[client], y[client]))
            if u is not None:
                lists.add(total, before.direction(x[client], y[client]), ALPHA - 1)
        lists.scale(total, 1 / len(clients))
        if u is not None:
            lists.add(total, u, 1 - ALPHA)
        return total

    def train(client: int, first: list[Tensor]) -> None:
        lists.copy(local.z, now.z)
        lists.add(local.z, first, -case.lr)
        epoch = list(zip(x[client].split(case.batch), y[client].split(case.batch), strict=True))
        for rows, labels in (epoch * case.epochs)[1:]:
            step = local.direction(rows, labels)
            lists.add(step, now.direction(rows, labels), -1)
            lists.add(step, first)
            lists.add(local.z, step, -case.lr)

    def round(t: int) -> None:
        nonlocal u
        u = estimate(workload.cohort(case, 2 * t))
        total = lists.zeros(now.z)
        for client in workload.cohort(case, 2 * t + 1):
            train(client, u)
            lists.add(total, local.z)
        lists.scale(total, 1 / case.cohort)
        lists.copy(before.z, now.z)
        lists.copy(now.z, total)

    return round, now
