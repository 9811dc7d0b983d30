"""Differential privacy of single examples: the mechanism, what it refuses, the epsilon it spends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedfleet.middleware.context import Context
from fedfleet.middleware.privacy import accounting
from fedfleet.middleware.privacy.gradients import (
    Gradients,
    OtherLook,
    calls_of,
    counted,
    private_examples,
    private_plan,
)
from fedfleet.middleware.privacy.options import ExamplePrivacy
from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.block.batches import OVERFLOW, capacity, steps_of
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.work import BatchPlan, Phase
from fedfleet.tasks.targets import Loss

ALL_UP_TO = 1_000_000
"""Clients up to which each one's number of examples is looked at before a run."""
SLACK = 1e-3
"""Share of delta that is kept for batches that overflow."""


@dataclass(frozen=True, kw_only=True)
class ExampleDP:
    """What a run promises the examples of its clients, and what of it is spent.

    Attributes:
        delta, budget: as configured; the latter is epsilon that no client is to exceed.
        gradients: how they are made private.
        phases: the algorithm's.
        num_examples: of clients (S,) by their numbers.
        clients: N.
        exchanges: rounds of the whole run in which a client takes part, at most, where that is known.

    """

    delta: float
    budget: float | None
    gradients: Gradients
    phases: tuple[Phase, ...]
    num_examples: Callable[[Tensor], Tensor]
    clients: int
    exchanges: int | None

    column = "example_epsilon_spent"
    key = "example_privacy"

    def epsilon(self, state: Any) -> float:
        """Return what the client that has spent most has."""
        clients, counts = self._heard(state)
        return self.worst(self.num_examples(clients), counts)

    def allows(self, state: Any) -> bool:
        """Say whether another round, whoever is heard in it, stays within the budget."""
        if self.budget is None:
            return True
        clients, counts = self._heard(state)
        every = torch.zeros(self.clients, len(self.phases), dtype=torch.int64)
        every[clients] = counts
        possible = every + self._round
        if self.exchanges is not None and (every <= (most := self.exchanges * self._round)).all():
            possible = torch.minimum(possible, most)  # nobody is asked more often in the whole run
        return self.worst(self._sizes, possible) <= self.budget

    @cached_property
    def _round(self) -> Tensor:
        """In how many exchanges of each phase (phases,) a client may take part in a round."""
        return torch.tensor([self.gradients.exchanges.get(phase.name, 1) for phase in self.phases])

    @cached_property
    def _sizes(self) -> Tensor:
        return self.num_examples(torch.arange(self.clients))

    def _heard(self, state: Any) -> tuple[Tensor, Tensor]:
        """Return clients heard (n,), and in how many exchanges of each phase (n, phases)."""
        answered = counted(state).phases
        none = torch.zeros(0, dtype=torch.int64)
        clients = torch.cat([none, *(of.clients for of in answered.values())]).unique()
        counts = torch.zeros(len(clients), len(self.phases), dtype=torch.int64)
        for p, phase in enumerate(self.phases):
            if (of := answered.get(phase.name)) is not None:
                counts[torch.searchsorted(clients, of.clients), p] = of.times
        return clients, counts

    def worst(self, sizes: Tensor, counts: Tensor) -> float:
        """Return epsilon of the worst of clients with ``sizes`` (n,) examples, heard in ``counts`` (n, phases) exchanges."""
        if not len(sizes):
            return 0.0
        rows, stages = torch.cat([sizes[:, None], counts], 1).unique(dim=0), self._stages()
        uses = [_uses(plan, rows[:, 0], rows[:, 1 + p]) for p, plan, _ in stages]
        front = _front(*(torch.stack(each, 1) for each in zip(*uses, strict=True)))
        # All gradients of a step see one batch: together they are one release, of the root of so many times the norm.
        noise = [self.gradients.multiplier / calls**0.5 for *_, calls in stages]
        result, known = 0.0, [
            (tuple((z, q, int(n)) for z, q, n in zip(noise, rates, times, strict=True) if n), int(sum(full)))
            for rates, times, full in front
        ]  # fmt: skip
        for bound, parts, full in sorted(((self._bound(*row), *row) for row in set(known)), reverse=True):
            if bound <= result:
                break
            result = max(result, self._exactly(parts, full))
        return result

    def _bound(self, parts: accounting.Parts, full: int) -> float:
        """Return what epsilon is at most, at little cost."""
        bound = accounting.bound_of(parts, self.delta * (1 - SLACK))
        return bound if self._fits(full, bound) else max(bound, self._crowded(parts))

    def _exactly(self, parts: accounting.Parts, full: int) -> float:
        """Return epsilon, with what it takes that none of ``full`` batches, which have not room for all, ever overflows."""
        result = accounting.of_parts(parts, self.delta * (1 - SLACK) if full else self.delta)
        return result if self._fits(full, result) else self._crowded(parts)

    def _fits(self, full: int, epsilon: float) -> bool:
        """Say whether it takes no more than its share of delta that so many batches have room for all that is drawn."""
        return not full or math.log(full * OVERFLOW) + math.log1p(math.exp(min(epsilon, 700))) <= math.log(
            SLACK * self.delta
        )

    def _crowded(self, parts: accounting.Parts) -> float:
        """Return epsilon as if every example were in every batch, and might push another one out of it."""
        return accounting.of_participation(1.0, 4 * sum(n / z**2 for z, _, n in parts), self.delta)

    def _stages(self) -> list[tuple[int, BatchPlan, int]]:
        """Return of each stage the phase it belongs to, its plan, and how many gradients a step of it takes."""
        return [
            (p, private_plan(stage, self.gradients), self.gradients.calls.get((phase.name, s), 1))
            for p, phase in enumerate(self.phases)
            for s, stage in enumerate(phase.work.loops)
        ]

    def plan_text(self) -> str:
        """Return what a plan says."""
        g = self.gradients
        kind = "drawn one by one" if g.drawn else "shuffled"
        most = "as many as the client that was heard most spends"
        if self.exchanges is not None:
            counts = self.exchanges * self._round.expand(len(self._sizes), -1)
            most = f"{self.worst(self._sizes, counts):.3g} at most in the end"
        return f"noise of {g.multiplier:.4g} times a norm of {g.norm:g} on each batch, {kind}: epsilon {most}; delta {self.delta:g}"

    def summary(self, state: Any) -> dict[str, Any]:
        """Return what ``summary.json`` says."""
        clients, counts = self._heard(state)
        return {
            "epsilon": self.epsilon(state),
            "delta": self.delta,
            "budget": self.budget,
            "noise_multiplier": self.gradients.multiplier,
            "clip_norm": self.gradients.norm,
            "unit": "example",
            "neighbours": "an example of one client left out, and their number known",
            "accounting": "drawn batches" if self.gradients.drawn else "shuffled batches",
            "gradients_of_a_batch": {f"{phase}, stage {s}": n for (phase, s), n in self.gradients.calls.items()} or 1,
            "clients_heard": len(clients),
            "exchanges_most": int(counts.sum(1).max()) if len(counts) else 0,
        }


def example_dp(options: ExamplePrivacy, algorithm: Algorithm, about: Context) -> tuple[Algorithm, ExampleDP]:
    """Return an algorithm that keeps the promise that is configured, and the promise, noise found. Raises ConfigError."""
    name, problem = about.name, about.problem
    assert problem.num_examples is not None
    _check(options, about.task, problem)
    gradients = Gradients(options.clip_norm, options.noise_multiplier or 1.0, options.batches == "drawn", {})
    calls, result = _tried(algorithm, gradients, about)
    exchanges = {phase: n for phase, n in result.times.items() if n > 1}
    in_turn = options.epsilon is not None and _in_turn(about, len(algorithm.phases))
    invites = about.cohort.size if in_turn else None
    made = ExampleDP(
        delta=options.delta,
        budget=options.epsilon,
        gradients=gradients._replace(calls=calls, exchanges=exchanges, invites=invites),
        phases=algorithm.phases,
        num_examples=problem.num_examples,
        clients=problem.clients,
        exchanges=_exchanges(about, len(algorithm.phases)),
    )
    if options.epsilon is not None and (
        why := _void(about, len(algorithm.phases), max(result.times.values(), default=1))
    ):
        raise ConfigError(
            f"example_privacy.epsilon={options.epsilon:g}: {why}, so that a round may be aborted when clients have already "
            f"answered, and begin again, nobody knows how often: give noise_multiplier alone, or leave that out"
        )
    if options.epsilon is not None and result.repeated:
        raise ConfigError(
            f"example_privacy.epsilon={options.epsilon:g}: {name} may hear a client several times in a round, so that nobody knows "
            f"before what a round spends: give noise_multiplier alone"
        )
    if options.noise_multiplier is None:
        made = _with_noise(options, about, made)
    if about.rounds and not made.worst(made._sizes, made._round.expand(len(made._sizes), -1)) <= (
        options.epsilon or float("inf")
    ):
        raise ConfigError(
            f"example_privacy.epsilon={options.epsilon:g}: the first round could spend more with "
            f"example_privacy.noise_multiplier={options.noise_multiplier:g}: raise one of them, or leave the multiplier out"
        )
    return private_examples(algorithm, made.gradients), made


def _with_noise(options: ExamplePrivacy, about: Context, made: ExampleDP) -> ExampleDP:
    """Return the promise with the least noise that keeps it. Raises ConfigError where nobody knows before."""
    if made.exchanges is None:
        raise ConfigError(
            f"example_privacy.epsilon={options.epsilon:g}: how often selection.kind={about.selection!r} asks one client "
            f"is not known before: invite all clients, set selection.kind=round_robin, or give example_privacy.noise_multiplier "
            f"too, with which the run ends in time"
        )
    assert options.epsilon is not None
    counts = made.exchanges * made._round.expand(len(made._sizes), -1)

    def noised(z: float) -> ExampleDP:
        return replace(made, gradients=made.gradients._replace(multiplier=z))

    spends = lambda z: noised(z).worst(made._sizes, counts)  # noqa: E731
    return noised(accounting.least_multiplier(options.epsilon, spends, "example_privacy.epsilon"))


def _exchanges(about: Context, phases: int) -> int | None:
    """Return in how many exchanges of each phase a client takes part at most; None where anybody may be asked any time."""
    invited, clients = about.invited, about.problem.clients
    if invited >= clients:
        return about.rounds
    return -(-about.rounds * invited // clients) if _in_turn(about, phases) else None


def _in_turn(about: Context, phases: int) -> bool:
    """Say whether some of the clients are asked in a round, one after the other."""
    return about.invited < about.problem.clients and about.selection == "round_robin" and phases == 1


def _tried(algorithm: Algorithm, gradients: Gradients, about: Context) -> tuple[Mapping[tuple[str, int], int], Seen]:
    """Return how many gradients steps take of one batch, and what a trial has seen. Raises ConfigError."""
    result: list[Seen] = []
    fix = "leave example_privacy out, or choose fedavg, scaffold or another that takes gradients alone"

    def trial(calls: Mapping[tuple[str, int], int]) -> None:
        result.append(
            about.tried(
                private_examples(
                    algorithm,
                    gradients._replace(
                        calls=calls, exchanges=dict.fromkeys((p.name for p in algorithm.phases), 1 << 30)
                    ),
                )
            )
        )

    try:
        return calls_of(trial), result[-1]
    except ConfigError:
        raise
    except FedfleetError as e:
        why = f"it {e.__cause__}, which nothing hides" if isinstance(e.__cause__, OtherLook) else one_line(e)
        raise ConfigError(f"example_privacy: {about.name}: {why}: {fix}") from None


def _check(options: ExamplePrivacy, task: Task, problem: Problem) -> None:
    """Refuse what would not hide examples. Raises ConfigError."""
    if problem.clients > ALL_UP_TO:
        raise ConfigError(
            f"example_privacy: it looks at every client's number of examples, of {ALL_UP_TO:,} at most: take fewer"
        )
    most = int(problem.num_examples(torch.arange(problem.clients)).max()) if problem.num_examples else 1
    if options.delta * most >= 1:
        raise ConfigError(
            f"example_privacy.delta={options.delta:g}: telling one of a client's {most:,} examples at random would keep that "
            f"promise: give less than {1 / most:.3g}"
        )
    if isinstance(loss := getattr(task, "loss", None), Loss) and (loss.weighted or loss.total):
        how = "adds up the examples of a batch" if loss.total else "weighs examples by their classes"
        raise ConfigError(
            f"example_privacy: loss={loss.name} {how}, and each example's gradient is clipped by itself: choose one with neither "
            f"weight nor reduction='sum'"
        )


def _void(about: Context, phases: int, times: int) -> str | None:
    """Return why a round may be aborted although clients have answered, if it may; ``times`` is how often it asks in a phase."""
    if (least := about.cohort.min_responses) > 1:
        return f"cohort.min_responses={least} asks for several answers"
    if about.aborts is not None:
        return about.aborts
    if about.cohort.deadline_s is not None:
        return f"all answers may come after cohort.deadline_s={about.cohort.deadline_s:g}"
    several = phases > 1 or times > 1
    if several and (kind := about.availability.name) != "always":
        return f"availability.kind={kind!r} may leave nobody for the second exchange of a round"
    if several and (about.devices.own or about.devices.fails):
        return "devices may fail, all of them, in the second exchange of a round"
    return None


def _uses(plan: BatchPlan, sizes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of clients how probably an example is in a batch (n,), in how many it may be (n,), and how many have not room for all.

    All are float64.
    """
    steps, an_epoch = steps_of(plan, sizes)
    if plan.drawn:
        assert plan.size is not None
        times = (counts * steps).double()
        return plan.size / sizes.double().clamp(min=plan.size), times, times * (sizes > capacity(plan.size))
    passes = (steps * plan.per_step + an_epoch - 1).div(an_epoch, rounding_mode="floor")
    return torch.ones(len(sizes), dtype=torch.float64), (counts * passes).double(), torch.zeros(len(sizes)).double()


def _front(*columns: Tensor) -> list[list[list[float]]]:
    """Return the rows of columns (n, stages) that no other row is as high as in everything."""
    kept: list[int] = []
    together = torch.cat(columns, 1)
    for i in (columns[0] * columns[1]).sum(1).argsort(descending=True, stable=True).tolist():
        if not (kept and (together[kept] >= together[i]).all(1).any()):
            kept.append(i)
    return [[c[i].tolist() for c in columns] for i in kept]
