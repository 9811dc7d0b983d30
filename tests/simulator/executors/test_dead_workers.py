"""Actors and nodes are killed; the run goes on, and its bytes are those of an undisturbed one."""

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray

import fedfleet
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.executors.ray import RayExecutor
from tests.parts import slow_but
from tests.simulator.executors.killing import KILLED, die, once

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import tests

AVERAGING = {"task": "classification", "algorithm": {"name": "fedavg", "epochs": 1}}
UNIFORM = {**AVERAGING, "algorithm": {"name": "fedavg", "epochs": 1, "weight": "uniform"}}
NOISE = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 0.5}
ROBUST = {"name": "robust", "of": {"name": "fedavg", "epochs": 1}}
CASES = {
    "stateful": {"task": "classification", "algorithm": {"name": "scaffold", "epochs": 1}},
    "attacked": {
        **AVERAGING,
        "algorithm": {**ROBUST, "rule": "foolsgold"},
        "attack": {"kind": "backdoor", "share": 0.3, "scale": 2.0},
    },
    "colluding": {**AVERAGING, "attack": {"kind": "alie", "share": 0.3, "z": 1.0}},
    "owing": {
        **AVERAGING,
        "transforms": {
            "up": [{"name": "top_k", "share": 0.1, "error_feedback": True}],
            "down": ["delta", "rotation", {"name": "uniform", "levels": 16}],
        },
    },
    "private": {**UNIFORM, "privacy": {**NOISE, "noise": "clients"}},
    "a norm that follows": {**UNIFORM, "privacy": {**NOISE, "adaptive": {"quantile": 0.5}}},
    "private for examples": {**AVERAGING, "example_privacy": NOISE},
    "masked": {
        **AVERAGING,
        "secure_aggregation": {"threshold": 0.5, "bits": 16, "clip": 1.0, "dropout": {"masked": 0.1}, "execute": True},
    },
    "trusting": {
        **AVERAGING,
        "algorithm": {**ROBUST, "rule": "fltrust"},
        "population": {"clients": 24, "root": {"examples": 40}},
        "attack": {"kind": "sign_flip", "share": 0.3},
    },
    "two phases": {"task": "auc", "algorithm": {"name": "cdma_ada", "steps": 3, "alpha": 0.5}},
}


EVERYWHERE = ("stateful", "two phases")
"""Cases in which actors die as models are measured, too; a new actor takes seconds."""


@dataclass(frozen=True)
class Deadly:
    """A job whose worker is killed once in each of these phases, with its work done but not yet sent."""

    job: Any
    folder: Path
    phases: frozenset[str]

    def __call__(self, setup, shared, task):
        result = self.job(setup, shared, task)
        phase = task.phase if isinstance(task, BlockTask) else "evaluation"
        if phase in self.phases and once(self.folder / phase):
            die()
        return result


class Killing(RayExecutor):
    """Actors that are killed in every phase."""

    folder: Path
    phases: frozenset[str]

    def map(self, job, shared, tasks, **how):
        return super().map(Deadly(job, self.folder, self.phases), shared, tasks, **how)


class LosingNode(RayExecutor):
    """Actors, some of whose node goes down while they run a block each."""

    def __init__(self, *given, node, lose, **named):
        super().__init__(*given, **named)
        self.calls, self.node, self.lose = 0, node, lose

    def map(self, job, shared, tasks, **how):
        self.calls += 1
        results = super().map(Stuck(job, self.node) if self.calls >= 4 else job, shared, tasks, **how)
        if self.calls == 4:
            self.lose()
        return results


@dataclass(frozen=True)
class Stuck:
    """A job that does not end on one node, whose workers outlive it for a while."""

    job: Any
    node: str

    def __call__(self, setup, shared, task):
        if ray.get_runtime_context().get_node_id() == self.node:
            time.sleep(1000)
        return self.job(setup, shared, task)


def experiment(case, **given):
    config = {
        "rounds": 3,
        "population": {"clients": 24},
        "cohort": {"size": 8},
        "executor": {"kind": "local", "block_size": 2, "inner": "batched"},
        "evaluation": {"every": 1, "per_client": True},
        **CASES[case],
    }
    return fedfleet.Experiment(fedfleet.load(config))


def outcome(x, out):
    done = x.run(out)
    tables = [
        done.table(t).drop(columns="seconds", errors="ignore") for t in ("rounds", "phases", "outcomes", "clients")
    ]
    log = out / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return (out / "model.safetensors").read_bytes(), tables, events, done.summary


def check_equal(found, expected):
    assert found[0] == expected[0]
    for a, b in zip(found[1], expected[1], strict=True):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert found[3]["bit_exact"] is True


@pytest.mark.ray
@pytest.mark.parametrize("case", slow_but(CASES, "stateful"))
def test_an_actor_killed_in_every_phase_changes_no_byte(tmp_path, cluster, monkeypatch, case):
    x = experiment(case)
    expected = outcome(x, tmp_path / "local")
    executor = Killing(2, cpus_per_actor=0.25)
    executor.folder = tmp_path / "killed"
    executor.folder.mkdir()
    phases = {p.name for p in (*x.algorithm.phases, *x.algorithm.server)}  # the latter of the server's own examples
    phases |= {"client_metrics", "evaluation"} if case in EVERYWHERE else set()
    executor.phases = frozenset(phases)
    monkeypatch.setattr(x, "executor", lambda: executor)
    found = outcome(x, tmp_path / "ray")
    check_equal(found, expected)
    assert {p.name for p in executor.folder.iterdir()} == phases
    died = [e for e in found[2] if e["event"] == "worker_died"]
    assert len(died) == len(found[2]) == len(phases)
    assert all(e["why"] == KILLED and e["slot"] in (0, 1) and e["blocks"] in (1, 2) for e in died)
    assert expected[2] == []


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_that_goes_down_in_a_round_changes_no_byte(tmp_path, cluster, monkeypatch):
    x = experiment("two phases")
    expected = outcome(x, tmp_path / "local")
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    lose = partial(cluster.remove_node, node, allow_graceful=False)
    executor = LosingNode(4, cpus_per_actor=0.01, gpus_per_actor=0.5, node=node.node_id, lose=lose)
    monkeypatch.setattr(x, "executor", lambda: executor)
    found = outcome(x, tmp_path / "ray")
    check_equal(found, expected)
    assert [e["event"] for e in found[2]] == ["worker_died"] * 2  # there is no room for others, and none is waited for
