"""What a user may write under ``availability``: who can be reached, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from fedfleet.datasets.trace import client_numbers, read_trace
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet import availability as models
from fedfleet.simulator.fleet.online import correlated
from fedfleet.simulator.fleet.online import diurnal as daily
from fedfleet.simulator.fleet.online import trace as recorded
from fedfleet.simulator.fleet.online.markov import Markov
from fedfleet.simulator.fleet.online.random_rate import RandomRate
from fedfleet.simulator.population import Population
from fedfleet.simulator.registry import Entry, Options, Registry

MeanSeconds = Annotated[float, Field(ge=1e-3, le=1e12)]


class AlwaysOptions(Options):
    """Every client is online, always."""


class BernoulliOptions(Options):
    """Each client is online with a fixed probability, afresh in every phase."""

    rate: float = Field(default=0.9, gt=0, le=1)
    """Probability of being online."""


class RandomRateOptions(Options):
    """Each client is online with probability p_t, afresh in every phase, and p_t itself is drawn afresh from (low, high]."""

    low: float = Field(default=0.5, ge=0, le=1)
    """Lower end of p_t."""
    high: float = Field(default=1.0, gt=0, le=1)
    """Upper end of p_t."""

    @model_validator(mode="after")
    def _in_order(self) -> RandomRateOptions:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}: lower it")
        return self


class MarkovOptions(Options):
    """Each client goes on and off at random, for exponential times."""

    mean_on_s: MeanSeconds
    """Mean virtual seconds a client stays online."""
    mean_off_s: MeanSeconds
    """Mean virtual seconds it then stays offline."""


class DiurnalOptions(Options):
    """Each client is online around one hour of its own day."""

    mean: float = Field(default=0.5, ge=-1, le=2)
    """Mean over the day of the probability of being online, before it is cut off at 0 and 1."""
    amplitude: float = Field(default=0.3, ge=0, le=2)
    """How far it rises above the mean, and falls below."""
    peak_hour: float = Field(default=2.0, ge=0, le=24)
    """Local time at which most clients are online."""
    zones: Annotated[list[Annotated[float, Field(ge=-24, le=24)]], Field(min_length=1, max_length=10_000)] | None = None
    """Hours by which the clocks of clients are ahead, each as likely; uniform over the day if not given."""
    day_s: float = Field(default=86400.0, ge=1e-3, le=1e12)
    """Virtual seconds of a day; an hour is a 24th of it."""

    @model_validator(mode="after")
    def _reachable(self) -> DiurnalOptions:
        if self.mean + self.amplitude <= 0:
            raise ValueError(
                f"mean={self.mean:g} and amplitude={self.amplitude:g}: nobody would ever be online: raise one until their sum "
                f"is above 0"
            )
        return self


class CorrelatedOptions(Options):
    """Each client is online with a probability of its own, afresh in every phase."""

    rate: float = Field(default=0.5, gt=0, le=1)
    """Mean of the clients' probabilities."""
    strength: float = Field(default=2.0, ge=-50, le=50)
    """How far they differ: the logit of a client's is a + strength * s, s in [-1, 1]; 0: not at all."""


class LabelCorrelatedOptions(CorrelatedOptions):
    """Clients of high class numbers, or without certain classes, are online more."""

    classes: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Classes whose holders are online less; s rises with the mean class number if not given."""


class TraceOptions(Options):
    """Clients are online as devices of a trace were."""

    path: str
    """Parquet, a row an interval: client, start_s, end_s, and period_s if each client has its own."""
    map: Literal["seeded", "direct"] = "seeded"
    """seeded: clients are dealt to the devices of the trace; direct: the trace's clients are client numbers."""
    horizon_s: float | None = Field(default=None, gt=0)
    """Seconds after which the trace repeats; the largest end if not given, or the file's period_s."""
    shift: bool = False
    """Start each client at a moment of its own in the trace."""


class Context(NamedTuple):
    """What a model may depend on: a key of the run for availability alone, and the clients."""

    key: Key
    population: Population


def _diurnal(given: DiurnalOptions, context: Context) -> models.Availability:
    zones = None if given.zones is None else torch.tensor(given.zones, dtype=torch.float64)
    return daily.Diurnal(context.key, given.mean, given.amplitude, given.peak_hour, zones, given.day_s)


def _by_label(given: LabelCorrelatedOptions, context: Context) -> models.Availability:
    clients = correlated.calibration_clients(context.population)
    propensity = correlated.by_label(context.population, clients, given.classes)
    return correlated.calibrated(propensity, clients, given.rate, given.strength)


def _by_size(given: CorrelatedOptions, context: Context) -> models.Availability:
    clients = correlated.calibration_clients(context.population)
    propensity = correlated.by_size(context.population, clients)
    return correlated.calibrated(propensity, clients, given.rate, given.strength)


def _trace(given: TraceOptions, context: Context) -> models.Availability:
    intervals, table = read_trace(Path(given.path).expanduser(), given.horizon_s)
    numbers = client_numbers(table, context.population.size) if given.map == "direct" else None
    return recorded.Trace(intervals, context.key, numbers, given.shift)


ROWS: dict[str, Entry[Callable[[Any, Context], models.Availability]]] = {
    "always": Entry(AlwaysOptions, lambda given, context: models.Always()),
    "bernoulli": Entry(BernoulliOptions, lambda given, context: models.Bernoulli(given.rate)),
    "random_rate": Entry(RandomRateOptions, lambda given, context: RandomRate(given.low, given.high)),
    "markov": Entry(MarkovOptions, lambda given, context: Markov(context.key, given.mean_on_s, given.mean_off_s)),
    "diurnal": Entry(DiurnalOptions, _diurnal),
    "label_correlated": Entry(LabelCorrelatedOptions, _by_label),
    "size_correlated": Entry(CorrelatedOptions, _by_size),
    "trace": Entry(TraceOptions, _trace),
}
"""Their ``build`` raises ConfigError, or DataError for a file, also where nobody could ever be reached."""
AVAILABILITY = Registry("availability", ROWS, default="always", group="fedfleet.availability")
