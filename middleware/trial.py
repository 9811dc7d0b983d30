"""A trial of an algorithm on two clients: what they send, how often, and who is asked twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor

from fedfleet.simulator.algorithm import Algorithm, Around, Buffered, Cohort, Problem, Reduced, Role, Round
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.uplink import sizes
from fedfleet.simulator.driver.probe import probe
from fedfleet.simulator.work import Message, Phase


class Seen(NamedTuple):
    """What a trial has seen.

    Attributes:
        sent: by phase, what a client sends.
        repeated: the phases whose cohorts may have a client more than once.
        given: by phase, how many floats of each slot that the server sends can be transformed.
        times: by phase, how often it comes in a round, at most.

    """

    sent: Mapping[str, Mapping[str, Tree]]
    repeated: frozenset[str]
    given: Mapping[str, Mapping[str, int]]
    times: Mapping[str, int]


def tried(algorithm: Algorithm, z: Tree, problem: Problem, setup: Setup) -> Seen:
    """Try an algorithm on two clients, to learn what they send. Raises ClientError where client code does not run."""
    repeated: set[str] = set()
    given: dict[str, dict[str, int]] = {}
    times: dict[str, int] = {}

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        turn = _Looking(rnd, repeated, given)
        result = algorithm.round(state, cast(Round, turn))
        times.update({name: max(n, times.get(name, 0)) for name, n in turn.times.items()})
        return result

    notes = probe(algorithm._replace(round=round), z, problem, setup)
    return Seen(notes.sent, frozenset(repeated), given, times)


class _Looking(Around):
    """A round that sees who may be asked twice in one exchange, and what clients are sent."""

    def __init__(self, rnd: Round, repeated: set[str], given: dict[str, dict[str, int]]):
        super().__init__(rnd)
        self._repeated, self._given = repeated, given
        self._cohorts: list[Cohort] = []
        self.times: dict[str, int] = {}

    def invite(self, size: int, *, replace: bool = False, role: Role | None = None) -> Cohort:
        cohort = self._round.invite(size, replace=replace, role=role)
        self._cohorts += [cohort] * replace
        return cohort

    def draw(self, size: int, clients: Callable[[int, Key], Tensor]) -> Cohort:
        self._cohorts.append(self._round.draw(size, clients))
        return self._cohorts[-1]

    def map_reduce(self, phase: Phase, *, cohort: Cohort, shared: Message, **given: Any) -> Reduced:
        if any(cohort is c for c in self._cohorts):
            self._repeated.add(phase.name)
        self._given[phase.name] = sizes(shared.send)
        self.times[phase.name] = self.times.get(phase.name, 0) + 1
        return self._round.map_reduce(phase, cohort=cohort, shared=shared, **given)

    def buffered(self, phase: Phase, *, messages: Mapping[int, Message], **given: Any) -> list[Buffered]:
        self._given[phase.name] = sizes(messages[max(messages)].send)
        return self._round.buffered(phase, messages=messages, **given)
