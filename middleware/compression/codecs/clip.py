"""Norms that are bounded.

McMahan, Ramage, Talwar & Zhang, "Learning differentially private recurrent language models", ICLR 2018, Section 3 ("flat clipping",
over all parts of a message together):

    C(x) = x min(1, S / |x|)

The server clips what it has decoded once more, so that no transform in between makes it longer than S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import Options
from fedfleet.simulator.author import Encoding, Key, Slots


class Clip(Options):
    """Everything that a client sends shortened to a norm, if it is longer (McMahan et al. 2018)."""

    upward: ClassVar[bool] = True
    norm: float = Field(gt=0)
    """Largest Euclidean norm of all that a client sends in an exchange, S, or of each slot of it."""
    by: Literal["message", "slot"] = "message"
    """Whether all that is sent has one norm, or each slot, such as SCAFFOLD's changes of the model and of the control."""

    @property
    def error_feedback(self) -> bool:
        """Never."""
        return False

    @property
    def linear(self) -> bool:
        """Always: leaves are multiplied by a number."""
        return True

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the message shortened, which the server shortens once more."""
        if self.by == "message":
            return clipped(send, self.norm)
        return Encoding(self._each(send), self._each)

    def _each(self, send: Slots) -> Slots:
        return {slot: shortened({slot: leaves}, self.norm)[slot] for slot, leaves in send.items()}


def clipped(send: Slots, norm: Any, told: Mapping[str, Tensor] | None = None) -> Encoding:
    """Return the message shortened, which is shortened once more if something comes after it."""
    short = shortened(send, norm)
    return Encoding(short, lambda rest: rest if rest is short else shortened(rest, norm), scalars=told or {})


def length(send: Slots) -> Tensor:
    """Return the Euclidean norm of all that is sent, (); 0 where a transform has left no floats."""
    each = [torch.linalg.vector_norm(x, dtype=torch.float64) for leaves in send.values() for x in leaves.values()]
    return torch.linalg.vector_norm(torch.stack(each or [torch.zeros((), dtype=torch.float64)]))


def shortened(send: Slots, norm: Any) -> Slots:
    """Return slots whose norm is at most ``norm``, in the same direction; those that are within it as they are."""
    factor = (norm / length(send)).clamp(max=1.0)
    return {slot: {n: leaf * factor.to(leaf.dtype) for n, leaf in leaves.items()} for slot, leaves in send.items()}
