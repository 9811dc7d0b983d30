"""Fewer bits a number. Each is of a vector x (d,), a slot or a leaf, with draws of its own.

    qsgd      Alistarh, Grubic, Li, Tomioka & Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and
              encoding", NIPS 2017, Section 3.1: |x| sign(x_i) xi_i with xi_i of 0, 1/s, ..., 1.
              E Q(x) = x, E|Q(x) - x|^2 <= min(d/s^2, sqrt(d)/s) |x|^2 (Lemma 3.1).
    ternary   Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NIPS 2017,
              Eq. (2): max|x| sign(x_i) b_i with P(b_i = 1) = |x_i| / max|x|. E Q(x) = x, E|Q(x) - x|^2 = max|x| |x|_1 - |x|^2.
    uniform   Suresh, Yu, Kumar & McMahan, "Distributed mean estimation with limited communication", ICML 2017, Section 2.2:
              one of s points from the least to the largest of x. E Q(x) = x, E|Q(x) - x|^2 <= d/(2 (s-1)^2) |x|^2.
    sign      Karimireddy, Rebjock, Stich & Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", ICML
              2019: |x|_1/d sign(x). |x - C(x)|^2 = (1 - |x|_1^2/(d |x|^2)) |x|^2.

Levels are packed at a fixed width; Elias coding, which the QSGD paper adds, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import Options, Unbiased, Vector, by_vector, float_bits, width
from fedfleet.simulator.author import Encoding, Key, Slots, rng

By = Literal["slot", "leaf"]


class Qsgd(Unbiased):
    """A norm, and of each number a sign and one of s + 1 levels (Alistarh et al. 2017)."""

    last: ClassVar[bool] = True
    levels: int = Field(default=15, ge=1, le=1 << 22)
    """Levels above 0, s: 15 are five bits a number, with the sign."""
    norm: Literal["l2", "max"] = "l2"
    """What the top level is: the Euclidean norm, or the largest absolute value, as released code has it."""
    by: By = "slot"
    """Whether a whole slot has one norm, or each of its leaves."""

    def error(self, d: int, *, turned: bool) -> float:
        """Return the bound of Lemma 3.1, or d/(4 s^2), a quarter of a level's square for each number."""
        s = self.levels
        return min(d / s**2, math.sqrt(d) / s) if self.norm == "l2" else d / (4 * s**2)

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the levels."""
        return by_vector(send, key, self.by, self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        norm = x.square().sum().sqrt() if self.norm == "l2" else x.abs().max()
        y = _rounded(x, norm, self.levels, key)
        bits = len(x) * (1 + width(self.levels + 1)) + float_bits(x)
        return Vector(None, lambda _: y, len(x) + 1, bits)


class Ternary(Unbiased):
    """Of each number -1, 0 or 1, and what they are multiplied by: TernGrad (Wen et al. 2017)."""

    last: ClassVar[bool] = True
    by: By = "leaf"
    """Whether each leaf of a slot has a multiplier of its own, as in the paper, or a whole slot has one."""

    def error(self, d: int, *, turned: bool) -> float:
        """Return sqrt(d), which max|x| |x|_1 / |x|^2 may be."""
        return math.sqrt(d)

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the signs that are left."""
        return by_vector(send, key, self.by, self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        y = _rounded(x, x.abs().max(), 1, key)
        return Vector(None, lambda _: y, len(x) + 1, 8 * -(-len(x) // 5) + float_bits(x))  # 3^5 < 2^8


class Uniform(Unbiased):
    """Of each number one of s points between the least and the largest (Suresh et al. 2017)."""

    last: ClassVar[bool] = True
    levels: int = Field(default=16, ge=2, le=1 << 22)
    """Points, s: 16 are four bits a number."""
    by: By = "slot"
    """Whether a whole slot has one range, or each of its leaves."""

    def error(self, d: int, *, turned: bool) -> float:
        """Return the bound of Theorem 2, or of a vector that was turned that of Theorem 3."""
        of_all = d / (2 * (self.levels - 1) ** 2)
        return min(of_all, (2 * math.log(d) + 2) / (self.levels - 1) ** 2) if turned else of_all

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the points."""
        return by_vector(send, key, self.by, self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        least, span = x.min(), x.max() - x.min()
        y = least + _rounded(x - least, span, self.levels - 1, key)
        return Vector(None, lambda _: y, len(x) + 2, len(x) * width(self.levels) + 2 * float_bits(x))


class Sign(Options):
    """The sign of each number, and their mean absolute value (Karimireddy et al. 2019)."""

    last: ClassVar[bool] = True
    partial: ClassVar[bool] = True
    by: By = "slot"
    """Whether a whole slot has one mean, or each of its leaves."""
    error_feedback: bool = False
    """Each client remembers what was lost, and adds it next time; the paper's does."""

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the signs."""
        return by_vector(send, key, self.by, self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        mean = x.abs().mean()
        y = torch.where(x >= 0, mean, -mean)
        return Vector(None, lambda _: y, len(x) + 1, len(x) + float_bits(x))


def _rounded(x: Tensor, norm: Tensor, levels: int, key: Key) -> Tensor:
    """Return x (d,), at most ``norm`` in absolute value, at a neighbouring one of so many levels, drawn so that the mean is x."""
    exact = x.abs() / torch.where(norm > 0, norm, 1.0) * levels
    level = (exact + rng.uniform(key, x.shape, x.dtype)).floor().clamp(max=levels)
    return level * (norm / levels) * x.sign()
