"""Secure aggregation: a server that sees only the sum asks each client for numbers in a range, as integers, masked.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017 (SecAgg), and Bell,
Bonawitz, Gascón, Lepoint & Raykova, "Secure single-server aggregation with (poly)logarithmic overhead", CCS 2020
(SecAgg+).

    paper        here
    n            clients that advertise keys
    t            ``needed``: shares that rebuild a secret
    k            neighbours
    R            2 ** modulus_bits, of weights 2 ** weight_bits
    m            numbers, with a weight

Of a slot a client sends d: a model's difference, or the slot itself. The server gets sum_i q_i mod R and sum_i w_i:

    q = round(clip(d, -C, C) w / (W s)),  s = C / (2^(bits - 1) - 1),  w its weight, at most W; or w = W = 1
    mean of d = s W sum q / sum w

This simulates what that does to numbers, bytes and time. Nothing here keeps a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Rounding = Literal["stochastic", "nearest", "toward_zero"]
WEIGHT, CLIPPED, ROUNDED = "secure weight", "secure clipped", "secure rounded"
"""Slots beside an algorithm's: a client's weight, masked as all is; and, not sent, how many of its numbers were out of range, and
(2,) how many were rounded to 0, and how many were not 0 before."""
COUNTED = (CLIPPED, ROUNDED)
LARGEST_BITS = 52
"""Bits of the modulus up to which float64 adds integers exactly."""


@dataclass(frozen=True, kw_only=True)
class Secure:
    """How the messages of a phase are added up so that nobody sees one of them.

    Attributes:
        threshold: share of those who hold parts of a secret that it takes to rebuild it; two at the least.
        neighbours: clients with which each agrees on masks (SecAgg+), an even number; None for all (SecAgg).
        bits: of each number before the sum.
        rounding: to the integers.
        clip: slot -> range C of its numbers; all slots that are sent.
        weighted: the slots that count by the client's number of examples.
        weight_bound: W, at which a client's weight is cut.
        most: clients of a sum, at most; the modulus follows from it.
        numbers: that a client sends, its weight with them.
        dropout: probability with which a client that is still there is gone before its next message, by what it does not
            send: "shares", "masked", "unmasking".
        mask_flop: operations a number of a mask that a client computes.
        execute: mask, share and rebuild in earnest.

    """

    threshold: float
    neighbours: int | None
    bits: int
    rounding: Rounding
    clip: Mapping[str, float]
    weighted: tuple[str, ...] = ()
    weight_bound: int = 1
    most: int
    numbers: int
    dropout: Mapping[str, float] = field(default_factory=dict)
    mask_flop: float
    execute: bool = False

    @property
    def half(self) -> int:
        """Return the largest integer that stands for a number; its negative is the least."""
        return 2 ** (self.bits - 1) - 1

    @property
    def modulus_bits(self) -> int:
        """Return the bits of R, the least power of two above 2 n times the largest integer: sums of either sign are then told."""
        return (2 * self.most * self.half).bit_length()

    @property
    def weight_bits(self) -> int:
        """Return the bits of a weight's own R, 0 where none is sent."""
        return (2 * self.most * self.weight_bound).bit_length() if self.weighted else 0

    def step(self, slot: str) -> float:
        """Return what an integer of a slot stands for."""
        return self.clip[slot] / self.half

    def bits_of(self, numbers: int) -> int:
        """Return the bits of a masked vector of so many numbers, a weight with them where one is sent."""
        return (numbers - bool(self.weighted)) * self.modulus_bits + self.weight_bits

    @property
    def message_bytes(self) -> int:
        """Return the bytes of a client's masked message."""
        return -(-self.bits_of(self.numbers) // 8)
