"""Steps of descent in a ball, Euclidean or by a mirror map: Proj_W and Phi_W of agnostic learning.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019, Figure 3, and the mirror maps that its appendix announces
(a reconstruction). With 1 / p + 1 / q = 1:

    Phi_W(w) = |w|_q^2 / 2        its gradient, the link, is w_i |w_i|^(q - 2) |w|_q^(2 - q); its inverse is that of p
    W = {w: |w|_q <= R}           the projection by Phi_W shrinks w to norm R; for q = 2 both are the Euclidean ones
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.author import Objective, T, Tree


class Ball(NamedTuple):
    """Models with a norm |w|_q, 1 < q <= 2, of at most ``radius``; of any where that is None."""

    q: float = 2.0
    radius: float | None = None

    def step(self, objective: Objective, z: Tree, lr: float, direction: Tree, penalty: float = 0.0) -> Tree:
        """Return the model after a step of mirror descent; where q is 2, for a loss with ``penalty`` times |w|, a proximal one."""
        if self.q != 2:
            dual = T.axpy(-lr, direction, _link(z, self.q))
            return self.project(_link(dual, self.q / (self.q - 1)))
        moved = objective.step(z, lr, direction)
        return self.project(T.scale((1 - lr * penalty / T.norm(moved)).clamp(min=0), moved) if penalty else moved)

    def project(self, z: Tree) -> Tree:
        """Return the nearest model of the ball."""
        if self.radius is None:
            return z
        return T.scale((self.radius / _norm(z, self.q).clamp(min=1e-30)).clamp(max=1), z)


def _norm(z: Tree, q: float) -> Tensor:
    """Return |z|_q, divided by the largest entry on the way: powers of large numbers overflow."""
    most = max(leaf.abs().max() for leaf in T.leaves(z)).clamp(min=1e-30)
    return most * torch.stack([(leaf.abs() / most).pow(q).sum() for leaf in T.leaves(z)]).sum().pow(1 / q)


def _link(z: Tree, q: float) -> Tree:
    """Return the gradient of |z|_q^2 / 2."""
    norm = _norm(z, q).clamp(min=1e-30)
    return T.map(lambda leaf: norm * leaf.sign() * (leaf.abs() / norm).pow(q - 1), z)
