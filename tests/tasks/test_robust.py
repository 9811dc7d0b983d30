"""Robust training: its loss, and the ascent behind the robust metrics, against what can be worked out by hand."""

import math

import pytest
import torch

import fedfleet
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.robust import RobustOptions, RobustTraining

SHAPE = DataShape((1, 4, 4), 10)


def task(**options):
    return RobustTraining(RobustOptions(model="mlp", hidden=(7,), **options), SHAPE)


def batch(n=50):
    key = rng.key(1)
    x, y = rng.normal(rng.fold(key, "x"), (n, 1, 4, 4)), (rng.uniform(rng.fold(key, "y"), (n,)) * 10).long()
    return Batch({"x": x, "y": y}, torch.ones(n))


def measured(made, z, data):
    return made.metrics(made.functions["predict"](z, data), data.data)


def test_without_weights_the_ascent_only_shrinks_the_perturbation():
    made = task()
    z = T.zeros_like(made.init(0))
    z["y"]["perturbation"] = torch.full((1, 4, 4), 0.5)
    factor = (1 - 2 * 0.001) ** 20
    assert factor == pytest.approx(0.96075, abs=1e-5)
    torch.testing.assert_close(made.attacked(z, batch()), factor * z["y"]["perturbation"])
    found = measured(made, z, batch())
    assert found["robust_loss"] == pytest.approx(math.log(10) - 0.001 * 16 * 0.25 * factor**2, abs=1e-6)


def test_a_large_perturbation_starts_again_from_zero():
    made = task()
    z = made.init(0)
    for scale, again in ((0.7, False), (0.9, True), (math.nan, True)):  # squared norms 7.84 and 12.96
        z["y"]["perturbation"] = torch.full((1, 4, 4), scale)
        fresh = {"x": z["x"], "y": {"perturbation": torch.zeros(1, 4, 4)}}
        assert torch.equal(made.attacked(z, batch()), made.attacked(fresh, batch())) == again


def test_the_ascent_follows_the_gradient_of_the_whole_set(monkeypatch):
    made, data = task(ascent_steps=3, ascent_lr=0.5), batch()
    z = T.map(torch.Tensor.double, made.init(0))
    data = Batch({"x": data.x.double(), "y": data.y}, data.weight.double())
    y = torch.zeros(1, 4, 4, dtype=torch.float64)
    for _ in range(3):
        at = y.clone().requires_grad_()
        value, _ = made.objectives["train"].loss({"x": z["x"], "y": {"perturbation": at}}, data, None, rng.key(0))
        y = y + 0.5 * torch.autograd.grad(value, at)[0]
    torch.testing.assert_close(made.attacked(z, data), y, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("fedfleet.tasks.robust.ROWS", 7)  # batches are for memory alone
    torch.testing.assert_close(made.attacked(z, data), y, rtol=1e-12, atol=1e-12)
    robust, clean = (measured(task(ascent_steps=steps), z, data) for steps in (20, 0))
    assert robust["robust_loss"] > clean["robust_loss"]
    assert robust["accuracy"] == clean["accuracy"] == clean["robust_accuracy"]


def test_gradients_are_those_of_the_formula():
    made, data = task(), batch(8)
    z = T.map(torch.Tensor.double, made.init(0))
    z["y"]["perturbation"] = rng.normal(rng.key(2), (1, 4, 4), torch.float64)
    data = Batch({"x": data.x.double(), "y": data.y}, data.weight.double())

    def value(y):
        return made.objectives["train"].loss({**z, "y": {"perturbation": y}}, data, None, rng.key(0))[0]

    y = z["y"]["perturbation"]
    formula = torch.nn.functional.cross_entropy(made.logits(z, data.x, y), data.y) - 0.001 * (y**2).sum()
    assert float(value(y)) == pytest.approx(float(formula), abs=1e-12)
    assert torch.autograd.gradcheck(value, (y.clone().requires_grad_(),))


CONFIG = {
    "rounds": 4, "population": {"dataset": "digits", "clients": 20, "partition": {"kind": "label_sorted"}},
    "task": {"name": "robust", "hidden": [16]},
    "algorithm": {"name": "cdma_one", "steps": 3, "batch_size": 10, "dual_lr": 0.5}, "cohort.size": 6,
    "executor": {"kind": "local"}, "evaluation": {"every": 2, "test_examples": 50},
}  # fmt: skip


def test_the_last_model_is_evaluated_on_all_examples(tmp_path):
    run = fedfleet.Experiment(fedfleet.load(CONFIG)).run(tmp_path / "few")
    full = fedfleet.Experiment(fedfleet.load(CONFIG, {"evaluation.test_examples": 0})).run(tmp_path / "full")
    final, other = run.summary["final"], full.summary["final"]
    assert {k.replace("all_", ""): v for k, v in final.items() if "all_" in k} == other
    assert final["eval/robust_loss"] != other["eval/robust_loss"]
    assert [c for c in run.rounds.columns if "all_" in c] == []
    fedfleet.Experiment(fedfleet.load(CONFIG, {"rounds": 2})).run(tmp_path / "on")
    longer = fedfleet.resume(tmp_path / "on", {"rounds": 4})
    assert longer.summary["final"] == final
