"""Options of ``secure_aggregation``: a server that sees only the sum of a cohort's messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedfleet.middleware.facts import Break, Fact, Need
from fedfleet.simulator.registry import Options

Rate = Annotated[float, Field(ge=0, lt=1)]
Range = Annotated[float, Field(gt=0)]


class Dropout(Options):
    """Clients that go before a message of the protocol, besides those whom availability and devices make go."""

    shares: Rate = 0.0
    """Probability with which a client that has sent its keys goes before it shares its secrets: it is in nobody's masks."""
    masked: Rate = 0.0
    """Before its masked message comes: its masks are rebuilt, and taken out of the sum."""
    unmasking: Rate = 0.0
    """After that: its message is in the sum, and its parts of others' secrets are missing."""


class SecureAggregation(Options):
    """Add up clients' messages so that the server sees no single one: what that does to numbers, bytes and time."""

    protocol: Literal["secagg", "secagg_plus"] = "secagg"
    """secagg: each client agrees on masks with all others; secagg_plus: with some of them."""
    threshold: float = Field(default=0.67, gt=0, le=1)
    """Share of those who hold parts of a client's secrets that it takes to rebuild them; with fewer left the round is aborted."""
    neighbours: int | None = Field(default=None, ge=2, multiple_of=2)
    """Clients with which each agrees on masks under secagg_plus, k."""
    bits: int = Field(default=16, ge=2, le=32)
    """Bits of each number before the sum, for which the modulus has more."""
    clip: Range | Annotated[dict[str, Range], Field(min_length=1)] = 1.0
    """Range of numbers, C: all are cut to [-C, C]; of how far a model moves. Or one for each slot: of others as they are."""
    rounding: Literal["stochastic", "nearest", "toward_zero"] = "stochastic"
    """How numbers become integers; stochastic is right on average, and toward_zero makes no message longer, which privacy needs."""
    max_weight: Annotated[int, Field(ge=1)] | None = None
    """Examples at which a client's weight is cut, W; those of the client that has most if not given."""
    most_clients: Annotated[int, Field(ge=2)] | None = None
    """Clients in a sum at most, for which the modulus has room; those invited if not given, twice as many and 32 under poisson."""
    dropout: Dropout = Dropout()
    """Who goes in between, besides."""
    mask_flop: float = Field(default=8.0, ge=0)
    """Operations that a device takes for a number of a mask, where ``devices`` reckon with operations."""
    execute: bool = False
    """Mask, share and rebuild in earnest, in this process, for small cohorts: the sum is the same to the bit."""

    @model_validator(mode="after")
    def _consistent(self) -> SecureAggregation:
        if self.protocol == "secagg_plus" and self.neighbours is None:
            raise ValueError("with how many clients does each agree on masks? give neighbours")
        if self.protocol == "secagg" and self.neighbours is not None:
            raise ValueError(
                "neighbours: under secagg each agrees on masks with all: set protocol=secagg_plus, or leave it out"
            )
        return self


SECTION = "secure_aggregation"
TRIED = (Fact.ONCE, Fact.SEEN)
"""Facts that are told by a trial alone."""


def needs(options: SecureAggregation | None) -> Iterator[Need]:
    """Yield what it takes that the server sees sums alone."""
    if options is not None:
        sums = (Fact.COHORTS, Fact.SUMS, Fact.KNOWN_WEIGHTS, Fact.UNSCALED, Fact.SCALED_ONLY, Fact.OWN_MODEL)
        yield Need(SECTION, (*sums, Fact.OWN_ROUND, Fact.ALL_KEPT, Fact.FINITE, Fact.UNLOOKED, *TRIED))


def breaks(options: SecureAggregation | None) -> Iterator[Break]:
    """Yield what is taken away where the server sees sums alone, of numbers that are cut to a range and rounded."""
    if options is None:
        return
    yield Break(Fact.EACH_SEEN, "the server sees a sum alone", SECTION)
    yield Break(Fact.EXACT, "what clients send is cut to a range and rounded", SECTION)
    yield Break(Fact.UNROUNDED, "what clients send is cut to a range and rounded", SECTION)
    if options.rounding != "toward_zero":
        key = f"{SECTION}.rounding={options.rounding!r}"
        yield Break(
            Fact.NORMS, "rounded numbers may be longer than clipped", key, f"set {SECTION}.rounding=toward_zero"
        )


def aborts(options: SecureAggregation | None) -> str | None:
    """Return why a round may be aborted although clients have answered."""
    return None if options is None else f"{SECTION} needs as many clients as its threshold says"
