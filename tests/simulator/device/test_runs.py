"""Whole runs on a device: every task, what is measured of it, clients' own models, cosines."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedfleet
from fedfleet.assembly.prepared import Prepared
from fedfleet.datasets.examples import Examples
from fedfleet.simulator.arithmetic import rng
from fedfleet.tasks.registry import TASKS
from fedfleet.tasks.scorer import Scorer
from tests.parts import slow_but
from tests.simulator.device.nominal import DEVICE, placed

BASE = {
    "rounds": 2,
    "population": {"dataset": "digits", "clients": 30, "partition": {"kind": "label_sorted"}},
    "task": {"hidden": [5]},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 24},
    "cohort.size": 3,
    "executor": {"kind": "local", "inner": "batched", "block_size": 2},
    "evaluation": {"every": 1},
}
ROLES = {
    "population.dataset": {"name": "digits", "label_domains": True},
    "population.partition": {"kind": "by_domain"},
    "domains": {"target": [8, 9]},
    "evaluation.validation": 0.1,
}
OWN = {"population.held_out": 0.25, "evaluation.per_client": True}
RUNS = {
    "classification": {"evaluation.per_client": True, "evaluation.cosines": True},
    "convolutions": {
        "task": {"model": "cnn_bn", "mixstyle": {"p": 0.7, "blocks": 2}},
        **ROLES,
        "executor.inner": "factored",
    },
    "own models": {"algorithm.name": "fedrod", **OWN},
    "factored": {"executor.inner": "factored", "evaluation.cosines": True, "domains": {"kind": "label"}},
    "stochastic": {"task": {"name": "stochastic", "latent": 4}, "algorithm.name": "fedsr", **ROLES},
    "attentive": {"task": {"name": "attentive", "model": "cnn"}, "algorithm.name": "stablefdg", "algorithm.copies": 4},
    "robust": {
        "task": {"name": "robust", "ascent_steps": 2},
        "algorithm.name": "cdma_ada",
        "evaluation.per_client": True,
    },
    "the server's own": {
        "algorithm": {"name": "robust", "of": "fedavg", "rule": "fltrust"},
        "population.root": {"examples": 50},
    },
    "auc": {"task": {"name": "auc"}, "algorithm.name": "local_sgda", "executor.inner": "factored"},
    "domain_adaptation": {"task": {"name": "domain_adaptation"}, "algorithm.name": "fedmm", **ROLES},
    "two_heads": {"task": {"name": "two_heads"}, "algorithm": {"name": "mcd", "batch_size": 8}, **ROLES},
    "gan": {
        "task": {"name": "gan", "width": 0.0625, "samples": 1000},
        "algorithm.name": "cdma_one",
        "algorithm.gradient_chunk": 40,
    },
    "language_model": {
        "task": {"name": "language_model", "hidden": 4},
        "population.partition": {"kind": "iid"},
        "algorithm.batch_size": 2,
    },
    "module": {"task": {"name": "module", "model": "tests.tasks.own_nets:mlp", "loss": "cross_entropy"}},
    "private": {"privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 0.5}, "algorithm.weight": "uniform"},
    "private for examples": {"example_privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 0.5}},
    "compressed": {
        "transforms.up": [{"name": "top_k", "share": 0.1, "error_feedback": True}, {"name": "qsgd", "levels": 7}],
        "transforms.down": ["delta", "rotation", {"name": "uniform", "levels": 16}],
    },
    "thin": {"transforms.up": [{"name": "low_rank", "rank": 2, "error_feedback": True}]},
    "masked": {"secure_aggregation": {"threshold": 0.5, "bits": 16, "clip": 1.0}},
    "attacked": {
        "algorithm": {"name": "robust", "of": "fedavg", "rule": "geometric_median"},
        "attack": {"kind": "alie", "share": 0.4, "z": 1.5},
    },
    "backdoor": {
        "algorithm": {"name": "robust", "of": "fedavg", "rule": "foolsgold"},
        "attack": {"kind": "backdoor", "share": 0.4, "target": 0, "scale": 5},
    },
    "adapters": {"task.adapters": {"rank": 2}, "executor.inner": "factored"},
    "a server's optimiser": {"algorithm.name": "fedopt", "selection.kind": "oort", "faults.non_finite": "drop_client"},
}


MEASURED = {
    "classification": ["eval/clients_accuracy"],
    "own models": ["eval/own_accuracy"],
    "stochastic": ["eval/validation_target_density", "eval/target_accuracy"],
    "gan": ["eval/fid"],
}
WINDOWS = Examples(rng.sample(rng.key(0), 11, 60 * 7, replace=True).view(60, 7), torch.arange(60) % 11, 11)


def with_statistics(options, x, *rest):
    """A classifier that is not trained, and whose layers have counted something."""
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4))
    return Scorer(body, nn.Linear(4, 10)).eval().requires_grad_(requires_grad=False)


def test_every_task_has_a_run():
    assert set(TASKS) <= set(RUNS)


ORDINARY = ("convolutions", "private", "own models")


@pytest.mark.parametrize("what", slow_but(RUNS, *ORDINARY))
def test_a_run_on_a_device(what, tmp_path, monkeypatch):
    setup, conditions = Prepared.setup, Prepared.conditions
    monkeypatch.setattr(Prepared, "setup", lambda self: replace(setup(self), device=str(DEVICE)))
    monkeypatch.setattr(Prepared, "conditions", lambda self: replace(conditions(self), device=DEVICE))
    monkeypatch.setattr("fedfleet.tasks.scorer.prepared", with_statistics)
    words = fedfleet.Dataset("words", WINDOWS, WINDOWS) if what == "language_model" else None
    x = fedfleet.Experiment(fedfleet.load(BASE, RUNS[what]), data=words)
    with placed() as watch:
        run = x.run(tmp_path / "run")
    assert watch.seen > 100
    told = run.summary["final"]
    assert all(math.isfinite(value) for value in told.values() if isinstance(value, float))
    assert set(MEASURED.get(what, ())) <= told.keys()
    monkeypatch.setattr(Prepared, "setup", setup)
    monkeypatch.setattr(Prepared, "conditions", conditions)
    here = fedfleet.Experiment(fedfleet.load(BASE, RUNS[what]), data=words).run(tmp_path / "here")
    assert told == pytest.approx(here.summary["final"], rel=1e-4, abs=1e-4, nan_ok=True)
