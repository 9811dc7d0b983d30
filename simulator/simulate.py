"""The driver's loop: rounds, retries, the virtual clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedfleet.simulator import rng
from fedfleet.simulator.algorithm import Algorithm, Problem
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.memory import Memory
from fedfleet.simulator.records import PhaseRecord
from fedfleet.simulator.round import Conditions, EngineRound, TooFewResponses
from fedfleet.simulator.tree import Tree


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What happened in one round, all attempts counted; ``state`` is the algorithm's after it."""

    index: int
    seconds: float
    started_s: float
    virtual_s: float
    phases: list[PhaseRecord]
    metrics: Mapping[str, float]
    state: Any


def simulate(
    algorithm: Algorithm, z: Tree, problem: Problem, conditions: Conditions, executor: Executor, rounds: int
) -> Iterator[RoundRecord]:
    """Run an algorithm round by round from the initial tree ``z``.

    Raises FedfleetError when too many cohorts in a row gave too few answers, ClientError when client code is at fault.
    """
    state = algorithm.init(z, rng.fold(rng.key(conditions.seed), "init"), problem)
    memory = Memory(conditions.selection)
    clock_s = 0.0
    for index in range(rounds):
        started, started_s = time.perf_counter(), clock_s
        phases: list[PhaseRecord] = []
        failure = ""
        for attempt in range(conditions.attempts):
            turn = EngineRound(index, attempt, clock_s, problem, conditions, executor, memory)
            try:
                state, metrics = algorithm.round(state, turn)
                memory.commit()
                break
            except TooFewResponses as e:
                memory.discard()
                failure = str(e)
            finally:
                phases += turn.records
                clock_s = turn.clock_s
            clock_s += conditions.retry_s
        else:
            raise FedfleetError(
                f"{failure}, in {conditions.attempts} cohorts in a row (needed: {conditions.min_responses}): raise cohort.invite, "
                f"the rate of availability or cohort.deadline_s, or, where all are offline together, cohort.retry_s"
            )
        yield RoundRecord(
            index=index,
            seconds=time.perf_counter() - started,
            started_s=started_s,
            virtual_s=clock_s,
            phases=phases,
            metrics=metrics,
            state=state,
        )
