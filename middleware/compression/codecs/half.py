"""Sixteen bits a number: IEEE 754's binary16, |x - C(x)| <= 2^-11 |x| from 2^-14 to 65504, or bfloat16, 2^-8 |x|.

A number above binary16's largest becomes infinite, which a client is at fault for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import Options, Vector, by_vector
from fedfleet.simulator.author import Encoding, Key, Slots


class Half(Options):
    """Floats of half the width, rounded to the nearest: IEEE 754's binary16."""

    last: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float16
    error_feedback: bool = False
    """Each client remembers what was lost, and adds it next time."""

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the rounded numbers."""
        return by_vector(send, key, "leaf", self._vector)

    def _vector(self, x: Tensor, key: Key) -> Vector:
        y = x.to(self.dtype).to(x.dtype)
        return Vector(None, lambda _: y, len(x), 16 * len(x))


class Brain(Half):
    """The same, with eight bits of exponent: bfloat16."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
