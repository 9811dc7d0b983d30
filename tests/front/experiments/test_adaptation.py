"""Domain adaptation from a configuration: what is measured of sources and targets, and what is refused before a run."""

from __future__ import annotations

from typing import Any

import pytest

import fedfleet
from tests.front.experiments.resuming import THREE
from tests.parts import slow_but
from tests.refusals import all_say

BASE: dict[str, Any] = {
    "rounds": 2,
    "population": THREE,
    "domains": {"kind": "given", "target": 4}, "task": {"name": "domain_adaptation", "hidden": [8]},
    "algorithm": {"name": "fedmm", "steps": 3, "batch_size": 20, "lr": 0.05}, "cohort": {"size": 6},
    "executor": {"kind": "local"}, "evaluation": {"every": 1},
}  # fmt: skip

ONE_STEP = ("fedsgda", "gt_hsgd")


@pytest.mark.parametrize(
    "name",
    slow_but(["fedmm", "fedavg_sgda", "fedprox_sgda", "fedsgda", "fedrobust", "gt_gda", "gt_hsgd"], "fedmm", "fedsgda"),
)
def test_a_run_measures_both_domains_and_the_adversary(tmp_path, name):
    changes = {"algorithm": {"name": name, "batch_size": 20, "lr": 0.05, "steps": 1 if name in ONE_STEP else 3}}
    run = fedfleet.run(BASE, changes, out=tmp_path / "run")
    expected = {"eval/accuracy", "eval/target_accuracy", "eval/source_accuracy", "eval/domain_accuracy"}
    assert expected <= set(run.summary["final"])
    assert set(run.rounds["completed"]) == {6}
    if name == "fedmm":
        assert run.rounds["algorithm/eta3"].tolist() == pytest.approx([1.0, 1.05**-0.01])


def test_without_an_adversary_it_is_learnt_from_sources_alone(tmp_path):
    x = fedfleet.Experiment(fedfleet.load(BASE, {"task.loss": "none", "algorithm": {"name": "fedavg", "lr": 0.05}}))
    assert x.problem.clients == 6
    assert "eval/target_accuracy" in x.run(tmp_path / "run").summary["final"]


def test_what_cannot_be_is_refused_in_one_line_before_a_run(subtests):
    rows = [
        ({"domains.target": []}, "task.name='domain_adaptation': … no domain is a target"),
        ({"task.loss": "none"}, "algorithm.name='fedmm': it needs a task with a dual part"),
        ({"task.nu": 0}, "task.nu"),
        ({"task.loss": "mdd", "task.cdan_detach": True}, "task … cdan_detach=True is not for loss=mdd: leave it out"),
        ({"algorithm.mu1": 0}, "algorithm … mu1=0: eta3 / mu1 is then infinite"), ({"task.loss": "gan"}, "task.loss"),
        ({"cohort.late": "keep"}, "cohort.late='keep': clients of fedmm keep a state"),
        ({"task.model": "conv4"}, "task.model"),
        ({"task.task_weight": "per_sample"}, "task.source_share=0.5: 0.6 … of the training examples have labels"),
        ({"algorithm": {"name": "fedsgda", "steps": None, "epochs": 3}},
         "epochs=3 is not for a method of one local step"),
        ({"algorithm": {"name": "gt_hsgd", "steps": None}}, "epochs=1 is not for a method of one local step"),
        ({"algorithm": {"name": "fedavg", "dual_lr": 0.1}, "task.loss": "none"},
         "algorithm.dual_lr=0.1: task.name='domain_adaptation' has no dual part"),
        ({"algorithm": {"name": "fedrobust"}, "task": {"name": "auc"}}, "algorithm.adversary='affine'"),
    ]  # fmt: skip
    all_say(subtests, lambda changes: fedfleet.Experiment(fedfleet.load(BASE, changes)), rows)
