"""Norms that are bounded, and noise that hides one client among the others.

McMahan, Ramage, Talwar & Zhang, "Learning differentially private recurrent language models", ICLR 2018, Section 3 ("flat clipping",
over all parts of a message together):

    C(x) = x min(1, S / |x|)

The server clips what it has decoded once more, so that no transform in between makes it longer than S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.simulator.author import Code, Key, Slots, normals, rng
from fedfleet.transforms.vectors import Options

NORM, SHARE, WITHIN = "clip_norm", "noise_share", "within_clip_norm"
"""Scalars by which the server tells the bound, where it changes, and a client's part of the noise, its standard deviation over the
bound; and by which a client tells whether its message was within it.
"""


class Clip(Options):
    """Everything that a client sends shortened to a norm, if it is longer (McMahan et al. 2018)."""

    norm: float = Field(gt=0)
    """Largest Euclidean norm of all that a client sends in an exchange, S, or of each slot of it."""
    by: Literal["message", "slot"] = "message"
    """Whether all that is sent has one norm, or each slot, such as SCAFFOLD's changes of the model and of the control."""

    @property
    def feedback(self) -> bool:
        """Never."""
        return False

    @property
    def linear(self) -> bool:
        """Always: leaves are multiplied by a number."""
        return True

    def code(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Code:
        """Return the message shortened, which the server shortens once more."""
        if self.by == "message":
            return _clipped(send, self.norm)
        return Code(self._each(send), self._each)

    def _each(self, send: Slots) -> Slots:
        return {slot: shortened({slot: leaves}, self.norm)[slot] for slot, leaves in send.items()}


class Hidden(Clip):
    """A clipped message of a run with differential privacy: its client's share of the noise, and whether it was within the norm."""

    noisy: bool = False
    """Add a part of the noise, as large as the server says; nothing may come after it then."""
    tells: bool = False
    """The norm follows a quantile of norms: take it as the server tells it, and tell whether the message was within it."""

    @property
    def linear(self) -> bool:
        """Where no noise is added."""
        return not self.noisy

    def code(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Code:
        """Return the message shortened, with noise or to be shortened once more, and what is told of its norm."""
        # Where the norm stays, a scalar of that name is the algorithm's own.
        bound = shared.get(NORM, self.norm) if self.tells else self.norm
        told = {WITHIN: (length(send) <= bound).to(torch.float64)} if self.tells else {}
        if not self.noisy:
            return _clipped(send, bound, told)
        std = shared[SHARE] * bound
        noisy = {
            slot: {
                name: leaf + normals(rng.fold(key, slot, name), tuple(leaf.shape)).to(leaf.dtype) * std
                for name, leaf in leaves.items()
            }
            for slot, leaves in shortened(send, bound).items()
        }
        return Code(noisy, lambda rest: rest, told=told)


def _clipped(send: Slots, norm: Any, told: Mapping[str, Tensor] | None = None) -> Code:
    """Return the message shortened, which is shortened once more if something comes after it."""
    short = shortened(send, norm)
    return Code(short, lambda rest: rest if rest is short else shortened(rest, norm), told=told or {})


def length(send: Slots) -> Tensor:
    """Return the Euclidean norm of all that is sent, ()."""
    each = [torch.linalg.vector_norm(x, dtype=torch.float64) for leaves in send.values() for x in leaves.values()]
    return torch.linalg.vector_norm(torch.stack(each))


def shortened(send: Slots, norm: Any) -> Slots:
    """Return slots whose norm is at most ``norm``, in the same direction; those that are within it as they are."""
    factor = (norm / length(send)).clamp(max=1.0)
    return {slot: {n: leaf * factor.to(leaf.dtype) for n, leaf in leaves.items()} for slot, leaves in send.items()}
