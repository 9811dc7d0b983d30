"""Parts of a run as users write them, named as ``tests.front.experiments.own_parts:…`` or copied beside a configuration."""

import itertools
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import BaseModel, Field, model_validator

import fedfleet
from fedfleet.author import (
    Algorithm,
    AveragingOptions,
    Encoding,
    LocalOptions,
    Mean,
    Message,
    Phase,
    T,
    View,
    gradient,
    local_training,
    rng,
)
from fedfleet.simulator.fleet.devices import Times


@dataclass
class Coin:
    """As bernoulli."""

    rate: Annotated[float, Field(gt=0, le=1)] = 0.9
    seed: int = 0

    def online(self, key, clients, seconds):
        return rng.bernoulli(rng.fold(key, "online", clients), self.rate)


class Even(BaseModel):
    """As uniform, from the first clients alone."""

    feedback: bool = False
    first: int = Field(default=12, ge=1)
    least: int = 1

    @model_validator(mode="after")
    def _in_order(self):
        if self.least > self.first:
            raise ValueError("least is above first")
        return self

    def init(self):
        return None

    def observe(self, state, heard):
        return state

    def invite(self, state, key, size, problem, *, replace):
        return rng.sample(key, min(self.first, problem.clients), size, replace=replace), state


class Homogeneous:
    """As alike."""

    failures_per_hour = 0.0

    def __init__(self, median_s=1.0):
        self.median_s = median_s

    def times(self, key, clients, load):
        whole = self.median_s * torch.exp(0.5 * rng.normal(rng.fold(key, "seconds", clients), (), torch.float64))
        return Times(torch.where(load.steps > 0, 0.0, whole), whole / load.steps.clamp(min=1))


def half(error_feedback=False):
    """As fp16, whose bits nobody counts."""
    return Rounded(error_feedback)


@dataclass(frozen=True)
class Rounded:
    error_feedback: bool

    def encode(self, send, key, shared):
        rounded = {s: {n: x.to(torch.float16).to(x.dtype) for n, x in v.items()} for s, v in send.items()}
        return Encoding(rounded, lambda rest: rest)


@dataclass(frozen=True)
class Wrong:
    """Sends what it is given, of which the server makes something else."""

    how: str
    error_feedback: bool = False

    def encode(self, send, key, shared):
        change = {
            "scalar": lambda rest: {s: {n: x.sum() for n, x in v.items()} for s, v in rest.items()},
            "whole": lambda rest: {s: {n: x.to(torch.int64) for n, x in v.items()} for s, v in rest.items()},
            "less": lambda rest: {s: dict(list(v.items())[1:]) for s, v in rest.items()},
            "more": lambda rest: {s: {**v, "more": torch.zeros(1)} for s, v in rest.items()},
            "slots": lambda rest: {},
            "nothing": lambda rest: None,
        }
        return Encoding(send, change[self.how])


def digits(data_dir, clients, seed, *, rows=400):
    from fedfleet.datasets.digits import load

    found = load(data_dir)
    return fedfleet.Dataset("digits", found.train.rows(torch.arange(rows)), found.test)


class Stop(fedfleet.Callback):
    """Stops after so many rounds, and says when it began, and where it ended."""

    told = []  # noqa: RUF012

    def __init__(self, rounds=2):
        self.rounds = rounds

    def start(self, run):
        self.told.append(f"start {run.done}")

    def round(self, row, phases):
        return "enough\nseen" if row["round"] + 1 == self.rounds else None

    def end(self, summary):
        self.told.append(f"end {summary['rounds']}")


class Heat(AveragingOptions):
    """Options of local steps along heated gradients."""

    heat: float = Field(default=1.0, gt=0)
    """What gradients are multiplied by."""


def heated(options: "Heat", task, cohort, *, power=1):
    """Return FedAvg of heated gradients."""

    def direction(ops, shared, local, batch, at, key):
        return T.scale(options.heat**power, gradient(ops, shared, local, batch, at, key))

    work = local_training(options.plan(), direction, options.client_optimizer.build())
    phase = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z")

    def round_(z, rnd):
        shared = Message(send={"z": z}, config={"lr": options.rates(rnd.index, task.parts)})
        return rnd.map_reduce(phase, shared=shared, cohort=rnd.invite(cohort.size))["z"], {}

    return Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)})


def unheated(options: LocalOptions, task, cohort):
    return heated(Heat(lr=options.lr), task, cohort)


def plain(task, cohort, lr=0.1):
    return heated(Heat(lr=lr), task, cohort)


# What will not do
def lacking(options: "Heated", task, cohort):  # pyright: ignore[reportUndefinedVariable]  # noqa: F821
    raise AssertionError("it is not called")


def forgotten(task):
    """Make an algorithm, and return nothing."""


def unsaid(options, task, cohort):
    raise AssertionError("it is not called")


class Sourced(LocalOptions):
    source: int = 1


def clashing(options: Sourced, task, cohort):
    raise AssertionError("it is not called")


@dataclass
class Counting(Coin):
    """Answers otherwise the more often it is asked."""

    asked: list = field(default_factory=list)

    def online(self, key, clients, seconds):
        self.asked.append(1)
        return rng.bernoulli(rng.fold(key, len(self.asked), clients), self.rate)


class Global(Coin):
    def online(self, key, clients, seconds):
        return torch.rand(len(clients)) < self.rate


class Together(Coin):
    """Of those who are asked about, the first half."""

    def online(self, key, clients, seconds):
        return torch.arange(len(clients)) < len(clients) / 2


class Numbers(Coin):
    def online(self, key, clients, seconds):
        return torch.ones(len(clients))


class Turning(Coin):
    """In rounds, of which one will not do."""

    def during(self, round):
        return Coin(self.rate) if round < 100 else Together(self.rate)


class Sure(Coin):
    """Surer than sure."""

    varies = False

    def chance(self, clients, seconds, lasting):
        return torch.full((len(clients),), 1.5, dtype=torch.float64)

    def long_run(self, clients):
        return torch.ones(len(clients), dtype=torch.float64)


RATES = itertools.cycle((0.1, 0.9))


def unlike():
    """Another one each time."""
    return Coin(next(RATES))


class Backwards(Homogeneous):
    def times(self, key, clients, load):
        found = super().times(key, clients, load)
        return Times(found.fixed, -found.step)


class Nobody(Even):
    def invite(self, state, key, size, problem, *, replace):
        return torch.full((size,), problem.clients), state


class Twice(Even):
    def invite(self, state, key, size, problem, *, replace):
        return torch.zeros(size, dtype=torch.int64), state


class Writing(Even):
    def init(self):
        return {"seen": torch.zeros(1)}

    def invite(self, state, key, size, problem, *, replace):
        state["seen"] += 1
        return super().invite(None, key, size, problem, replace=replace)[0], state


class Drawn(Rounded):
    def encode(self, send, key, shared):
        noisy = {s: {n: x + 1e-3 * torch.randn_like(x) for n, x in v.items()} for s, v in send.items()}
        return Encoding(noisy, lambda rest: rest)


def whole():
    return torch.zeros(3)
