"""Options of availability that counts in rounds: rates of clients, and processes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from fedfleet.algorithms.options import ByName, refuse_others
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import InRounds
from fedfleet.simulator.fleet.online import rates as rules
from fedfleet.simulator.fleet.online import rounds as processes
from fedfleet.simulator.fleet.online.labels import Labels
from fedfleet.simulator.population import Population
from fedfleet.simulator.registry import Options

Share = Annotated[float, Field(ge=0, le=1)]
Rounds = Annotated[int, Field(ge=1, le=10**9)]
Follows = Literal["labels", "sizes", "regions", "numbers"]
"""Properties of clients that it may hang on who is online."""
USED = {
    "constant": {"rate"}, "uniform": {"low", "high"}, "beta": {"a", "b"},
    "fedau": {"mean", "floor", "concentration"}, "fedawe": set[str](), "mifa": {"floor"}, "sizes": set[str](),
}  # fmt: skip
"""Rate rules, and which options are for them."""


class RateOptions(ByName):
    """How likely each client is online: one rate for all, or one of its own, drawn or from what it holds."""

    naming = "kind"
    kind: Literal["constant", "uniform", "beta", "fedau", "fedawe", "mifa", "sizes"] = "constant"
    """constant; uniform in [low, high); beta: Beta(a, b); fedau, fedawe, mifa: by labels; sizes: smallest over own examples."""
    rate: float | None = Field(default=None, gt=0, le=1)
    """constant: the rate; 0.5 if not given."""
    low: float | None = Field(default=None, ge=0, le=1)
    """uniform: the lower end; 0.1 if not given."""
    high: float | None = Field(default=None, gt=0, le=1)
    """uniform: the upper end; 1 if not given."""
    a: float | None = Field(default=None, gt=0, le=1e6)
    """beta: the first shape; 2 if not given."""
    b: float | None = Field(default=None, gt=0, le=1e6)
    """beta: the second shape; 2 if not given."""
    mean: float | None = Field(default=None, gt=0, le=1)
    """fedau: the mean over draws, before rates are cut off; 0.1 if not given."""
    floor: float | None = Field(default=None, ge=0, le=1)
    """fedau, mifa: the least rate; 0.02 and 0.1 if not given."""
    concentration: float | None = Field(default=None, gt=0, le=1e6)
    """fedau: of the Dirichlet draw of the classes' weights, less is further apart; 0.1 if not given."""

    @model_validator(mode="after")
    def _applies(self) -> RateOptions:
        refuse_others(self, self.kind, USED[self.kind], set().union(*USED.values()))
        if self.kind == "uniform" and self.ends[0] > self.ends[1]:
            raise ValueError(f"low={self.ends[0]:g} is above high={self.ends[1]:g}: lower it")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of uniform rates."""
        return _or(self.low, 0.1), _or(self.high, 1.0)

    @property
    def most(self) -> float:
        """What no rate is above."""
        return {"constant": _or(self.rate, 0.5), "uniform": self.ends[1]}.get(self.kind, 1.0)

    @property
    def by(self) -> Literal["labels", "sizes"] | None:
        """What of the clients' data the rates go by."""
        return "labels" if self.kind in ("fedau", "fedawe", "mifa") else "sizes" if self.kind == "sizes" else None


class OnlineOptions(Options):
    """Options of a model of availability, and what is asked of any before a run."""

    clocked: ClassVar[bool] = True
    """Whether it goes by the clock, and not by rounds or phases."""
    alike: ClassVar[bool] = False
    """Whether all clients are heard equally often under it."""

    @property
    def follows(self) -> Follows | None:
        """The property of clients that it goes by; None where that is chance and time alone."""
        return None


class InRoundsOptions(OnlineOptions):
    """Options of a process in rounds, whatever the time."""

    clocked: ClassVar[bool] = False


class RatedOptions(InRoundsOptions):
    """Options of a process that has clients' rates."""

    rates: RateOptions = Field(default=RateOptions(), validate_default=True)
    """Clients' rates: a rule's name, or that and its options."""

    @property
    def follows(self) -> Follows | None:
        """The property that the rates go by."""
        return self.rates.by


class IndependentOptions(RatedOptions):
    """Each client is online with its rate, afresh in every round."""


class MarkovRoundsOptions(RatedOptions):
    """Each client goes on and off at random from round to round; its rate is the share of the rounds it is online."""

    off_to_on: float = Field(default=0.05, ge=1e-6, le=0.5)
    """Chance of coming back after a round offline; lower for clients that would have to leave more often than each round."""


class CyclicOptions(RatedOptions):
    """Each client is on for some rounds in a row and off for the rest of a cycle, its rate the share of the cycle."""

    cycle: Rounds = 100
    """Rounds of a cycle."""
    start: Literal["anywhere", "off"] = "anywhere"
    """anywhere: clients begin at moments of their own, uniform over the cycle; off: over the rounds off, as FedAU's code does."""


class SineOptions(RatedOptions):
    """Each client is online with its rate times a sine in the round, afresh in every round."""

    depth: float = Field(default=0.3, gt=0, le=0.5)
    """The factor is depth * sin(2 pi t / period) + 1 - depth."""
    period: Annotated[int, Field(ge=2, le=10**6)] = 20
    """Rounds after which it repeats."""
    below: Share = 0.0
    """Offline where rate times factor is below that; 0.1: FedAWE's interleaved sine."""

    @model_validator(mode="after")
    def _reachable(self) -> SineOptions:
        if self.rates.most < self.below:
            raise ValueError(
                f"below={self.below:g}: rates are {self.rates.most:g} at most, so nobody would be online: lower it"
            )
        return self


class StaircaseOptions(RatedOptions):
    """Each client is online with its rate and a share of that by turns, afresh in every round."""

    low: Share = 0.4
    """The share."""
    rounds: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Rounds of each."""


class F3astOptions(RatedOptions):
    """Each client is online with its rate times F3AST's wave, afresh in every round; with rates: sizes as in its code."""

    depth: float = Field(default=0.4, gt=0, le=0.5)
    """The factor is depth * sin(2 pi (t mod period) / (period - 1)) + level."""
    level: float = Field(default=0.5, gt=0, le=1)
    """Its mean."""
    period: Annotated[int, Field(ge=3, le=10**6)] = 24
    """Rounds after which it repeats."""

    @model_validator(mode="after")
    def _a_chance(self) -> F3astOptions:
        if self.level + self.depth > 1 or self.level < self.depth:
            raise ValueError(
                f"level={self.level:g} and depth={self.depth:g}: level ± depth is to be from 0 to 1: lower depth"
            )
        return self


class OutagesOptions(RatedOptions):
    """Regions, which are the domains, fail as a whole: a client is online with its rate while its region is up."""

    up: float | list[float] = 0.8
    """Share of the rounds in which a region is up: of all, or of each; above 0, at most 1."""
    correlation: float = Field(default=0.8, ge=0, le=1 - 1e-6)
    """Of a region's states in two rounds in a row; an outage lasts 1 / (up (1 - correlation)) rounds on average."""

    @property
    def follows(self) -> Follows:
        """The property that the rates go by, or the regions."""
        return self.rates.by or "regions"

    @model_validator(mode="after")
    def _shares(self) -> OutagesOptions:
        shares = self.up if isinstance(self.up, list) else [self.up]
        if not shares or not all(0 < share <= 1 for share in shares):
            raise ValueError(f"up={self.up}: shares of rounds are above 0 and at most 1: give such")
        return self


class ByNumberOptions(InRoundsOptions):
    """Options of a process that goes by clients' numbers."""

    @property
    def follows(self) -> Follows:
        """Their numbers."""
        return "numbers"


class BlocksOptions(ByNumberOptions):
    """Groups of clients with consecutive numbers are on in turn: periodic availability."""

    groups: Annotated[int, Field(ge=2, le=10**6)] = 5
    """Groups."""
    rounds: Rounds = 100
    """Rounds of each group's turn."""
    start: Literal["anywhere", "whole"] = "anywhere"
    """anywhere: the first turn is cut short by rounds drawn once for all; whole: it is not."""


class AlternatingOptions(ByNumberOptions):
    """Two halves of the clients, by their numbers, are on in turn, the second for a shorter time: day and night."""

    rounds: Rounds = 100
    """Rounds of the first half's turn."""
    ratio: float = Field(default=0.1, gt=0, le=1)
    """The second half's turn, over the first's."""


class Context(NamedTuple):
    """What a model may depend on: a key of the run for availability alone, and the clients."""

    key: Key
    population: Population


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def rates(options: RateOptions, context: Context) -> rules.Rates:
    """Return clients' rates. Raises ConfigError where they go by labels, and there are none."""
    key, population = context.key, context.population
    if options.by == "labels":
        labels = Labels(population, f"availability.rates.kind={options.kind!r}")
        if options.kind == "fedau":
            return rules.fedau(
                key, labels, _or(options.mean, 0.1), _or(options.floor, 0.02), _or(options.concentration, 0.1)
            )
        return rules.fedawe(key, labels) if options.kind == "fedawe" else rules.mifa(labels, _or(options.floor, 0.1))
    if options.kind == "uniform":
        return rules.uniform(key, *options.ends)
    if options.kind == "beta":
        return rules.beta(key, _or(options.a, 2.0), _or(options.b, 2.0))
    return rules.sizes(population) if options.kind == "sizes" else rules.constant(_or(options.rate, 0.5))


def independent(options: IndependentOptions, context: Context) -> InRounds:
    """Return fresh draws in every round."""
    return processes.Independent(context.key, rates(options.rates, context))


def markov(options: MarkovRoundsOptions, context: Context) -> InRounds:
    """Return chains of clients' own."""
    return processes.MarkovRounds(context.key, rates(options.rates, context), options.off_to_on)


def cyclic(options: CyclicOptions, context: Context) -> InRounds:
    """Return cycles of clients' own."""
    return processes.Cyclic(context.key, rates(options.rates, context), options.cycle, options.start == "off")


def sine(options: SineOptions, context: Context) -> InRounds:
    """Return rates times a sine."""
    wave = processes.sine(options.depth, options.period)
    return processes.Waves(context.key, rates(options.rates, context), wave, options.period, options.below)


def staircase(options: StaircaseOptions, context: Context) -> InRounds:
    """Return rates, and a share of them, by turns."""
    wave = processes.staircase(options.low, options.rounds)
    return processes.Waves(context.key, rates(options.rates, context), wave, 2 * options.rounds)


def f3ast(options: F3astOptions, context: Context) -> InRounds:
    """Return rates times F3AST's wave."""
    wave = processes.f3ast(options.depth, options.level, options.period)
    return processes.Waves(context.key, rates(options.rates, context), wave, options.period)


def outages(options: OutagesOptions, context: Context) -> InRounds:
    """Return regions that fail as a whole. Raises ConfigError without regions, or with another number of shares."""
    regions = context.population.summary().domains
    if regions < 2:
        raise ConfigError(
            "availability.kind='outages': regions are the domains of clients, and all clients are of one: set domains.kind, or "
            "choose data with domains and population.partition.kind=by_domain"
        )
    up = options.up if isinstance(options.up, list) else [options.up] * regions
    if len(up) != regions:
        raise ConfigError(
            f"availability.up={up}: {len(up)} shares for {regions} regions: give one for all, or {regions}"
        )
    share = torch.tensor(up, dtype=torch.float64)
    rated = rates(options.rates, context)
    return processes.Outages(context.key, rated, context.population.domains, share, options.correlation)


def blocks(options: BlocksOptions, context: Context) -> InRounds:
    """Return groups that take turns. Raises ConfigError where there are more groups than clients."""
    size = context.population.size
    if options.groups > size:
        raise ConfigError(f"availability.groups={options.groups}: there are only {size} clients: lower it")
    most = options.rounds if options.start == "anywhere" else 1
    return processes.Turns(context.key, size, (options.rounds,) * options.groups, most)


def alternating(options: AlternatingOptions, context: Context) -> InRounds:
    """Return two halves that take turns."""
    lengths = options.rounds, max(1, round(options.ratio * options.rounds))
    return processes.Turns(context.key, context.population.size, lengths)
