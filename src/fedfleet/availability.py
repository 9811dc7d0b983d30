"""What a user may write under ``availability``: who can be reached, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import Field

from fedfleet.algorithms.options import Options
from fedfleet.simulator import availability as models
from fedfleet.simulator.population import Population
from fedfleet.simulator.rng import Key


class Always(Options):
    """Every client is online, always."""


class Bernoulli(Options):
    """Each client is online with a fixed probability, afresh in every phase."""

    rate: float = Field(default=0.9, gt=0, le=1)
    """Probability of being online."""


class Context(NamedTuple):
    """What a model may depend on: a key of the run for availability alone, and the clients."""

    key: Key
    population: Population


class Kind(NamedTuple):
    """A kind of availability: its options, and how a model is built from them. ``build`` raises ConfigError."""

    options: type[Options]
    build: Callable[[Any, Context], models.Availability]


AVAILABILITY: dict[str, Kind] = {
    "always": Kind(Always, lambda given, context: models.Always()),
    "bernoulli": Kind(Bernoulli, lambda given, context: models.Bernoulli(given.rate)),
}
