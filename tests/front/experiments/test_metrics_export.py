"""Metrics of a run on Ray's dashboard."""

from types import SimpleNamespace

import pytest

import fedfleet
from fedfleet.assembly import metrics_export
from fedfleet.assembly.executors import EXECUTORS
from fedfleet.simulator.executors.base import Host

CONFIG = {
    "seed": 3, "rounds": 3, "population": {"dataset": {"name": "synthetic", "features": 4}, "clients": 30},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5}, "cohort": {"size": 12, "min_responses": 1},
    "availability": {"kind": "bernoulli", "rate": 0.5},
}  # fmt: skip


@pytest.fixture
def shown(monkeypatch):
    """The values that gauges were last set to, by name."""
    values = {}

    class Gauge:
        def __init__(self, name, description):
            assert description
            assert name not in values
            self.set = lambda value: values.__setitem__(name, value)

    monkeypatch.setattr(metrics_export, "Gauge", Gauge)
    monkeypatch.setattr(metrics_export, "EVERY_S", 0.0)
    return values


def test_a_run_shows_its_last_round_and_its_workers(shown, monkeypatch, tmp_path):
    monkeypatch.setitem(EXECUTORS, "local", EXECUTORS["local"]._replace(gauges=metrics_export.MetricsExport))
    run = fedfleet.run(CONFIG, {"executor.kind": "local"}, out=tmp_path / "out")
    last, clock = run.rounds.iloc[-1], run.rounds["virtual_s"].sum()
    of_round = {
        "rounds": 3, "rounds_per_second": 1 / last["seconds"],
        "client_steps_per_second": last["client_steps"] / last["seconds"],
        "completed_share": last["completed"] / last["invited"], "bytes_up": last["bytes_up"], "bytes_down": last["bytes_down"],
        "virtual_seconds": clock, **{"actors": 1, "nodes": 1, "dead_actors": 0, "retried_blocks": 0},
    }  # fmt: skip
    assert 0 < last["completed"] < last["invited"]
    assert shown.keys() == {f"fedfleet_{name}" for name in metrics_export.WHAT}
    assert {name: shown[f"fedfleet_{name}"] for name in of_round} == pytest.approx(of_round)
    assert 0 < shown["fedfleet_block_seconds"] < run.rounds["seconds"].sum()


def test_the_dead_and_what_they_had_at_hand_are_counted_also_between_two_showings(shown, monkeypatch):
    record = SimpleNamespace(index=0, seconds=0.5, virtual_s=0.0, phases=[])
    hosts = [Host("a", 2, 6, 3.0), Host("b", 0, 2, 5.0)]
    died, silent = {"event": "worker_died", "blocks": 2}, {"event": "node_silent", "blocks": 3}
    mine = metrics_export.MetricsExport()
    mine.show(record, SimpleNamespace(hosts=hosts, events=[died, {"event": "node_joined", "room": 7}]))
    monkeypatch.setattr(metrics_export, "EVERY_S", 1000.0)
    mine.show(record, SimpleNamespace(hosts=hosts, events=[died]))
    before = dict(shown)
    mine.show(record, SimpleNamespace(hosts=hosts, events=[silent]))
    assert shown == before
    monkeypatch.setattr(metrics_export.time, "monotonic", lambda: 1e12)
    mine.show(record, SimpleNamespace(hosts=hosts, events=[]))
    found = {name.removeprefix("fedfleet_"): value for name, value in shown.items()}
    assert (found["dead_actors"], found["retried_blocks"]) == (2, 7)
    assert (found["actors"], found["nodes"], found["block_seconds"]) == (2, 1, 1.0)
