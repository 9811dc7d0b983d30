"""Matrices as products of two thin ones.

Vogels, Karimireddy & Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS 2019,
Algorithm 1, of one client: the paper's workers agree on P by a sum, and so go on from the last Q; a client here has been away, and
takes more steps of the power iteration instead.

    paper     here
    M         a leaf (n, ...) as a matrix (n, m)
    r         rank
    Q (m, r)  drawn anew each time

    P = M Q,  P^ = an orthonormal basis of P's columns,  Q = M^T P^;   C(M) = P^ Q^T, of which P^ and Q are sent: r (n + m) numbers
    |M - C(M)|^2 = |M|^2 - |C(M)|^2, for C(M) = P^ P^^T M is a projection
    E |M - C(M)|^2 <= (1 + k/(r - k - 1)) sum_{j > k} s_j^2, singular values s, any k <= r - 2, after one step
                      (Halko, Martinsson & Tropp, SIAM Review 2011, Theorem 10.5)

What would not get smaller, vectors above all, goes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import Options, float_bits
from fedfleet.simulator.author import Encoding, Key, Slots, normals, rng


class LowRank(Options):
    """Each leaf's best product of two thin matrices, nearly: PowerSGD (Vogels et al. 2019)."""

    last: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    rank: int = Field(default=2, ge=1)
    """Columns of either matrix, r."""
    iterations: int = Field(default=2, ge=1)
    """Steps of the power iteration: more come nearer to the best of that rank, and send nothing more."""
    error_feedback: bool = False
    """Each client remembers what was lost, and adds it next time; the paper's does."""

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the products; a leaf that they would not make smaller as it is."""
        made, numbers, bits = {}, 0, 0
        for slot, leaves in send.items():
            made[slot] = {}
            for name, leaf in leaves.items():
                size = self._numbers(leaf)
                made[slot][name] = leaf if size == leaf.numel() else self._product(leaf, rng.fold(key, slot, name))
                numbers, bits = numbers + size, bits + size * float_bits(leaf)
        return Encoding({}, lambda _: made, numbers, bits)

    def _numbers(self, leaf: Tensor) -> int:
        """Return how many numbers are sent of a leaf."""
        n = leaf.shape[0] if leaf.ndim > 1 else 1
        return min(leaf.numel(), self.rank * (n + leaf.numel() // n))

    def _product(self, leaf: Tensor, key: Key) -> Tensor:
        whole = leaf.reshape(leaf.shape[0], -1)
        q = normals(key, (whole.shape[1], self.rank)).to(leaf.dtype)
        p = torch.linalg.qr(whole @ q).Q
        for _ in range(self.iterations - 1):
            p = torch.linalg.qr(whole @ (whole.T @ p)).Q
        return (p @ (p.T @ whole)).reshape(leaf.shape)
