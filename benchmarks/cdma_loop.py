"""CDMA-ADA as a bare loop in plain torch: two phases, one client after another.

z descends in all but its last part, the dual: alpha of AUC, the perturbation of robust training. Phase 1 averages full local
gradients at z_t and z_{t-1} into u_t (Eq. 2 of the paper); in phase 2 clients step along u_t + g(z^(k); b) - g(z_t; b) (Eq. 3),
whose first step is u_t alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import lists
from benchmarks.peers import workload
from benchmarks.peers.workload import CLASSES, Case
from fedfleet.tasks.robust import RobustOptions

LAMBDA = RobustOptions().penalty
ALPHA = 0.9  # of the recursion; below 1, so that phase 1 takes its two gradients
PRIOR = 1 / CLASSES
POSITIVE, SCORE = 0, 1  # the positive class, and the output that is the score


class Point(nn.Module):
    """A point z, able to give its gradient. ``dual`` names the parameter that ascends."""

    dual: str

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = deepcopy(net)

    @cached_property
    def z(self) -> list[nn.Parameter]:
        """The parameters."""
        return list(self.parameters())

    def direction(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the gradient, its dual part negated, so that every part descends."""
        gradient = torch.autograd.grad(self(x, y), self.z)
        return [g if s > 0 else -g for g, s in zip(gradient, self.sign, strict=True)]

    @cached_property
    def sign(self) -> list[float]:
        """Return -1 for the dual, 1 for the others."""
        return [-1.0 if name == self.dual else 1.0 for name, _ in self.named_parameters()]


class AucPoint(Point):
    """The net, a and b; alpha."""

    dual = "alpha"

    def __init__(self, net: nn.Module):
        super().__init__(net)
        self.a, self.b, self.alpha = (nn.Parameter(torch.zeros(())) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the minimax objective of AUC on a batch."""
        h = self.net(x).softmax(-1)[:, SCORE]
        pos = (y == POSITIVE).to(h.dtype)
        neg = 1 - pos
        fit = (1 - PRIOR) * pos * (h - self.a) ** 2 + PRIOR * neg * (h - self.b) ** 2
        margin = 2 * (1 + self.alpha) * (PRIOR * neg - (1 - PRIOR) * pos) * h
        return (fit + margin).mean() - PRIOR * (1 - PRIOR) * self.alpha**2


class RobustPoint(Point):
    """The net; the perturbation that all images share."""

    dual = "perturbation"

    def __init__(self, net: nn.Module, shape: tuple[int, ...]):
        super().__init__(net)
        self.perturbation = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of a batch under the perturbation, less its penalty."""
        return F.cross_entropy(self.net(x + self.perturbation), y) - LAMBDA * (self.perturbation**2).sum()


def cdma_ada(case: Case, model: nn.Module) -> tuple[Callable[[int], None], Point]:
    """Return a function that runs round t, and the point z_t that it moves."""
    x, y = workload.data(case)
    make = (lambda: RobustPoint(model, case.shape)) if case.task == "robust" else (lambda: AucPoint(model))
    now, before, local = make(), make(), make()
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
