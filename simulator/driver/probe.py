"""Try an algorithm on two clients for two rounds of few steps, factored, to learn what a run takes before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fedfleet.simulator.algorithm import Algorithm, Buffer, Buffered, Cohort, Problem, Reduced, Role
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.block.side_effects import Impure, repeated
from fedfleet.simulator.driver.codec import encode
from fedfleet.simulator.driver.memory import Memory
from fedfleet.simulator.driver.round import Conditions, EngineRound
from fedfleet.simulator.driver.server import after, initial, model
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.work import Message, Phase

CLIENTS, ROUNDS = 2, 2  # rounds may differ from the first, as with methods that remember the round before
STEPS = 4  # of a stage, two at either end: those between them do what these do


def probe(algorithm: Algorithm, z: Tree, problem: Problem, setup: Setup, *, own: bool = False) -> Notes:
    """Return what was found out; of a phase's costs, those of the last round. Raises ClientError where client code does not run.

    Costs are counted, not measured: they are the same on every machine. Every round of an algorithm of one's own is tried twice,
    which has to give the same: Impure is raised where it does not.
    """
    notes = Notes()
    executor = LocalExecutor(threads=None)
    executor.start(replace(setup, inner="factored", device="cpu", notes=notes, steps=STEPS))
    conditions = Conditions(seed=0, block_size=CLIENTS, faults=Faults(non_finite="keep"))
    memory = Memory(conditions.selection)
    state = initial(algorithm, z, 0, problem)

    def play(index: int, state: Any) -> _Played:
        memory.discard()
        turn = _Small(index, 0, 0.0, problem, conditions, executor, memory)
        return _Played(turn, *after(algorithm, state, turn))

    for index in range(ROUNDS):
        once = partial(play, index, state)
        turn, state, _ = repeated("the algorithm's round", once, algorithm, result=_Played.kept) if own else once()
        memory.commit()
        for record in turn.records:  # everybody is heard
            notes.bytes_down[record.phase] = record.bytes_down_each
            notes.bytes_up[record.phase] = record.counts["bytes_up"] / len(record.clients)
        model(algorithm, state)
    return notes


class _Played(NamedTuple):
    turn: _Small
    state: Any
    metrics: Mapping[str, float]

    def kept(self) -> Tree:
        """Return what outlasts the round."""
        return *encode(self.state), dict(self.metrics)


class _Asked(Exception):
    """The size of the first cohort that an algorithm invites."""


def asked(algorithm: Algorithm, z: Tree, problem: Problem, seed: int) -> int | None:
    """Return how many clients an algorithm invites first; None where it asks for no cohort. Nobody works."""
    conditions = Conditions(seed=seed)
    turn = _Asking(0, 0, 0.0, problem, conditions, LocalExecutor(threads=None), Memory(conditions.selection))
    try:
        after(algorithm, initial(algorithm, z, seed, problem), turn)
    except _Asked as e:
        return e.args[0]
    except Impure:
        raise
    except Exception:  # the run itself will say what is wrong
        return None
    return None


class _Asking(EngineRound):
    """A round that ends with its first invitation."""

    def invite(self, size: int, *, replace: bool = False, role: Role | None = None) -> Cohort:
        raise _Asked(size if role is None else None)

    def draw(self, size: int, clients: Callable[[int, Key], Tensor]) -> Cohort:
        raise _Asked(size)


class _Small(EngineRound):
    """A round with few clients."""

    def invite(self, size: int, *, replace: bool = False, role: Role | None = None) -> Cohort:
        return super().invite(min(size, CLIENTS), replace=replace, role=role)

    def draw(self, size: int, clients: Callable[[int, Key], Tensor]) -> Cohort:
        return super().draw(min(size, CLIENTS), clients)

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        if phase.secure is not None:  # of two, nobody may go
            phase = replace(phase, secure=replace(phase.secure, dropout={}))
        # The steps of the plan: those of a round may be drawn, and what an example costs depend on them.
        return super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input)

    def buffered(self, phase: Phase, *, buffer: Buffer, **given: Any) -> list[Buffered]:
        few = (
            CLIENTS if buffer.seconds else min(buffer.size, CLIENTS)
        )  # also of a server that steps by time, so that answers come in
        return super().buffered(phase, buffer=buffer._replace(size=few, seconds=None, concurrency=few), **given)
