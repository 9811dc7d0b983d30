"""The model of what a round costs on a cluster, and what it is fitted to."""

import argparse
import itertools

import pytest

from benchmarks.cluster import __main__ as cluster
from benchmarks.cluster import rounds
from benchmarks.cluster.model import GIGABIT, Rates, Setting, fit, parts, ratio
from fedfleet.simulator.executors.ray import RayExecutor

TRUE = Rates(phase=4e-3, client=2e-6, block=8e-4, put=4e-10, sent=2e-9, near=5e-10, far=3e-9, added=4e-10)


def seen(sizes=(1, 2, 4)):
    return [(s, parts(TRUE, s).round) for size in sizes for s in cluster.settings(size)]


def test_a_round_is_what_its_parts_come_to_one_by_one():
    rates = Rates(1.0, 0.5, 2.0, 3.0, 5.0, 7.0, 11.0, 13.0)
    of = Setting(nodes=2, actors=4, blocks=6, clients=10, size=2.0, block_s=100.0)
    found = parts(rates, of)
    assert found[:5] == (1 + 5, 2 * (3 + 5), 200.0, 12.0, 6 * 2 * 9.0)
    result = 2 + 2 * 9.0
    assert found.round == 6 + 16 + 200 + 4 * result  # actors that end together wait for one another's results
    bound = parts(rates, of._replace(block_s=1.0))
    assert bound.round == 6 + 16 + 1 + 6 * result  # the driver is not done before it has added all
    assert (found.limit, bound.limit) == ("work", "merge")
    assert parts(rates, of._replace(actors=9)).work == 100


def test_results_that_are_joined_on_their_nodes_come_to_the_driver_as_one():
    rates = Rates(1.0, 0.5, 2.0, 3e-7, 5e-7, 7e-7, 11e-7, 13e-7)
    of = Setting(
        nodes=2, actors=4, blocks=40, clients=10, size=8e6, block_s=100.0
    )  # 20 parts of two blocks, 5 of four parts
    found = parts(rates, of)
    assert found[2:5] == pytest.approx((1000.0, 20 * 2.0, 5 * 8 * 0.9))
    joined = 4 * 8 * 1.3
    assert found.round == pytest.approx(6 + 8 * 0.8 + 1000 + 4 * 2 + joined + 2 * 8 * 0.9)
    bound = parts(rates, of._replace(block_s=1.0))
    assert bound.round == pytest.approx(6 + 8 * 0.8 + 2 * 1 + joined + 20 * 2 + 5 * 8 * 0.9)
    assert parts(rates, of._replace(nodes=1)).merge == pytest.approx(20 * 8 * 0.7)  # the driver has them all


def test_the_fit_finds_the_rates_that_made_what_was_measured():
    found = fit(seen())
    assert found == pytest.approx(TRUE, rel=1e-3)
    assert [ratio(found, *pair) for pair in seen((3,))] == pytest.approx([1.0] * len(cluster.settings(3)), rel=1e-3)


@pytest.mark.parametrize("rate", Rates._fields)
def test_every_rate_shows_in_what_is_measured(rate):
    more = TRUE._replace(**{rate: 2 * getattr(TRUE, rate)})
    assert max(parts(more, s).round / t for s, t in seen()) > 1.02


def test_a_link_is_a_limit():
    assert TRUE.over(1e9) == TRUE
    assert TRUE.over(1.0) == TRUE._replace(sent=1 / GIGABIT, far=1 / GIGABIT)


def test_what_is_printed_says_that_it_is_a_projection(capsys):
    rows = [
        {**s._asdict(), "round_s": t, "put_s": 0.0, "broadcast_s": 0.0, "wait_s": 0.0, "merge_s": 0.0, "compute_s": 1.0}
        for s, t in seen((1, 2, 3, 4))
    ]
    rates = cluster.show(rows, 3)
    cluster.project(rates, argparse.Namespace(gigabits=10.0, block_size=32, size=4.5e7, client_s=0.02))
    said = capsys.readouterr().out
    assert "PROJECTION, not measured" in said
    assert f"{len(cluster.settings(3))} on 3 nodes, not fitted" in said
    assert "merge" in said


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_rounds_on_a_cluster_last_as_long_as_they_are_told_and_send_the_model(monkeypatch):
    monkeypatch.setattr(rounds, "ROUNDS", 1)
    monkeypatch.setattr(rounds, "MAPS", 2)
    executor = RayExecutor(2, cpus_per_actor=0.01, address="auto")
    try:
        short, long = (rounds.measure(executor, Setting(1, 2, 4, 8, 4e3, s)) for s in (0.0, 0.2))
    finally:
        executor.close()
    assert long["round_s"] >= 2 * 0.2
    assert long["compute_s"] >= 4 * 0.2
    assert short["compute_s"] < 4 * 0.2
    assert all(value >= 0 for found in (short, long) for value in found.values())


def test_no_two_settings_are_the_same():
    assert all(a != b for a, b in itertools.combinations(cluster.settings(2), 2))
