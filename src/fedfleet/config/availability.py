"""Options of ``availability``: who can be reached, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from fedfleet.config import rounds
from fedfleet.config.rounds import Context, Follows, OnlineOptions
from fedfleet.datasets.trace import client_numbers, read_trace
from fedfleet.simulator.fleet import availability as models
from fedfleet.simulator.fleet.online import correlated, labels
from fedfleet.simulator.fleet.online import diurnal as daily
from fedfleet.simulator.fleet.online import trace as recorded
from fedfleet.simulator.fleet.online.markov import Markov
from fedfleet.simulator.fleet.online.random_rate import RandomRate
from fedfleet.simulator.registry import ByPath, Entry, Options, Registry

MeanSeconds = Annotated[float, Field(ge=1e-3, le=1e12)]


class InPhasesOptions(OnlineOptions):
    """Options of a model that draws afresh in every phase, whatever the time."""

    clocked: ClassVar[bool] = False


class AlwaysOptions(InPhasesOptions):
    """Every client is online, always."""

    alike: ClassVar[bool] = True


class BernoulliOptions(InPhasesOptions):
    """Each client is online with a fixed probability, afresh in every phase."""

    alike: ClassVar[bool] = True
    rate: float = Field(default=0.9, gt=0, le=1)
    """Probability of being online."""


class RandomRateOptions(InPhasesOptions):
    """Each client is online with probability p_t, afresh in every phase, and p_t itself is drawn afresh from (low, high]."""

    alike: ClassVar[bool] = True
    low: float = Field(default=0.5, ge=0, le=1)
    """Lower end of p_t."""
    high: float = Field(default=1.0, gt=0, le=1)
    """Upper end of p_t."""

    @model_validator(mode="after")
    def _in_order(self) -> RandomRateOptions:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}: lower it")
        return self


class MarkovOptions(OnlineOptions):
    """Each client goes on and off at random, for exponential times."""

    mean_on_s: MeanSeconds
    """Mean virtual seconds a client stays online."""
    mean_off_s: MeanSeconds
    """Mean virtual seconds it then stays offline."""


class DiurnalOptions(OnlineOptions):
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


class CorrelatedOptions(InPhasesOptions):
    """Clients with more examples are online more where strength is above 0, and less where it is below."""

    rate: float = Field(default=0.5, gt=0, le=1)
    """Mean of the clients' probabilities."""
    strength: float = Field(default=2.0, ge=-50, le=50)
    """How far they differ: the logit of a client's is a + strength * s, s in [-1, 1]; 0: not at all."""

    @property
    def follows(self) -> Follows:
        """Their numbers of examples."""
        return "sizes"


class LabelCorrelatedOptions(CorrelatedOptions):
    """Clients of higher class numbers, or without certain classes, are online more where strength is above 0, less below."""

    classes: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Classes whose holders are online less; s rises with the mean class number if not given."""

    @property
    def follows(self) -> Follows:
        """Their labels."""
        return "labels"


class TraceOptions(OnlineOptions):
    """Clients are online as devices of a trace were."""

    path: str
    """Parquet, a row an interval: client, start_s, end_s, and period_s if each client has its own."""
    map: Literal["seeded", "direct"] = "seeded"
    """seeded: clients are dealt to the devices of the trace; direct: the trace's clients are client numbers."""
    horizon_s: float | None = Field(default=None, gt=0)
    """Seconds after which the trace repeats; the largest end if not given, or the file's period_s."""
    shift: bool = False
    """Start each client at a moment of its own in the trace."""


class Law(NamedTuple):
    """What there is to say of a kind: who is online at t, the chance of it at t and h later, whether it is stationary, whose it is.

    Stationary is a process whose law is the same at all times.
    """

    formula: str
    chance: str
    stationary: str = "yes"
    source: str = ""

    def __str__(self) -> str:
        """Return lines."""
        rows = {"online": self.formula, "chance": self.chance, "stationary": self.stationary, "source": self.source}
        return "\n".join(f"{name + ':':11} {line}" for name, line in rows.items() if line)


def _diurnal(options: DiurnalOptions, context: Context) -> models.Availability:
    zones = None if options.zones is None else torch.tensor(options.zones, dtype=torch.float64)
    return daily.Diurnal(context.key, options.mean, options.amplitude, options.peak_hour, zones, options.day_s)


def _by_label(options: LabelCorrelatedOptions, context: Context) -> models.Availability:
    clients = labels.calibration_clients(context.population)
    propensity = correlated.by_label(context.population, clients, options.classes)
    return correlated.calibrated(propensity, clients, options.rate, options.strength)


def _by_size(options: CorrelatedOptions, context: Context) -> models.Availability:
    clients = labels.calibration_clients(context.population)
    propensity = correlated.by_size(context.population, clients)
    return correlated.calibrated(propensity, clients, options.rate, options.strength)


def _trace(options: TraceOptions, context: Context) -> models.Availability:
    intervals, table = read_trace(Path(options.path).expanduser(), options.horizon_s)
    numbers = client_numbers(table, context.population.size) if options.map == "direct" else None
    return recorded.Trace(intervals, context.key, numbers, options.shift)


Build = Callable[[Any, Context], models.Availability | models.InRounds]


def _entry(options: type[Options], build: Build, law: Law) -> Entry[Build]:
    return Entry(options, build, description=str(law))


FEDAU = "FedAU: S. Wang and M. Ji, ICLR 2024, and its code"
FEDAWE = "FedAWE: M. Xiang et al., NeurIPS 2024, and its code"
ROWS: dict[str, Entry[Build]] = {
    "always": _entry(AlwaysOptions, lambda given, context: models.Always(), Law("always", "1")),
    "bernoulli": _entry(
        BernoulliOptions,
        lambda given, context: models.Bernoulli(given.rate),
        Law("with probability rate, afresh in every phase", "rate"),
    ),
    "random_rate": _entry(
        RandomRateOptions,
        lambda given, context: RandomRate(given.low, given.high),
        Law("with p_t ~ U(low, high], drawn once a phase for all clients", "(low + high) / 2", source="p_t of CDMA"),
    ),
    "markov": _entry(
        MarkovOptions,
        lambda given, context: Markov(context.key, given.mean_on_s, given.mean_off_s),
        Law(
            "on for Exp(mean_on_s), off for Exp(mean_off_s); pi = mean_on_s / (mean_on_s + mean_off_s)",
            "pi (pi + (1 - pi) exp(-lambda h)), lambda = 1 / mean_on_s + 1 / mean_off_s",
        ),
    ),
    "diurnal": _entry(
        DiurnalOptions,
        _diurnal,
        Law(
            "while p(t) = mean + amplitude cos(2 pi (t - peak) / day) is above a threshold of the client's and day's own",
            "min(p(t), p(t + h)); p(t) p(t + h) where a trough lies between",
            "no: p(t) follows the hour; over zones uniform over the day, yes",
        ),
    ),
    "label_correlated": _entry(
        LabelCorrelatedOptions, _by_label, Law("with logit p_c = a + strength s_c, afresh in every phase", "p_c")
    ),
    "size_correlated": _entry(
        CorrelatedOptions, _by_size, Law("with logit p_c = a + strength s_c, afresh in every phase", "p_c")
    ),
    "trace": _entry(
        TraceOptions,
        _trace,
        Law(
            "in the intervals of the client's device, again and again",
            "share of the period in which it is online at t and at t + h",
            "no; with shift: true, yes",
        ),
    ),
    "independent": _entry(
        rounds.IndependentOptions,
        rounds.independent,
        Law("in round t with p_c, the rate of rates, afresh in every round", "p_c", source=f"{FEDAU}; MIFA; FedAWE"),
    ),
    "markov_rounds": _entry(
        rounds.MarkovRoundsOptions,
        rounds.markov,
        Law("P(off -> on) = a = off_to_on, P(on -> off) = b = a (1 / p_c - 1); b > 1: b = 1", "p_c", source=FEDAU),
    ),
    "cyclic": _entry(
        rounds.CyclicOptions,
        rounds.cyclic,
        Law(
            "for A = max(1, round(cycle p_c)) rounds, then off for B = max(1, cycle - A), and again",
            "A / (A + B): the moment counts as unknown",
            "yes; with start: off, no",
            FEDAU,
        ),
    ),
    "sine": _entry(
        rounds.SineOptions,
        rounds.sine,
        Law(
            "in round t with p_c (depth sin(2 pi t / period) + 1 - depth), 0 where that is under below",
            "of the round; in the long run (1 - depth) p_c, without below",
            "no",
            FEDAWE,
        ),
    ),
    "staircase": _entry(
        rounds.StaircaseOptions,
        rounds.staircase,
        Law(
            "with p_c and low p_c by turns, rounds each",
            "of the round; in the long run (1 + low) / 2 p_c",
            "no",
            FEDAWE,
        ),
    ),
    "f3ast": _entry(
        rounds.F3astOptions,
        rounds.f3ast,
        Law(
            "in round t with p_c (depth sin(2 pi (t mod period) / (period - 1)) + level)",
            "of the round; in the long run level p_c",
            "no",
            "F3AST: M. Ribero et al., 2022, and its code",
        ),
    ),
    "outages": _entry(
        rounds.OutagesOptions,
        rounds.outages,
        Law("with p_c while its region, a chain of share up and lag correlation, is up", "up p_c", source="fedfleet"),
    ),
    "blocks": _entry(
        rounds.BlocksOptions,
        rounds.blocks,
        Law(
            "group floor(c groups / clients) in its turn of so many rounds",
            "1 / groups: the moment counts as unknown",
            "no",
            "S. Wang and M. Ji, NeurIPS 2022, and their code",
        ),
    ),
    "alternating": _entry(
        rounds.AlternatingOptions,
        rounds.alternating,
        Law(
            "one half of the clients for so many rounds, then the other for ratio times as many",
            "share of the period: the moment counts as unknown",
            "no",
            "FedLaAvg: Y. Yan et al., 2020, and its code",
        ),
    ),
}
"""Their ``build`` raises ConfigError, or DataError for a file, also where nobody could ever be reached."""
AVAILABILITY = Registry("availability", ROWS, default="always", group="fedfleet.availability")


def known(given: OnlineOptions | ByPath) -> OnlineOptions | None:
    """Return the options of a model of availability; None of an author's own, of which nobody knows what it goes by."""
    return given if isinstance(given, OnlineOptions) else None
