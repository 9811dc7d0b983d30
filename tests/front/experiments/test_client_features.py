"""Clusters of clients by what they make of the initial model."""

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call

import fedfleet
from fedfleet.assembly import client_features
from fedfleet.assembly.client_features import ClientFeatures, sketch
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions
from tests.refusals import tells

TASK = Classification(ModelOptions(model="logistic"), DataShape((3,), 4))
X = rng.normal(rng.key(1), (9, 3))
Y = torch.tensor([0, 1, 1, 3, 3, 3, 0, 0, 1])
CLIENTS = InMemoryPopulation(
    {"x": X, "y": Y}, torch.arange(9), torch.tensor([0, 3, 7, 9]), torch.zeros(3, dtype=torch.int64)
)
MINE = [slice(0, 3), slice(3, 7), slice(7, 9)]


@pytest.fixture
def few(monkeypatch):
    """Clients are gone through two examples at a time."""
    monkeypatch.setattr(client_features, "ROWS", 2)


def logits(z, x):
    (weight, bias) = z["x"].values() if next(iter(z["x"])).endswith("weight") else reversed(z["x"].values())
    return x @ weight.T + bias


def test_losses_by_label(few):
    z = TASK.init(0)
    found = ClientFeatures(TASK, z)("loss", CLIENTS)
    each = torch.nn.functional.cross_entropy(logits(z, X), Y, reduction="none").double()
    for mine, row in zip(MINE, found, strict=True):
        for label in range(4):
            of = each[mine][Y[mine] == label]
            assert row[label] == pytest.approx(float(of.mean() if len(of) else each[mine].mean()), rel=1e-6)


def test_directions_of_gradients(few):
    z = TASK.init(0)
    found = ClientFeatures(TASK, z)("gradient", CLIENTS)
    for mine, row in zip(MINE, found, strict=True):
        leaves = {k: v.clone().requires_grad_() for k, v in z["x"].items()}
        loss = torch.nn.functional.cross_entropy(functional_call(TASK._net, leaves, (X[mine],)), Y[mine])
        want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(leaves.values()))])
        np.testing.assert_allclose(row, want / want.norm(), atol=1e-6)


def test_a_sketch_keeps_squared_distances_in_the_mean():
    short = torch.arange(5.0)
    assert sketch(short) is short
    a, b = rng.normal(rng.key(3), (2, 20_000), torch.float64)
    assert sketch(a).shape == (client_features.SKETCHED,)
    assert torch.allclose(sketch(a) + 2 * sketch(b), sketch(a + 2 * b))
    away = float((sketch(a) - sketch(b)).square().sum() / (a - b).square().sum())
    assert away == pytest.approx(1, abs=5 * math.sqrt(2 / client_features.SKETCHED))
    inner = float(sketch(a) @ sketch(b)) / float(a.norm() * b.norm())
    assert abs(inner) < 5 / math.sqrt(client_features.SKETCHED)


@pytest.mark.parametrize("by", ["gradient", "loss"])
def test_clients_with_other_labels_are_other_domains_for_every_seed(by):
    """Clients of the digits 0 to 4, and of 5 to 9, as sorted."""
    given = {
        "population": {"clients": 10, "partition": "label_sorted"},
        "domains": {"kind": "clusters", "count": 2, "by": by}, "task.model": "logistic", "executor.kind": "local",
        "cohort.size": 5,
    }  # fmt: skip
    of = [fedfleet.Experiment(fedfleet.load({**given, "seed": s})).population.domains(torch.arange(10)) for s in (0, 1)]
    assert torch.equal(*of)
    assert len(of[0].unique()) == 2


def test_a_task_without_losses_of_examples_says_so():
    bare = Classification(ModelOptions(model="logistic"), DataShape((3,), 4))
    bare.functions = {"predict": bare.functions["predict"]}
    tells(lambda: ClientFeatures(bare, bare.init(0))("loss", CLIENTS), "by=loss", ValueError)
