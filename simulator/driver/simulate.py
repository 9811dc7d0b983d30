"""The driver's loop: rounds, retries, the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfleet.simulator.algorithm import Algorithm, Problem
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.driver.memory import Memory
from fedfleet.simulator.driver.records import PhaseRecord, numbers
from fedfleet.simulator.driver.round import Conditions, EngineRound, TooFewResponses
from fedfleet.simulator.driver.server import after, initial, skipped
from fedfleet.simulator.driver.timeouts import all_hung
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.signals import put_off

HUNG = 2  # cohorts in a row of which no client comes to an end, after which a run ends


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What happened in one round, all attempts counted; ``state`` is the algorithm's after it.

    Of its ``seconds``, ``sampling_s`` went by while it was found out who is invited and who answers. ``asked_for`` are the sizes of
    the cohorts that the algorithm asked for. ``skipped`` is whether too few answered; None where such a round is tried again.
    """

    index: int
    seconds: float
    sampling_s: float
    started_s: float
    virtual_s: float
    phases: list[PhaseRecord]
    metrics: Mapping[str, float]
    state: Any
    asked_for: frozenset[int]
    skipped: bool | None = None


class RoundAborted(FedfleetError):
    """Too many cohorts in a row gave too few answers; ``phases`` are the attempts."""

    def __init__(self, message: str, phases: list[PhaseRecord]):
        super().__init__(message)
        self.phases = phases


@dataclass
class Position:
    """Where a run stands between two rounds: all that the next one depends on, apart from what is fixed for the run.

    Attributes:
        index: rounds done, hence the number of the next one.
        clock_s: the virtual clock.
        state: the algorithm's.
        memory: the engine's.

    """

    index: int
    clock_s: float
    state: Any
    memory: Memory

    def accept(self, record: RoundRecord) -> None:
        """Move on by a round, wholly or, where an interruption comes first, not at all."""
        with put_off():
            self.memory.commit()
            self.index, self.clock_s, self.state = record.index + 1, record.virtual_s, record.state


def start(
    algorithm: Algorithm, z: Tree, problem: Problem, conditions: Conditions, states: Path | None = None
) -> Position:
    """Return the position before the first round, at the initial tree ``z``; clients keep their states in the file ``states``."""
    state = initial(algorithm, z, conditions.seed, problem)
    return Position(0, 0.0, state, Memory(conditions.selection, states))


def simulate(
    algorithm: Algorithm, z: Tree, problem: Problem, conditions: Conditions, executor: Executor, rounds: int
) -> Iterator[RoundRecord]:
    """Run an algorithm round by round from the initial tree ``z``. Raises what ``play`` does."""
    at = start(algorithm, z, problem, conditions)
    while at.index < rounds:
        record = play(algorithm, at, problem, conditions, executor)
        at.accept(record)
        yield record


def play(
    algorithm: Algorithm, at: Position, problem: Problem, conditions: Conditions, executor: Executor
) -> RoundRecord:
    """Return the next round of a run, which has not moved on before it accepts it.

    Raises RoundAborted when too many cohorts in a row gave too few answers, ClientError when client code is at fault, Impure when
    the algorithm's is.
    """
    started, sampling_s, clock_s = time.perf_counter(), 0.0, at.clock_s
    phases: list[PhaseRecord] = []
    failure, hung = "", 0
    for attempt in range(conditions.attempts):
        turn = EngineRound(at.index, attempt, clock_s, problem, conditions, executor, at.memory)
        turn.aborted = tuple(phases)
        aborted = False
        try:
            state, metrics = after(algorithm, at.state, turn)
        except TooFewResponses as e:
            at.memory.discard()
            failure, aborted = str(e), True
            state, metrics = at.state, {}
        sampling_s += turn.sampling_s
        phases += turn.records
        hung = hung + 1 if aborted and all_hung(turn.records) else 0
        if hung == HUNG:
            raise RoundAborted(
                f"{failure}: in {HUNG} cohorts in a row no client came to an end in faults.client_timeout_s: look for a loop "
                f"without end, or raise it",
                phases,
            )
        clock_s = turn.clock_s + (conditions.retry_s if aborted else 0.0)
        if aborted and conditions.skip_aborted:
            state = skipped(algorithm, at.state, turn)
        elif aborted:
            continue
        return RoundRecord(
            index=at.index,
            seconds=time.perf_counter() - started,
            sampling_s=sampling_s,
            started_s=at.clock_s,
            virtual_s=clock_s,
            phases=_with_what_came_in_vain(phases),
            metrics=numbers(metrics, f"round {at.index}: the algorithm's metrics"),
            state=state,
            asked_for=frozenset(turn.asked_for),
            skipped=aborted if conditions.skip_aborted else None,
        )
    again = " (the same clients each time, for selection.kind=round_robin under a promised epsilon gives them their turn again)"
    raise RoundAborted(  # what was sent in vain is not known then
        f"{failure}, in {conditions.attempts} cohorts in a row (needed: {conditions.min_responses})"
        f"{again if getattr(conditions.selection, 'again', False) else ''}: let such a round count (cohort.on_abort=skip), "
        f"or raise cohort.size, the rate of availability, cohort.deadline_s or, where all are offline together, cohort.retry_s",
        phases,
    )


def _with_what_came_in_vain(phases: list[PhaseRecord]) -> list[PhaseRecord]:
    """Return the exchanges of a round in whose aborted attempts as much was sent an answer as in those that were not aborted.

    What is sent follows from shapes alone, so that answers that are too few to be used need not be computed.
    """
    each = {p.phase: p.each for p in phases if p.each}
    for p in phases:
        if p.in_vain and p.phase in each:
            p.came_in_vain(each[p.phase])
    return phases
