"""Rounds that too few answer: tried again, or counted as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from pydantic import ValidationError

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.participation import Correction
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.algorithm import Algorithm, beneath
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.simulate import RoundAborted
from fedfleet.simulator.fleet.availability import Always
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.cases import ASYNCHRONOUS, CASES, INVITE, MODEL
from tests.algorithms.harness import build, digits, flat, records
from tests.refusals import refused

WORLD = digits("classification")
ODD: dict[str, Any] = {"skip_aborted": True, "retry_s": 7.0}


@dataclass(frozen=True)
class Nobody:
    varies: ClassVar[bool] = True

    def online(self, key, clients, seconds):
        return torch.zeros(len(clients), dtype=torch.bool)

    def chance(self, clients, seconds, lasting):
        return torch.zeros(len(clients), dtype=torch.float64)

    def long_run(self, clients):
        return torch.full(clients.shape, 0.5, dtype=torch.float64)


@dataclass(frozen=True)
class OddRounds:
    """Everybody is online in rounds 1, 3, 5, nobody in the others."""

    def during(self, round: int) -> Any:
        return Always() if round % 2 else Nobody()


class Outer(NamedTuple):
    state: Any
    rounds: int


def fedavg() -> Algorithm:
    return build("fedavg", WORLD.task, CohortOptions(size=4), steps=1, batch_size=5)


def wrapped(inner: Algorithm) -> Algorithm:
    """Count the rounds that were not skipped."""

    def round(at: Outer, rnd: Any) -> Any:
        state, metrics = inner.round(at.state, rnd)
        return Outer(state, at.rounds + 1), metrics

    init = lambda z, key, problem: Outer(inner.init(z, key, problem), 0)  # noqa: E731
    return beneath(inner, lambda at: at.state)._replace(init=init, round=round)


def play(algorithm: Algorithm, rounds: int, **given: Any) -> list[Any]:
    return list(records(algorithm, WORLD, rounds, federation=Federation(availability=OddRounds()), **given))


def test_a_round_that_nobody_answers_counts_takes_time_and_changes_nothing():
    found = play(fedavg(), 4, **ODD)
    assert [r.skipped for r in found] == [True, False, True, False]
    assert [(r.index, len(r.phases), r.phases[0].counts["completed"]) for r in found] == [
        (0, 1, 0), (1, 1, 4), (2, 1, 0), (3, 1, 4),
    ]  # fmt: skip
    assert found[0].virtual_s == 7.0
    assert found[2].virtual_s == found[1].virtual_s + 7.0
    view = fedavg().views["global"].params
    models = [flat(WORLD.task.init(0)), *(flat(view(r.state)) for r in found)]
    assert [torch.equal(a, b) for a, b in itertools.pairwise(models)] == [True, False, True, False]
    assert found[0].metrics == {}


def test_an_algorithm_is_told_beneath_what_is_put_on_it():
    told = []

    def skipped(state: Any, rnd: Any) -> Any:
        told.append((rnd.index, len(rnd.records)))
        return state._replace(z=T.map(lambda leaf: leaf + 1, state.z))

    start, found = flat(WORLD.task.init(0)), play(wrapped(fedavg()._replace(skipped=skipped)), 5, **ODD)
    assert [r.state.rounds for r in found] == [0, 1, 1, 2, 2]
    assert told == [(0, 1), (2, 1), (4, 1)]
    models = [flat(r.state.state.z) for r in found]
    for before, after in ((start, models[0]), (models[1], models[2]), (models[3], models[4])):
        assert torch.equal(after, (before.float() + 1).double())


def test_a_round_is_the_same_in_all_its_retries():
    """Nobody is online in round 0 however often it is tried, and everybody in round 1 at once."""
    with pytest.raises(RoundAborted, match="3 cohorts in a row"):
        play(fedavg(), 1, attempts=3)


def memories() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every algorithm with every correction that it takes."""
    for name, entry in ALGORITHMS.items():
        field = entry.options.model_fields.get("correction")
        for kind in (
            ("mifa", "fedvarp", "fedau", "known_p") if field is not None and field.annotation is Correction else ()
        ):
            with suppress(ValidationError):  # those it does not take
                entry.options(correction=kind)
                yield name, {"correction": kind}


ROWS = [(name, {}) for name in CASES if name not in (*ASYNCHRONOUS, *MODEL)] + list(memories())
ODDEST = (
    "parallel_sgda",
    "cdma_one",
    "coda_plus",
    "codasca",
    "afl",
    "drfa",
    "refl",
    "local_sgda_plus",
    "fedawe",
    "tifl",
)
"""Algorithms with something that only an answer changes."""


@pytest.mark.parametrize("names", [ODDEST, pytest.param([*CASES], marks=pytest.mark.slow)], ids=len)
def test_every_algorithm_and_correction_goes_through_rounds_that_nobody_answers(names, subtests):
    """Also before anything is remembered, and after: no error, no number that is none, no other type."""
    worlds = {task: digits(task, net={"hidden": (4,)}) for task in ("classification", "auc")}
    for name, more in [row for row in ROWS if row[0] in names]:
        task, options = CASES[name]
        world = worlds.get(task) or worlds.setdefault(task, digits(task))
        with subtests.test(f"{name} {more}"):
            algorithm = build(name, world.task, CohortOptions(size=INVITE.get(name, 8)), **options, **more)
            odd = Federation(availability=OddRounds())
            found = list(records(algorithm, world, 3, inner="batched", federation=odd, **ODD))
            assert [r.skipped for r in found] == [True, False, True]
            model = T.leaves(algorithm.views["global"].params(found[-1].state))
            assert {leaf.dtype for leaf in model} == {torch.float32}
            assert all(bool(leaf.isfinite().all()) for leaf in model)


def test_a_mean_of_models_counts_the_one_that_stays():
    for name in ("afl", "drfa"):
        _, options = CASES[name]
        algorithm = build(name, WORLD.task, CohortOptions(size=8), **options)
        states = [r.state for r in play(algorithm, 5, **ODD)]
        models = torch.stack([flat(state.z) for state in states])
        assert not torch.equal(models[1], models[3])
        torch.testing.assert_close(flat(states[-1].z_mean), models.mean(0), rtol=1e-5, atol=1e-7)


QUICK: dict[str, Any] = {
    "rounds": 5, "population": {"dataset": "digits", "clients": 20}, "task": {"model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 4}, "executor": {"kind": "local"},
    "availability": {"kind": "bernoulli", "rate": 0.3}, "cohort": {"size": 3, "min_responses": 2, "on_abort": "skip"},
}  # fmt: skip


def test_skipped_rounds_stand_in_the_tables_and_after_a_resume(tmp_path):
    whole = fedfleet.run(QUICK, {"rounds": 8}, out=tmp_path / "whole")
    rounds = whole.table("rounds")
    skipped = rounds.skipped.tolist()
    assert skipped == (rounds.completed < 2).tolist()
    assert 1 < sum(skipped) < 8
    assert (whole.table("phases").attempt == 0).all()
    part = fedfleet.run(QUICK, {"rounds": 3}, out=tmp_path / "part")
    again = fedfleet.resume(part.folder, {"rounds": 8})
    for name in ("outcomes", "phases"):
        assert again.table(name).equals(whole.table(name))
    assert again.table("rounds").skipped.tolist() == skipped
    plain = fedfleet.run(QUICK, {"cohort.on_abort": "retry"}, out=tmp_path / "plain").table("rounds")
    assert "skipped" not in plain


def test_an_asynchronous_server_has_no_rounds_to_skip():
    config = {**QUICK, "algorithm": {"name": "fedbuff", "steps": 1, "batch_size": 4, "buffer": 2, "concurrency": 4}}
    given = fedfleet.load({**config, "cohort": {"on_abort": "skip"}})
    refused(lambda: fedfleet.Experiment(given), "cohort.on_abort='skip'")
