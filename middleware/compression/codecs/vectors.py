"""Shared code of transforms: their options, and slots as vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor

from fedfleet.simulator import author
from fedfleet.simulator.author import Encoding, Key, Slots, rng

SEED_BITS = 64
"""What it takes to tell the other side what was drawn."""


class Options(author.Options):
    """What a transform may be told; it is the transform, too.

    ``last`` says that it leaves no floats that another transform could take, ``moves`` that those it leaves are of other
    coordinates each time, so that nothing can be remembered of them, ``turns`` that it turns what it is given at random,
    ``partial`` that what it leaves is no model any more, but may be a part of how one has moved, ``upward`` that it is for what
    clients send alone.
    """

    last: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    turns: ClassVar[bool] = False
    partial: ClassVar[bool] = False
    upward: ClassVar[bool] = False

    @property
    def least(self) -> int:
        """The floats that some slot has to have."""
        return 0

    def left(self, d: int) -> int:
        """Return how many floats it leaves of d."""
        return d

    def error(self, d: int, *, turned: bool) -> float:
        """Return the most that |C(x) - x|^2 may be on average beside |x|^2, if its mean is x; 0 if it only takes away.

        ``turned`` says that x, of d floats, has been turned at random.
        """
        return 0.0


class Unbiased(Options):
    """A transform whose mean is what it is given."""

    @property
    def error_feedback(self) -> bool:
        """Never."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _no_feedback(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("error_feedback"):
            raise ValueError(
                "error_feedback is for what loses a part (top_k, random_k, sign): here the mean is right without, and the error "
                "may be larger than what is sent, so that it would grow: leave it out"
            )
        return given


class Vector(NamedTuple):
    """One vector encoded: the residual (m,), the way back from it, and what is sent besides, as in ``Encoding``."""

    residual: Tensor | None
    decode: Callable[[Any], Tensor]
    numbers: int = 0
    bits: int = 0


def by_vector(send: Slots, key: Key, by: Literal["slot", "leaf"], code: Callable[[Tensor, Key], Vector]) -> Encoding:
    """Code each slot as one vector (n,), or each of its leaves."""
    made: dict[str, dict[str, Vector]] = {}
    for slot, leaves in send.items():
        mine = rng.fold(key, slot)
        if by == "leaf":
            made[slot] = {name: code(leaf.reshape(-1), rng.fold(mine, name)) for name, leaf in leaves.items()}
        else:
            made[slot] = {"": code(torch.cat([leaf.reshape(-1) for leaf in leaves.values()]), mine)}

    def decode(residual: Slots) -> Slots:
        result = {}
        for slot, leaves in send.items():
            flat = [
                v.decode(residual[slot][name] if v.residual is not None else None) for name, v in made[slot].items()
            ]
            if by == "slot":
                flat = flat[0].split([leaf.numel() for leaf in leaves.values()])
            result[slot] = {
                name: part.reshape(leaf.shape).to(leaf.dtype)
                for (name, leaf), part in zip(leaves.items(), flat, strict=True)
            }
        return result

    every = [v for vectors in made.values() for v in vectors.values()]
    kept = {
        s: {name: v.residual for name, v in vectors.items() if v.residual is not None} for s, vectors in made.items()
    }
    residual = {slot: leaves for slot, leaves in kept.items() if leaves}
    return Encoding(residual, decode, sum(v.numbers for v in every), sum(v.bits for v in every))


def float_bits(x: Tensor) -> int:
    """Return the bits of one of a tensor's floats."""
    return 8 * x.element_size()


def width(values: int) -> int:
    """Return the bits that tell so many values apart."""
    return math.ceil(math.log2(values)) if values > 1 else 0
