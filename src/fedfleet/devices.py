"""What a user may write under ``devices``: how long clients take to answer, and what breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import Field

from fedfleet.algorithms.options import Options
from fedfleet.simulator import devices as models
from fedfleet.simulator.population import Population
from fedfleet.simulator.rng import Key


class Failing(Options):
    """What every kind of device has."""

    failures_per_hour: float = Field(default=0.0, ge=0, le=3.6e9)
    """Failures of a device at work (crash, lost connection), exponentially distributed in virtual time."""


class Alike(Failing):
    """A client answers after median * exp(sigma * normal) virtual seconds, independently in every phase, whatever it does."""

    median_s: float = Field(default=1.0, gt=0, le=1e9)
    sigma: float = Field(default=0.5, ge=0, le=10)


class Context(NamedTuple):
    """What a model may depend on: a key of the run for devices alone, and the clients."""

    key: Key
    population: Population


class Kind(NamedTuple):
    """A kind of device: its options, and how a model is built from them. ``build`` raises ConfigError."""

    options: type[Failing]
    build: Callable[[Any, Context], models.Devices]


DEVICES: dict[str, Kind] = {
    "alike": Kind(Alike, lambda given, context: models.Alike(given.median_s, given.sigma)),
}
