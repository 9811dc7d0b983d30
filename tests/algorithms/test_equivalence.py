"""Every registered algorithm gives the same result one client at a time and many at once."""

import pytest
import torch
from cases import CASES, INVITE, MODEL
from harness import NET, build, digits, flat, moved, play, records

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.driver import round as driver
from fedfleet.simulator.fleet.policies import Siwer


def cohort(name: str) -> CohortOptions:
    return CohortOptions(invite=INVITE.get(name, 8))


def test_every_registered_algorithm_has_a_case():
    assert set(CASES) == set(ALGORITHMS)


def world(name: str):
    # clients of very different sizes, so that padding and masks are exercised
    net = {"model": MODEL[name]} if name in MODEL else NET
    return digits(CASES[name][0], "quantity_skew", net=net, alpha=1.0, min_size=2)


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_batched_equals_serial(name, monkeypatch):
    monkeypatch.setattr(driver, "rooms_of_blocks", lambda clients, most: (most + 2,))  # all are filled
    _, options = CASES[name]
    where = world(name)
    runs = []
    for inner in ("serial", "batched"):
        algorithm = build(name, where.task, cohort(name), **options)
        runs.append(list(records(algorithm, where, 3, inner=inner, policy=Siwer())))
    for one, many in zip(*runs, strict=True):
        view = build(name, where.task, cohort(name), **options).views["global"].params
        torch.testing.assert_close(flat(view(one.state)), flat(view(many.state)), rtol=2e-5, atol=2e-6)
        for p, q in zip(one.phases, many.phases, strict=True):
            assert p.counts == q.counts
            if p.train_loss is None:  # a phase that took no gradient
                assert q.train_loss is None
            else:
                assert p.train_loss == pytest.approx(q.train_loss, rel=1e-4, abs=1e-6)
    assert moved(where.task.init(0), view(runs[0][-1].state)) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_the_size_of_blocks_changes_nothing_but_rounding(name):
    _, options = CASES[name]
    where = world(name)
    small, large = (
        play(build(name, where.task, cohort(name), **options), where, 2, inner="batched", block_size=size)[-1]
        for size in (3, 8)
    )
    torch.testing.assert_close(flat(small), flat(large), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_a_function_of_its_seed(name):
    _, options = CASES[name]
    where = world(name)
    a, b, c = (
        flat(play(build(name, where.task, cohort(name), **options), where, 2, inner="batched", seed=seed)[-1])
        for seed in (1, 1, 2)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
