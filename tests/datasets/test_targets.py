"""Targets in the place of labels: read from arrays and tables, dealt, and refused where labels are wanted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import fedfleet
from fedfleet.data import DataError, from_arrays, from_dataframe
from fedfleet.datasets.examples import Dataset, FederatedDataset

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.linspace(-1, 1, 20)


def table(**columns):
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "price": Y, "cost": 2 * Y, "shop": np.arange(20) // 5, **columns})


def test_arrays_of_numbers_stay_numbers():
    data = from_arrays(X, target=Y, test=np.arange(20) % 4 == 0)
    assert isinstance(data, Dataset)
    assert data.train.classes == data.test.classes == 0
    assert torch.equal(data.test.y, torch.tensor(Y[::4], dtype=torch.float32))
    assert len(data.train) == 15
    held, kept = data.parted(0.2)
    assert (len(held.train), len(kept)) == (12, 3)
    whole = from_arrays(X, target=np.arange(40).reshape(20, 2), test=(X[:2], np.ones((2, 2), dtype=int)))
    assert (whole.train.y.dtype, tuple(whole.train.y.shape), len(whole.train)) == (torch.int64, (20, 2), 20)


def test_columns_of_a_table_are_targets():
    data = from_dataframe(table(), target="price", features=["a"], client="shop", test=0.25)
    assert isinstance(data, FederatedDataset)
    assert data.test.y.dtype == torch.float32
    assert data.test.y.shape == (5,)
    both = from_dataframe(table(late=np.arange(20) >= 15), target=["cost", "price"], test="late")
    assert isinstance(both, Dataset)
    assert torch.equal(both.train.y, torch.tensor(np.stack([2 * Y, Y], 1)[:15], dtype=torch.float32))
    assert tuple(both.train.x.shape) == (15, 3)  # a, b, shop
    assert torch.equal(from_dataframe(table(), target="shop", test=0.5).train.y.unique(), torch.arange(4.0))
    apart = from_dataframe(table(), target="price", test=table().head(3))
    assert len(apart.test) == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: from_arrays(X), "y: is not given: give y= labels or target= numbers"),
        (lambda: from_arrays(X, Y > 0, target=Y), "y: labels and targets are given: give y="),
        (
            lambda: from_arrays(X, target=np.where(Y > 0, np.nan, Y)),
            "target, row 10: has a target that is no finite number",
        ),
        (lambda: from_arrays(X, target=Y * 1e200), "target, row 0: has a target that is no finite number"),
        (lambda: from_arrays(X, target=Y[:5]), r"target: is of shape (5,), and there are 20 examples"),
        (lambda: from_arrays(X, target=Y, classes=3), "classes: is 3: leave it out, for there are targets"),
        (lambda: from_arrays(X, Y > 0, classes=0), "classes: is 0: leave it out"),
        (lambda: from_arrays(X, target=np.array(["a"] * 20)), "targets are <U1, no numbers"),
        (
            lambda: from_arrays(X, target=Y, test=(X, np.stack([Y, Y], 1))),
            "targets are float32 of shape (2,), and those of x",
        ),
        (lambda: from_arrays(X, Y), "y: labels are float64: make them integers from 0"),
        (lambda: from_dataframe(table(), target="prise"), "df: no column 'prise': did you mean 'price'"),
        (lambda: from_dataframe(table(), target=[]), "target: is an empty list: name a column"),
        (lambda: from_dataframe(table(), target=["price", "price"]), "the column 'price' is named twice"),
        (lambda: from_dataframe(table(name="x"), target="name", features=["a"]), "column 'name': is text, no numbers"),
        (lambda: from_dataframe(table(), target="price", features=["a", "price"]), "the column 'price' is no feature"),
        (lambda: from_dataframe(table(), target="price", test=table()[["a", "b"]]), "test: no column 'price'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, says):
    with pytest.raises(DataError) as e:
        make()
    assert says in str(e.value)
    assert "\n" not in str(e.value)


CONFIG = {
    "rounds": 1,
    "population": {"clients": 4},
    "task": {"name": "module", "model": "tests.tasks.own_nets:plain", "loss": "mse"},
    "algorithm": {"batch_size": 2, "steps": 2},
    "cohort": {"invite": 2},
    "executor": {"kind": "local"},
}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"population.partition": "dirichlet"},
            "population.partition='dirichlet': it goes by labels, and 'arrays' has targets",
        ),
        ({"population.partition": "label_sorted"}, "population.partition='label_sorted': it goes by labels"),
        ({"population.partition": "shards"}, "population.partition='shards': it goes by labels"),
        ({"population.partition": "pathological"}, "population.partition='pathological': it goes by labels"),
        ({"population.partition": "inner_dirichlet"}, "population.partition='inner_dirichlet': it goes by labels"),
        ({"population.partition": "distribution"}, "population.partition='distribution': it goes by labels"),
        ({"domains": "label"}, "domains='label': it goes by labels"),
        ({"domains": {"kind": "clusters", "count": 2}}, "domains='clusters': it goes by labels"),
        ({"availability": "label_correlated"}, "availability='label_correlated': it goes by labels"),
        ({"attack": {"kind": "label_flip", "share": 0.5}}, "attack='label_flip': it goes by labels"),
        (
            {"task": "classification", "task.model": "mlp", "task.loss": None},
            "task.name='classification': it is of labels",
        ),
        (
            {"task.loss": "cross_entropy"},
            "cross_entropy is of labels, and the data have targets of shape (3,): choose mse",
        ),
        ({"task.loss": "bce_with_logits"}, "bce_with_logits takes labels from 0 to 1"),
        ({"task.arguments.out": 2}, "outputs of shape (3, 2) for targets of shape (3,): mse wants both alike"),
        ({"task.arguments.features": 4}, "it fails on 3 examples of (3,) float32 (RuntimeError"),
    ],
)
def test_what_goes_by_labels_is_refused(overrides, says):
    overrides = {k: v for k, v in overrides.items() if k != "task.loss" or v is not None}
    config = {**CONFIG, "task": {}} if "task" in overrides else CONFIG
    with pytest.raises(fedfleet.ConfigError) as e:
        fedfleet.Experiment(fedfleet.load(config, overrides), data=from_arrays(X, target=Y, test=0.25))
    assert says in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("partition", ["iid", "quantity_skew", "linear"])
def test_targets_are_dealt_as_labels_are(partition, tmp_path):
    data = from_arrays(X, target=Y, test=np.arange(20) % 5 == 0)
    x = fedfleet.Experiment(fedfleet.load(CONFIG, {"population.partition": partition}), data=data)
    held = x.population.local_data(torch.arange(4))
    rows = [row[:n] for row, n in zip(held.rows, held.counts.tolist(), strict=True)]
    found = torch.cat([held.data["y"][r] for r in rows])
    assert torch.equal(found.sort().values, data.train.y.sort().values)
    run = x.run(tmp_path / "run")
    assert {"eval/mae", "eval/r2", "eval/loss"} <= run.summary["final"].keys()


def test_a_table_is_learnt_with_its_clients_and_measured_on_each(tmp_path):
    data = from_dataframe(table(), target="price", features=["a", "b", "cost"], client="shop", test=0.25)
    frame = {"population": {"held_out": 0.2}, "evaluation": {"per_client": True, "every": 1}}
    run = fedfleet.run({**CONFIG, **frame}, {"algorithm.lr": 1e-4}, data=data, out=tmp_path / "run")
    assert {"eval/clients_mae", "eval/clients_loss"} <= run.summary["final"].keys()
    report = fedfleet.write_report([run.folder], run.folder)
    assert report.exists()
