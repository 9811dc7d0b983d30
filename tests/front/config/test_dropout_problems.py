"""The dropout benchmark's problems have the solutions that they say."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
import torch

import fedfleet
from fedfleet.config import shipped
from fedfleet.report.tables import gini
from fedfleet.simulator.work import Batch


def module(name: str) -> Any:
    """Return a module that lies beside the configurations."""
    spec: Any = importlib.util.spec_from_file_location(f"dropout_{name}", shipped.FOLDER / "dropout" / f"{name}.py")
    found: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # as dataclasses want
    spec.loader.exec_module(found)
    return found


problems, fedau = module("problems"), module("fedau")
BY_CLASS = tuple(0.1 + 0.8 * c / 9 for c in range(10))


def gradient(task: Any, z: Any, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """Return the largest entry of the gradient of a weighted mean over examples, in double precision."""
    batch = Batch({"x": torch.from_numpy(x).double(), "y": torch.from_numpy(y)}, torch.ones(len(y)).double())
    of = torch.func.grad(lambda z: (task.each(z, batch) * torch.from_numpy(weights)).sum())(z)
    return max(float(leaf.abs().max()) for part in of.values() for leaf in part.values())


def test_weights_of_a_mean_over_those_heard():
    found = problems.weights_of_mean((0.9, 0.5, 0.3, 0.1))
    assert found == pytest.approx([0.57885906, 0.24432112, 0.13487352, 0.04194631], abs=5e-9)
    assert problems.weights_of_mean((0.9, 0.9, 0.3, 0.3)) == pytest.approx([0.397724] * 2 + [0.102276] * 2, abs=5e-7)
    assert problems.weights_of_mean((0.9, 0.3)) == pytest.approx([0.82258065, 0.17741935], abs=5e-9)


def test_the_game():
    task = problems.QuadraticGame(chances=(0.9, 0.3))
    assert task.saddle == pytest.approx([20 / 49, 36 / 49])
    assert task.biased == pytest.approx([-0.369510, -0.363558], abs=5e-7)
    x, label = np.array(problems.LABELS)[[0, 0, 1, 1]], np.zeros(4, dtype=np.int64)
    point = torch.from_numpy(task.saddle)
    assert gradient(task, {"x": {"x": point[0]}, "y": {"y": point[1]}}, x, label, np.full(4, 0.25)) < 1e-12


def test_twenty_clients_that_mix_both_labels():
    """Client i holds a share (i + 1/2) / 20 of label I, and is online with .9 of that and .1 of the rest: .5 on average."""
    first = (np.arange(20) + 0.5) / 20
    p = 0.9 * first + 0.1 * (1 - first)
    q = problems.weights_of_mean(p)
    assert (p.mean(), gini(p, 20)) == pytest.approx((0.5, 0.266), abs=1e-9)
    assert q[[0, 19]] == pytest.approx([0.01142794, 0.09064119], abs=5e-9)
    assert float(q @ first) == pytest.approx(0.638455, abs=5e-7)
    assert float(p / p.sum() @ first) == pytest.approx(0.633, abs=5e-4)
    share = float(q @ first)
    wrong = problems.QuadraticGame().solve(np.array([share, 1 - share]))
    assert wrong == pytest.approx([0.010276, 0.331156], abs=5e-7)


def test_auc():
    task = problems.AucRidge(BY_CLASS)
    assert np.linalg.norm(task.biased - task.saddle) / np.linalg.norm(task.saddle) == pytest.approx(0.8073, abs=5e-5)
    x, y, *_ = problems._digits()
    clients = np.arange(problems.CLIENTS) * 10 // problems.CLIENTS
    heard = problems.weights_of_mean(np.array(BY_CLASS)[clients])
    for weights, at, said in ((np.full(40, 1 / 40), 0.0, (0.0, 0.0)), (heard, 1.0, (0.8073, 1.0))):
        a, b, bias, *w, alpha = torch.from_numpy(task.saddle + at * (task.biased - task.saddle))
        z = {"x": {"a": a, "b": b, "bias": bias, "w": torch.stack(w)}, "y": {"alpha": alpha}}
        assert gradient(task, z, x, y, np.repeat(weights, 35) / 35) < 1e-12
        found = task.model_metrics(z)
        assert (found["distance"], found["bias"]) == pytest.approx(said, abs=5e-5)


def test_softmax_regression_on_clothes(monkeypatch):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(200, 784)).astype(np.float32), random.integers(0, 10, 200)
    monkeypatch.setattr(problems, "_fashion", lambda folder: (x, y, x, y))
    task, weights = problems.FashionRidge(0.01), random.dirichlet(np.ones(100))
    found = torch.from_numpy(task.solve(weights))
    z = {"x": {"b": found[:10], "w": found[10:].view(784, 10)}}
    assert gradient(task, z, x, y, np.repeat(weights, 2) / 2) < 1e-6
    assert task.solve(weights.copy()) is task.solve(weights)
    assert task.model_metrics(z) == {}


def test_examples_of_fedaus_clients():
    y = np.repeat(np.arange(10), 600)
    owner = fedau.owners(y, 25, 3)
    shares = np.random.default_rng(3).dirichlet(np.full(10, 0.1), 25)
    held = np.stack([np.bincount(owner, y == c, 25) for c in range(10)], 1)
    assert (held.sum(0) == 600).all()
    assert np.abs(held - 600 * shares / shares.sum(0)).max() <= 1.0
    assert not np.array_equal(owner, fedau.owners(y, 25, 4))


def test_fedaus_net():
    made = fedau.net(0)
    assert sum(leaf.numel() for leaf in made.parameters()) == 211_690
    assert made[0](torch.tensor([-1.0, 1.0])).tolist() == pytest.approx([-0.42421, 2.82149], abs=1e-5)
    weighted = [leaf for name, leaf in made.named_parameters() if name.endswith("weight")]
    deviations = [float(leaf.detach().std() * (leaf[0].numel() / 2) ** 0.5) for leaf in weighted[:-1]]
    assert deviations == pytest.approx([1.0] * 3, abs=0.1)  # Kaiming's


def test_softmax_regression():
    task = problems.SoftmaxRidge()
    x, y, test_x, test_y = problems._digits()
    b, w = torch.from_numpy(task.saddle[:10]), torch.from_numpy(task.saddle[10:]).view(64, 10)
    z = {"x": {"b": b, "w": w}}
    assert gradient(task, z, x, y, np.full(len(y), 1 / len(y))) < 1e-7
    outputs = task.predict(z, Batch({"x": torch.from_numpy(test_x).double()}, torch.ones(len(test_y))))
    found = task.metrics(outputs, {"y": torch.from_numpy(test_y)})
    assert (found["accuracy"], found["worst_class_score"]) == pytest.approx((0.9597, 0.9024), abs=5e-5)


@pytest.mark.slow
def test_dropout_by_class_costs_the_worst_class_most_and_memory_gets_it_back(tmp_path):
    """Measured over five seeds: docs/guides/dropout.md."""
    given = fedfleet.load(shipped.FOLDER / "dropout" / "digits.yaml")
    by_class = (given.vary or {})["availability"][2]
    over = {"availability": by_class, "seeds": None, "compare": None, "vary": None, "evaluation.every": 200}
    lost, found = (
        fedfleet.run(given, {**over, **more}, out=tmp_path / name).summary["final"]
        for name, more in (("plain", {}), ("varp", {"algorithm.correction": "fedvarp"}))
    )
    assert found["eval/accuracy"] - lost["eval/accuracy"] > 0.02
    assert found["eval/worst_class_score"] - lost["eval/worst_class_score"] > 0.2
    assert found["eval/accuracy"] > 0.95


@pytest.mark.slow
def test_a_memory_reaches_the_saddle_of_auc_where_cdma_one_ends_at_another(tmp_path):
    """Measured over five seeds: docs/guides/dropout.md. Test AUC tells them hardly apart."""
    given = fedfleet.load(shipped.FOLDER / "dropout" / "auc_digits.yaml")
    by_class = (given.vary or {})["availability"][2]
    over = {"availability": by_class, "seeds": None, "compare": None, "vary": None, "evaluation.every": 1000}
    lost, found = (
        fedfleet.run(given, {**over, **more}, out=tmp_path / name).summary["final"]
        for name, more in (("plain", {}), ("varp", {"algorithm.correction": "fedvarp"}))
    )
    assert lost["eval/distance"] == pytest.approx(0.8073, abs=0.05)
    assert found["eval/distance"] < 0.05
    assert lost["eval/auc"] == pytest.approx(found["eval/auc"], abs=0.005)
