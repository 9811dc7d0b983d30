"""FACT with clients of both kinds, what it refuses, and what it takes where nothing is said."""

from dataclasses import replace

import pytest
import torch
from adaptation import build, population, records, world
from harness import World

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.population import problem
from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError

WORLD = world()
NF = {"fine_tune": False}


def both_kinds(unlabelled, sizes=(13, 13, 14), **task) -> World:
    """Clients who all hold rows with labels and rows without; ``unlabelled`` says of a row's place which it is."""
    where = world((sum(sizes),), (), **task)
    data = where.population.data
    whole = population(data["x"], data["y"], sizes, ())
    plain = replace(whole, data={k: v for k, v in whole.data.items() if k != "target"}, labelled=None)
    return World(where.task, plain.withholding(unlabelled(torch.arange(sum(sizes)))))


def test_sources_that_hold_targets_too_learn_from_their_labels_alone():
    """A client may be of both roles: rows without labels count in step 3, those with labels in steps 1 and 2."""
    mixed = both_kinds(lambda row: row % 3 == 0)
    assert problem(mixed.population).sources.tolist() == problem(mixed.population).targets.tolist() == [0, 1, 2]
    for r in records(build(mixed.task, batch_size=20), mixed, 3):
        assert r.metrics["idd"] > 0
        assert r.phases[0].train_loss < 3


def test_every_batch_holds_both_kinds():
    """One without an unlabelled row would count as a discrepancy of 0."""
    few = both_kinds(lambda row: row % 20 == 0, (40, 40))
    (a,), (b,) = (list(records(build(few.task, batch_size=n, lr=1e-9, select="last"), few, 1)) for n in (20, 40))
    assert a.metrics["idd"] == pytest.approx(b.metrics["idd"], rel=0.2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({**NF, "finetune_epochs": 2}, "finetune_epochs=2 is not for fine_tune=false: leave it out"),
        ({"lr_clock": "global"}, "lr_clock=global is of a rate that falls: give rounds"),
        ({"idd": False, "target_lr": 0.1}, "target_lr=0.1 is not for idd=false: leave it out"),
        ({"idd": False, "targets": 2}, "targets=2 is not for idd=false"),
        ({"idd": False, "select_burn_in": 0.2}, "select_burn_in=0.2 is not for idd=false"),
        ({"select": "last", "select_burn_in": 0.2}, "select_burn_in=0.2 is not for select=last"),
        ({"select_burn_in": 0.2}, "select_burn_in=0.2 is a share of rounds: give rounds"),
        ({"momentum": 1.0}, "momentum"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        build(WORLD.task, **options)


@pytest.mark.parametrize(
    ("cohort", "says"),
    [
        ({"size": 3}, "cohort.size=3: fact asks two source clients a round: set cohort.size=2"),
        ({"size": 1}, "cohort.size=1: fact asks two"),
        ({"size": 2, "wait_for": 1}, "cohort.wait_for=1: fact needs the heads of two clients"),
        (
            {"size": 2, "wait_for": "siwer", "response_low": 0.1, "response_high": 0.5},
            "cohort.response_high=0.5: of two clients one would be heard in every round",
        ),
    ],
)
def test_cohorts_other_than_pairs_are_refused(cohort, says):
    with pytest.raises(ConfigError, match=says):
        build(WORLD.task, cohort=CohortOptions(**cohort))


@pytest.mark.parametrize(
    ("of", "options", "says"),
    [
        (world((20, 20), (1,)), {}, "algorithm.name='fact': a round takes two source clients, and there is 1"),
        (world((20, 20), (0, 1)), {}, "there is 0"),
        (world((20, 20), ()), {}, "algorithm.idd=true: there is no target client"),
        (WORLD, {"targets": 2}, "algorithm.targets=2: there are 1 target clients: lower it"),
    ],
)
def test_too_few_clients_are_refused_before_the_work(of, options, says):
    with pytest.raises(ConfigError, match=says):
        build(of.task, **options).init(of.task.init(0), rng.key(0), problem(of.population))


def test_more_answers_than_there_are_target_clients_are_refused_before_the_work():
    algorithm = build(WORLD.task, cohort=CohortOptions(size=2, min_responses=2))
    with pytest.raises(ConfigError, match=r"cohort\.min_responses=2: a round asks 1 of the target clients: lower it"):
        algorithm.init(WORLD.task.init(0), rng.key(0), problem(WORLD.population))
    alone = build(WORLD.task, idd=False, fine_tune=False, cohort=CohortOptions(size=2, min_responses=2))
    alone.init(WORLD.task.init(0), rng.key(0), problem(WORLD.population))


def test_a_problem_without_roles_is_refused():
    with pytest.raises(ConfigError, match="there is no target client"):
        build(WORLD.task).init(WORLD.task.init(0), rng.key(0), Problem(10, 20.0))


def test_it_starts_as_its_authors_did():
    o = ALGORITHMS["fact"].options()
    assert (o.epochs, o.batch_size, o.lr, o.momentum, o.weight_decay) == (1, 128, 0.005, 0.9, 5e-4)
    assert (o.lr_clock, o.optimizer_state, o.finetune_epochs, o.select_burn_in) == ("client", "persist", 1, 0.1)
    assert o.fine_tune
    assert o.idd
    assert o.return_target_head_buffers
    assert (o.select, o.evaluate, o.targets, o.target_lr) == ("idd", "ensemble", None, None)
    assert [o.model_copy(update={"rounds": r, "select_burn_in": b}).burn_in for r, b in ((100, 0.55), (7, 0.1))] == [
        55,
        1,
    ]
    made = build(WORLD.task, rounds=7)
    assert (made.roles, made.buffers, made.minimises, made.rounds) == (True, True, True, 7)
    assert made.requires == ("x", "head")
    assert all(phase.dated and phase.weight == "uniform" for phase in made.phases)
