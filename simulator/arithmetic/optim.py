"""First-order optimisers as pure functions on trees: one set, for clients' local steps and for the server's.

An optimiser turns a descent direction into the direction actually taken; the caller then steps ``z - lr * direction``.
Checked against ``torch.optim``, whose classes keep their state in place and so cannot run inside ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree


class Optimizer(NamedTuple):
    """``init(z) -> state`` and ``update(state, direction, z) -> (direction, state)``."""

    init: Callable[[Tree], Any]
    update: Callable[[Any, Tree, Tree], tuple[Tree, Any]]

    @property
    def remembers(self) -> bool:
        """Whether there is anything in its state."""
        return bool(T.leaves(self.init({"x": torch.zeros(())})))


def sgd(
    *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0, clip_norm: float | None = None
) -> Optimizer:
    """SGD as in ``torch.optim.SGD`` (dampening 0).

    Args:
        momentum: weight of the running direction.
        nesterov: look ahead along the running direction; needs momentum.
        weight_decay: adds ``weight_decay * z`` to the direction, before momentum.
        clip_norm: scales a longer direction down to this Euclidean norm, before all else.

    """

    def init(z: Tree) -> Tree:
        return T.zeros_like(z) if momentum else None

    def update(state: Tree, d: Tree, z: Tree) -> tuple[Tree, Tree]:
        d = _prepare(d, z, weight_decay, clip_norm)
        if not momentum:
            return d, None
        state = T.axpy(momentum, state, d)
        return (T.axpy(momentum, state, d) if nesterov else state), state

    return Optimizer(init, update)


class Moments(NamedTuple):
    """Running first and second moments (trees)."""

    first: Tree
    second: Tree


class Counted(NamedTuple):
    """Moments, and the number of updates they are of."""

    moments: Moments
    count: Any


def adam(
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    decoupled: bool = False,
) -> Optimizer:
    """Adam (Kingma & Ba 2015) as in ``torch.optim.Adam``, or AdamW (Loshchilov & Hutter 2019) as in ``torch.optim.AdamW``.

    Args:
        beta1, beta2: weights of the old first and second moments.
        eps: added to the root of the second.
        weight_decay, clip_norm: as of ``sgd``.
        decoupled: add ``weight_decay * z`` after the moments, which do not see it: AdamW.

    """

    def init(z: Tree) -> Counted:
        none_yet = torch.zeros((), dtype=torch.float64, device=T.leaves(z)[0].device)
        return Counted(Moments(T.zeros_like(z), T.zeros_like(z)), none_yet)

    def update(state: Counted, d: Tree, z: Tree) -> tuple[Tree, Counted]:
        d = _prepare(d, z, 0.0 if decoupled else weight_decay, clip_norm)
        count = state.count + 1
        m = T.map(lambda a, g: beta1 * a + (1 - beta1) * g, state.moments.first, d)
        v = T.map(lambda b, g: beta2 * b + (1 - beta2) * g * g, state.moments.second, d)
        c1, c2 = 1 - beta1**count, 1 - beta2**count

        def leaf(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return ((a / c1) / ((b / c2).sqrt() + eps)).to(a.dtype)

        d = T.map(leaf, m, v)
        return T.axpy(weight_decay, z, d) if decoupled and weight_decay else d, Counted(Moments(m, v), count)

    return Optimizer(init, update)


def adaptive(
    rule: Literal["adagrad", "adam", "yogi"], *, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Optimizer:
    """FedAdagrad, FedAdam or FedYogi's server (Reddi et al. 2021, Algorithm 2), with v_{-1} = tau^2 and no correction of bias.

    Args:
        rule: how second moments follow the squares of directions.
        beta1, beta2: weights of the old first and second moments; Adagrad has no ``beta2``.
        tau: degree of adaptivity, added to the root of the second.

    """

    def second(v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        match rule:
            case "adagrad":
                return v + g * g
            case "adam":
                return beta2 * v + (1 - beta2) * g * g
            case "yogi":
                return v - (1 - beta2) * g * g * torch.sign(v - g * g)

    def init(z: Tree) -> Moments:
        return Moments(T.zeros_like(z), T.map(lambda leaf: torch.full_like(leaf, tau**2), z))

    def update(state: Moments, d: Tree, z: Tree) -> tuple[Tree, Moments]:
        m = T.map(lambda a, g: beta1 * a + (1 - beta1) * g, state.first, d)
        v = T.map(second, state.second, d)
        return T.map(lambda a, b: a / (b.sqrt() + tau), m, v), Moments(m, v)

    return Optimizer(init, update)


def adagrad(*, eps: float = 1e-10, weight_decay: float = 0.0, clip_norm: float | None = None) -> Optimizer:
    """Adagrad (Duchi, Hazan & Singer 2011) as in ``torch.optim.Adagrad``; ``eps`` is added to roots, the rest as of ``sgd``."""

    def update(state: Tree, d: Tree, z: Tree) -> tuple[Tree, Tree]:
        d = _prepare(d, z, weight_decay, clip_norm)
        state = T.map(lambda s, g: s + g * g, state, d)
        return T.map(lambda s, g: g / (s.sqrt() + eps), state, d), state

    return Optimizer(T.zeros_like, update)


def _prepare(d: Tree, z: Tree, weight_decay: float, clip_norm: float | None) -> Tree:
    if clip_norm is not None:
        d = T.scale((clip_norm / (T.norm(d) + 1e-6)).clamp(max=1.0), d)  # as torch.nn.utils.clip_grad_norm_
    return T.axpy(weight_decay, z, d) if weight_decay else d
