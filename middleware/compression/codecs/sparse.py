"""A part of the coordinates: the largest, or drawn ones.

Stich, Cordonnier & Jaggi, "Sparsified SGD with memory", NeurIPS 2018. Of a slot x with d floats, k are sent, C(x):

    top_k       |x - C(x)|^2 <= (1 - k/d) |x|^2            always (their Definition 2.1)
    random_k    E|x - C(x)|^2 = (1 - k/d) |x|^2            with C(x) the drawn coordinates as they are
                E C(x) = x, E|x - C(x)|^2 = (d/k - 1) |x|^2    with the drawn coordinates times d/k

top_k sends which coordinates they are: k numbers of ceil(log2 d) bits, or a bit a coordinate where that is less. Those of random_k
follow from a seed, which is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import SEED_BITS, Options, Vector, by_vector, width
from fedfleet.simulator.author import Encoding, Key, Slots, rng


class Sparse(Options):
    """Options of what sends a part of the coordinates of each slot."""

    moves: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    share: float | None = Field(default=None, gt=0, le=1)
    """Part of each slot's floats that is sent, rounded up; this or ``k``."""
    k: int | None = Field(default=None, ge=1)
    """Floats sent of each slot; of a smaller one all."""
    error_feedback: bool = False
    """Each client remembers what was not sent, and adds it next time."""

    @model_validator(mode="after")
    def _one_size(self) -> Sparse:
        if (self.share is None) == (self.k is None):
            raise ValueError("how much is sent? give share, such as 0.01, or k, and not both")
        return self

    @property
    def least(self) -> int:
        """The floats that some slot has to have."""
        return self.k or 0

    def kept(self, d: int) -> int:
        """Return how many of d floats are sent."""
        return min(d, self.k) if self.k is not None else math.ceil(round((self.share or 1.0) * d, 9))

    def left(self, d: int) -> int:
        """Return how many of d floats are sent."""
        return self.kept(d)


class TopK(Sparse):
    """The largest coordinates, by their absolute values (Stich et al. 2018)."""

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the coordinates that are sent; of equally large ones the first."""
        return by_vector(send, key, "slot", self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        d = len(x)
        k = self.kept(d)
        at = largest(x.abs(), k)
        return Vector(x.gather(0, at), lambda rest: _put(rest, at, d), bits=min(k * width(d), d))


class RandomK(Sparse):
    """Coordinates drawn anew by each client in each exchange (Stich et al. 2018)."""

    unbiased: bool | None = None
    """Multiply what is sent by d/k, so that its mean is right; without feedback it is, if not said."""

    @model_validator(mode="after")
    def _one_way(self) -> RandomK:
        if self.error_feedback and self.unbiased:
            raise ValueError(
                "unbiased multiplies what is sent by d/k, and with error_feedback the error would grow: leave one of them out"
            )
        return self

    @property
    def scaled(self) -> bool:
        """Whether what is sent is multiplied by d/k."""
        return not self.error_feedback if self.unbiased is None else self.unbiased

    def error(self, d: int, *, turned: bool) -> float:
        """Return d/k - 1 where the mean is right."""
        return d / self.kept(d) - 1 if self.scaled else 0.0

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the coordinates that are sent."""
        return by_vector(send, key, "slot", self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        d = len(x)
        k = self.kept(d)
        at = rng.bits(key, d).topk(k).indices  # no two of a stream's words are alike
        return Vector(x.gather(0, at) * (d / k if self.scaled else 1.0), lambda rest: _put(rest, at, d), bits=SEED_BITS)


def largest(size: Tensor, k: int) -> Tensor:
    """Return where the k largest of ``size`` (d,) are, rising (k,) int64; of equal ones the first, on every machine."""
    least = size.topk(k).values[-1]
    above, equal = size > least, size == least
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    place = torch.where(chosen, chosen.cumsum(0) - 1, k)  # those not chosen all go where nobody looks
    every = torch.arange(len(size), device=size.device)
    return torch.zeros(k + 1, dtype=torch.int64, device=size.device).scatter(0, place, every)[:k]


def _put(values: Tensor, at: Tensor, d: int) -> Tensor:
    """Return (d,) with ``values`` (k,) at their places, else 0."""
    return torch.zeros(d, dtype=values.dtype, device=values.device).scatter(0, at, values)
