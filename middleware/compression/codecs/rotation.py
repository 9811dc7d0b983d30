"""A random rotation, after which numbers are alike in size, so that what quantises next has a small range.

Suresh, Yu, Kumar & McMahan, "Distributed mean estimation with limited communication", ICML 2017, Section 3: R = H D with H the
Walsh-Hadamard matrix over sqrt(N) and D random signs; x (d,) is filled up with zeros to N, the next power of two. The server turns
back what it gets. With ``uniform`` of s points after it

    E Q(x) = x,   E|Q(x) - x|^2 <= (2 ln N + 2)/(s-1)^2 |x|^2     (Theorem 3, of one client)

against d/(2 (s-1)^2) without. The signs follow from a seed, which is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import SEED_BITS, Unbiased, Vector, by_vector
from fedfleet.simulator.author import Encoding, Key, Slots, rng


class Rotation(Unbiased):
    """Each slot turned at random (Suresh et al. 2017)."""

    moves: ClassVar[bool] = True
    turns: ClassVar[bool] = True

    def left(self, d: int) -> int:
        """Return the next power of two."""
        return 1 << (d - 1).bit_length()

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the slots turned, each as a vector whose length is a power of two."""
        return by_vector(send, key, "slot", self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        n = self.left(len(x))
        signs = 1 - 2 * (rng.bits(key, n) & 1).to(x.dtype)
        full = torch.cat([x, torch.zeros(n - len(x), dtype=x.dtype, device=x.device)])
        return Vector(hadamard(full * signs), lambda rest: (hadamard(rest) * signs)[: len(x)], bits=SEED_BITS)


def hadamard(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of x (N,), N a power of two, over sqrt(N): its own inverse."""
    n, half = len(x), 1
    while half < n:
        a, b = x.reshape(-1, 2, half).unbind(1)
        x, half = torch.stack([a + b, a - b], 1).reshape(-1), 2 * half
    return x / math.sqrt(n)
