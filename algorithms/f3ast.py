"""F3AST and FedLaAvg: servers that see who is online, and choose among them.

Ribero, Vikalo & de Veciana, "Federated learning under intermittent client availability and time-varying communication
constraints", IEEE Journal of Selected Topics in Signal Processing 2022, Algorithm 1.

    paper     here
    A_t       those of the cohort that are online (``Round.online``)
    p_i       the client's part of all: 1/N, or its part of the examples
    M_t       select
    r_i       Rates: how often the client is selected, smoothed; select * p_i at first
    beta      beta

    select the M of A_t with the largest p_i^2 / r_i^2;  r <- (1 - beta) r + beta [selected];
    x <- x + sum over those selected of (p_i / r_i) Delta_i

The authors' code divides the sum by M once more, though their r tends to a sum of M; this is the formula.

Yan, Niu, Ding, Zheng, Wu, Chen, Tang & Wu, "Distributed non-convex optimization with sublinear speedup under intermittent client
availability", 2020 (FedLaAvg): of those online, the K that have not been heard for longest, and a memory of all, as MIFA's.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.fedau import Counts
from fedfleet.algorithms.local import gradient, local_training, send_change
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.author import (
    Algorithm,
    Cohort,
    ConfigError,
    Key,
    Mean,
    Message,
    Phase,
    Problem,
    Round,
    T,
    Task,
    Total,
    Tree,
    View,
)


class ChoosingOptions(LocalOptions):
    """Options of servers that choose among those online."""

    select: int = Field(default=10, ge=1)
    """Clients that work, of those of ``cohort.size`` that are online, M; all, if there are fewer."""
    weight: Literal["num_examples", "uniform"] = "num_examples"
    """What each client is of all."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class F3astOptions(ChoosingOptions):
    """Options of F3AST."""

    beta: float = Field(default=0.01, gt=0, le=1)
    """How fast rates follow."""


class Rates(NamedTuple):
    """Of clients that were selected once, (n,) int64 rising: r (n,) float64 after round ``at`` (n,) int64, since which it falls."""

    clients: Tensor
    rate: Tensor
    at: Tensor

    def now(self, clients: Tensor, first: Tensor, beta: float, t: int) -> Tensor:
        """Return r (S,) before round t; ``first`` (S,) is what it began at."""
        result, rate = torch.full_like(clients, -1), first.clone()
        at = torch.searchsorted(self.clients, clients).clamp(max=max(0, len(self.clients) - 1))
        if len(self.clients):
            known = self.clients[at] == clients
            rate, result = torch.where(known, self.rate[at], rate), torch.where(known, self.at[at], result)
        return rate * (1 - beta) ** (t - 1 - result).double()

    def after(self, clients: Tensor, rate: Tensor, t: int) -> Rates:
        """Return the rates after round t, in which these clients came to these rates."""
        every, place = torch.cat([self.clients, clients]).unique(return_inverse=True)
        old, new = place[: len(self.clients)], place[len(self.clients) :]
        rates, at = torch.zeros(len(every), dtype=torch.float64), torch.zeros_like(every)
        rates[old], at[old] = self.rate, self.at
        rates[new], at[new] = rate, t
        return Rates(every, rates, at)


class State(NamedTuple):
    """The model and what is known of clients."""

    z: Tree
    known: Any


def of_all(clients: Tensor, problem: Problem, weight: str) -> Tensor:
    """Return what each client is of all (S,) float64."""
    if weight == "uniform" or problem.num_examples is None:
        return torch.full(clients.shape, 1 / problem.clients, dtype=torch.float64)
    return problem.num_examples(clients).double() / (problem.clients * problem.mean_examples)


def check(options: ChoosingOptions, cohort: CohortOptions) -> None:
    """Refuse to choose more than are asked. Raises ConfigError."""
    if options.select > cohort.size:
        raise ConfigError(
            f"algorithm.select={options.select}: it chooses among those of cohort.size={cohort.size} clients that are online: "
            f"lower it, or raise cohort.size"
        )


def online(rnd: Round, size: int) -> Tensor:
    """Return the clients of a cohort that are online."""
    pool = rnd.invite(size)
    return pool.clients[rnd.online(pool)]


def invited(clients: Tensor, weights: Tensor | None = None) -> Cohort:
    """Return a cohort of these clients."""
    return Cohort(clients, torch.zeros_like(clients), weights)


def f3ast(options: F3astOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build F3AST. Raises ConfigError."""
    check(options, cohort)

    work = local_training(options.plan(), gradient, options.client_optimizer.build(), send_change)
    train = Phase(name="train", work=work, reduce={"dz": Total()}, dated=True, reweighted=True)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        none = torch.zeros(0, dtype=torch.int64)
        return State(z, Rates(none, none.double(), none))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message(send={"z": state.z}, config={"lr": options.rates(rnd.index, task.parts)})
        here = online(rnd, cohort.size)
        p = of_all(here, rnd.problem, options.weight)
        r = state.known.now(here, options.select * p, options.beta, rnd.index)
        chosen = (p / r).argsort(descending=True, stable=True)[: options.select].sort().values
        rate = (1 - options.beta) * r[chosen] + options.beta
        selected = invited(here[chosen], p[chosen] / rate)
        result = rnd.map_reduce(train, shared=shared, cohort=selected)
        return State(T.add(state.z, result["dz"]), state.known.after(selected.clients, rate, rnd.index)), {}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)})


class FedLaAvgOptions(ChoosingOptions):
    """Options of FedLaAvg."""

    correction: Correction = Correction(kind="mifa")
    """How those that do not work are stood for: by what they last sent."""

    @model_validator(mode="after")
    def _corrects(self) -> FedLaAvgOptions:
        how = self.correction
        if how.asks is not None or how.count == "invitations":
            asked = "chances=True" if how.chances else f"kind={how.kind!r}" if how.asks else f"count={how.count!r}"
            raise ValueError(
                f"correction.{asked}: FedLaAvg chooses among those online by when they were last heard, so no chance of being "
                f"online is that of an answer: take mifa, fedvarp or fedau by intervals"
            )
        return self


def fedlaavg(options: FedLaAvgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedLaAvg. Raises ConfigError."""
    check(options, cohort)
    work = local_training(options.plan(), gradient, options.client_optimizer.build())
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z")

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, Counts.nothing())

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message(send={"z": state.z}, config={"lr": options.rates(rnd.index, task.parts)})
        here = online(rnd, cohort.size)
        known = state.known.with_new(here)
        last = known.last[torch.searchsorted(known.clients, here)]
        oldest = here[last.argsort(stable=True)[: options.select].sort().values]
        result = rnd.map_reduce(train, shared=shared, cohort=invited(oldest))
        now = torch.full_like(result.received, rnd.index)
        return State(result["z"], known.answered(result.received, now, None)), {}

    made = Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, buffers=True)
    return correcting(options.correction, made, "train", "z", model=True, rates=True)
