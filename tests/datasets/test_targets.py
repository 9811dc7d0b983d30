"""Targets in the place of labels: read from arrays and tables, dealt, and refused where labels are wanted."""

from __future__ import annotations

import importlib.util

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import fedfleet
from fedfleet.config.population import load_data
from fedfleet.data import DataError, from_arrays, from_dataframe, from_hf, from_texts
from fedfleet.datasets import keep
from fedfleet.datasets.examples import FederatedDataset
from tests.datasets.layouts import on_disk
from tests.refusals import all_say, tells

needs_hf = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.linspace(-1, 1, 20)


def table(**columns):
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "price": Y, "cost": 2 * Y, "shop": np.arange(20) // 5, **columns})


def test_arrays_of_numbers_stay_numbers():
    data = from_arrays(X, target=Y, test=np.arange(20) % 4 == 0)
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
    assert (data.test.y.dtype, data.test.y.shape) == (torch.float32, (5,))
    both = from_dataframe(table(late=np.arange(20) >= 15), target=["cost", "price"], test="late")
    assert torch.equal(both.train.y, torch.tensor(np.stack([2 * Y, Y], 1)[:15], dtype=torch.float32))
    assert tuple(both.train.x.shape) == (15, 3)  # a, b, shop
    assert torch.equal(from_dataframe(table(), target="shop", test=0.5).train.y.unique(), torch.arange(4.0))
    apart = from_dataframe(table(), target="price", test=table().head(3))
    assert len(apart.test) == 3


def words(**columns):
    """The same with texts in the place of a."""
    return table(**{"a": [f"{'good' if y > 0 else 'bad'} {i}" for i, y in enumerate(Y)], **columns})


def hf(bad: int = 0, **columns):
    """The same of Hugging Face's, with a hole in its prices if it is bad."""
    datasets = pytest.importorskip("datasets")
    frame = table(**columns)
    frame["price"] = [None if bad and i == 3 else y for i, y in enumerate(Y.tolist())]
    return datasets.Dataset.from_pandas(frame)


def test_what_cannot_be_is_refused(subtests):
    rows = [
        (lambda: from_arrays(X), "y: is not given: give y= labels or target= numbers"),
        (lambda: from_arrays(X, Y > 0, target=Y), "y: labels and targets are given: give y="),
        (lambda: from_arrays(X, target=np.where(Y > 0, np.nan, Y)),
         "target, row 10: has a target that is no finite number"),
        (lambda: from_arrays(X, target=Y * 1e200), "target, row 0: has a target that is no finite number"),
        (lambda: from_arrays(X, target=Y[:5]), "target: is of shape (5,), and there are 20 examples"),
        (lambda: from_arrays(X, target=Y, classes=3), "classes: is 3"),
        (lambda: from_arrays(X, Y > 0, classes=0), "classes: is 0"),
        (lambda: from_arrays(X, target=np.array(["a"] * 20)), "targets are <U1, no numbers"),
        (lambda: from_arrays(X, target=Y, test=(X, np.stack([Y, Y], 1))),
         "targets are float32 of shape (2,), and those of x"),
        (lambda: from_arrays(X, Y), "y: labels are float64: make them integers from 0"),
        (lambda: from_dataframe(table(), target="prise"), "df: no column 'prise': did you mean 'price'"),
        (lambda: from_dataframe(table(), target=[]), "target: is an empty list"),
        (lambda: from_dataframe(table(), target=["price", "price"]), "the column 'price' is named twice"),
        (lambda: from_dataframe(table(name="x"), target="name", features=["a"]), "column 'name': is text, no numbers"),
        (lambda: from_dataframe(table(), target="price", features=["a", "price"]), "the column 'price' is no feature"),
        (lambda: from_dataframe(table(), target="price", test=table()[["a", "b"]]), "test: no column 'price'"),
        (lambda: from_dataframe(table(y=0), label="y", target="price"), "target: is 'price', beside label='y': leave"),
        (lambda: from_dataframe(table(y=0), target="price"),
         "df: the column 'y' is beside target='price', and would be a feature: leave it out, or name it in features="),
        (lambda: from_dataframe(table(), text="a", target="prise"), "df: no column 'prise': did you mean 'price'"),
        (lambda: from_dataframe(words(), text="a", target=["a"]), "df: the column 'a' is named twice"),
        (lambda: from_dataframe(words(), text="a", target="price", classes=2), "classes: is 2"),
        (lambda: from_dataframe(words(price=[np.nan] * 20), text="a", target="price"), "row 0: is missing"),
        (lambda: from_texts(["a"] * 20, Y > 0, target=Y), "y: labels and targets are given: give y= labels or target="),
        (lambda: from_texts(["a"] * 20, target=Y[:5]), "target: is of shape (5,), and there are 20 examples"),
        (lambda: from_texts(["a"] * 20, target=Y, test=(["a"],)), "test: has 1 entries: give (texts, y) or"),
        (lambda: from_hf(hf(label=0), label="label", target="price"),
         "target: is 'price', beside label='label': leave"),
        (lambda: from_hf(hf(label=0), target="price"), "train: the column 'label' is beside target='price', and would"),
        (lambda: from_hf(hf(), text="b", target="price"), "train, row 0: is neither text nor a list of token numbers"),
        (lambda: from_hf(hf(), target="price", classes=2), "classes: is 2"),
        (lambda: from_hf(hf(), target=["price", "costs"]), "train: no column 'costs': did you mean 'cost'"),
        (lambda: from_hf(hf(), target=[]), "target: is an empty list"),
        (lambda: from_hf(hf(), target="price", test=hf(bad=1)), "column 'price', row 3: is missing"),
    ]  # fmt: skip
    all_say(subtests, lambda make: make(), rows, DataError)


def test_configured_targets_are_checked_before_anything_is_read(subtests):
    def call(dataset):
        fedfleet.load({"population": {"dataset": {"path": "nowhere", "target": "cost", **dataset}}})

    rows = [
        ({"name": "hf", "label": "y"}, "population.dataset: target: is 'cost', beside label='y'"),
        ({"name": "tff", "label": "y"}, "population.dataset: target: is 'cost', beside label='y'"),
        ({"name": "hf", "target": []}, "population.dataset.target=[]"),
        ({"name": "leaf"}, "population.dataset.target='cost': unknown key"),
    ]  # fmt: skip
    all_say(subtests, call, rows)


CONFIG = {
    "rounds": 1, "population": {"clients": 4},
    "task": {"name": "module", "model": "tests.tasks.own_nets:plain", "loss": "mse"},
    "algorithm": {"batch_size": 2, "steps": 2}, "cohort": {"size": 2}, "executor": {"kind": "local"},
}  # fmt: skip


def test_what_goes_by_labels_is_refused(subtests):
    def call(overrides):
        overrides = {k: v for k, v in overrides.items() if k != "task.loss" or v is not None}
        config = {**CONFIG, "task": {}} if "task" in overrides else CONFIG
        fedfleet.Experiment(fedfleet.load(config, overrides), data=from_arrays(X, target=Y, test=0.25))

    rows = [
        ({"population.partition": "dirichlet"},
         "population.partition='dirichlet': it goes by labels, and 'arrays' has targets"),
        ({"population.partition": "label_sorted"}, "population.partition='label_sorted': it goes by labels"),
        ({"population.partition": "shards"}, "population.partition='shards': it goes by labels"),
        ({"population.partition": "pathological"}, "population.partition='pathological': it goes by labels"),
        ({"population.partition": "inner_dirichlet"}, "population.partition='inner_dirichlet': it goes by labels"),
        ({"population.partition": "distribution"}, "population.partition='distribution': it goes by labels"),
        ({"domains": "label"}, "domains='label': it goes by labels"),
        ({"domains": {"kind": "clusters", "count": 2}}, "domains='clusters': it goes by labels"),
        ({"availability": "label_correlated"}, "availability='label_correlated': it goes by labels"),
        ({"availability": {"kind": "cyclic", "rates": "mifa"}}, "availability='cyclic': it goes by labels"),
        ({"attack": {"kind": "label_flip", "share": 0.5}}, "attack='label_flip': it goes by labels"),
        ({"task": "classification", "task.model": "mlp", "task.loss": None},
         "task.name='classification': it is of labels"),
        ({"task.loss": "cross_entropy"}, "cross_entropy is of labels, and the data have targets of shape (3,)"),
        ({"task.loss": "bce_with_logits"}, "bce_with_logits takes labels from 0 to 1"),
        ({"task.arguments.out": 2}, "outputs of shape (3, 2) for targets of shape (3,)"),
        ({"task.arguments.features": 4}, "it fails on 3 examples of (3,) float32 (RuntimeError"),
    ]  # fmt: skip
    all_say(subtests, call, rows)


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


@pytest.mark.slow
def test_a_table_is_learnt_with_its_clients_and_measured_on_each(tmp_path):
    data = from_dataframe(table(), target="price", features=["a", "b", "cost"], client="shop", test=0.25)
    frame = {"population": {"held_out": 0.2}, "evaluation": {"per_client": True, "every": 1}}
    run = fedfleet.run({**CONFIG, **frame}, {"algorithm.lr": 1e-4}, data=data, out=tmp_path / "run")
    assert {"eval/clients_mae", "eval/clients_loss"} <= run.summary["final"].keys()
    assert run.summary["dealt"] is False
    report = fedfleet.write_report([run.folder], run.folder)
    assert report.exists()


def test_texts_have_targets_of_one_number_or_several(tmp_path):
    texts, late = words()["a"].tolist(), np.arange(20) >= 15
    one = from_texts(texts, target=Y, client=np.arange(20) // 5, test=late)
    of_frame = from_dataframe(words(late=late), text="a", target="price", client="shop", test="late")
    for data in (one, of_frame):
        assert (data.test.classes, data.test.words, data.test.x.shape[1]) == (0, one.test.words, 2)
        assert torch.equal(data.test.y, torch.tensor(Y[15:], dtype=torch.float32))
        local = data.population.local_data(torch.arange(3))
        assert torch.equal(local.data["y"][local.rows].flatten(), torch.tensor(Y[:15], dtype=torch.float32))
    both = from_dataframe(words(), text="a", target=["price", "cost"], test=words().head(4)).test
    assert torch.equal(both.y, torch.tensor(np.stack([Y, 2 * Y], 1)[:4], dtype=torch.float32))
    apart = from_texts(texts, target=Y, domain=["n"] * 20, test=(["good 1", "bad"], [0.5, 1], ["n", "n"]))
    assert apart.test.y.tolist() == [0.5, 1]


class Scoring(nn.Module):
    """Of a text the mean score of its words."""

    def __init__(self, words: int):
        super().__init__()
        self.score = nn.Embedding(words, 1)

    def forward(self, tokens, mask):
        return (self.score(tokens)[..., 0] * mask).sum(1) / mask.sum(1)


@pytest.mark.slow
@needs_hf
def test_scores_of_texts_are_learnt_from_each_source(tmp_path):
    import datasets

    texts = words(price=np.sign(Y))
    whole = datasets.Dataset.from_pandas(texts)
    given = from_hf(whole, text="a", target="price", client="shop", test=whole, words=4)
    whole.save_to_disk(str(tmp_path / "saved"))
    named = {"name": "hf", "path": str(tmp_path / "saved"), "client": "shop", "target": "price", "hold_out": 0.5}
    named |= {"text": "a", "words": 4}
    keep.keep("hf", {name: value for name, value in named.items() if name != "name"}, tmp_path / "kept")
    config = {**CONFIG, "rounds": 40, "population": {}, "cohort": {"size": 2}}
    task = {"model": "tests.datasets.test_targets:Scoring"}
    for i, source in enumerate((given, named, {"name": "disk", "path": str(tmp_path / "kept")})):
        data = source if isinstance(source, FederatedDataset) else None
        population = {} if data is not None else {"dataset": source}
        more = {"population": population, "algorithm": {"lr": 0.5, "batch_size": 5}, "task": {**CONFIG["task"], **task}}
        run = fedfleet.run({**config, **more}, data=data, out=tmp_path / f"run{i}")
        assert run.summary["final"]["eval/mae"] < 0.6  # of -1 and 1; 1 of a net that has learnt nothing


@needs_hf
def test_columns_of_hugging_face_are_targets(tmp_path):
    import datasets

    data = datasets.Dataset.from_pandas(table(pair=[[y, -y] for y in Y.tolist()]))
    one = from_hf(data, client="shop", target="price", features=["a", "b"], test=data)
    assert (one.test.classes, one.test.x.shape) == (0, (20, 2))
    assert torch.equal(one.test.y, torch.tensor(Y, dtype=torch.float32))
    both = from_hf(data, target=["cost", "price"], features=["a"], test=data).test.y
    assert torch.equal(both, torch.tensor(np.stack([2 * Y, Y], 1), dtype=torch.float32))
    lists = from_hf(data, target="pair", features=["a"], test=data).test.y
    assert torch.equal(lists, torch.tensor(np.stack([Y, -Y], 1), dtype=torch.float32))
    data.save_to_disk(str(tmp_path / "saved"))
    named = {"name": "hf", "path": str(tmp_path / "saved"), "client": "shop", "target": "price", "features": ["a"]}
    config = {**CONFIG, "population": {"dataset": named}}
    run = fedfleet.run(config, {"task.arguments": {"features": 1}}, out=tmp_path / "run")
    assert run.summary["status"] == "finished"
    written = fedfleet.load(tmp_path / "run" / "config.yaml")  # with every default: it says that there is no label
    assert written.population.dataset.target == "price"


@needs_hf
def test_images_have_targets_in_a_table_beside_them(tmp_path):
    for i in range(6):
        Image.new("RGB", (4, 4), (40 * i, 0, 0)).save(tmp_path / f"{i}.png")
    frame = pd.DataFrame({"file_name": [f"{i}.png" for i in range(6)], "age": np.arange(6) / 2, "home": ["n", "s"] * 3})
    frame.to_csv(tmp_path / "metadata.csv", index=False)
    asked = {"path": str(tmp_path), "features": ["image"], "target": "age", "client": "home", "hold_out": 0.5}
    data = load_data(fedfleet.load({"population": {"dataset": {"name": "hf", **asked}}}))
    assert (data.test.x.shape, data.test.x.dtype, data.test.classes) == ((3, 3, 4, 4), torch.uint8, 0)
    assert torch.equal(data.test.y, data.test.x[:, 0, 0, 0] / 80)


@pytest.mark.skipif(importlib.util.find_spec("h5py") is None, reason="h5py is not installed")
@pytest.mark.parametrize("shape", [(), (2,)])
def test_fields_of_tensorflow_federated_are_targets(tmp_path, shape):
    import h5py

    with h5py.File(tmp_path / "in.h5", "w") as file:
        for i in range(4):
            file[f"examples/c{i}/x"] = np.full((3, 2), i, np.float32)
            file[f"examples/c{i}/speed"] = np.full((3, *shape), i / 4)
            file[f"examples/c{i}/y"] = np.zeros(3, int)
    at = str(tmp_path / "in.h5")
    data = load_data(fedfleet.load({"population": {"dataset": {"name": "tff", "path": at, "target": "speed"}}}))
    assert (data.test.classes, data.test.y.shape, data.test.y.dtype) == (0, (3, *shape), torch.float32)
    assert torch.equal(data.test.y.reshape(3, -1)[:, 0], data.test.x[:, 0] / 4)
    keep.keep("tff", {"path": at, "target": "speed"}, tmp_path / "out")
    kept = on_disk(tmp_path / "out")
    assert torch.equal(kept.test.y, data.test.y)
    for where in (data, kept):
        local = where.population.local_data(torch.arange(3))
        x, y = (local.data[name][local.rows] for name in ("x", "y"))
        assert y.shape == (3, 3, *shape)
        assert torch.equal(y.reshape(3, 3, -1)[..., 0], x[..., 0] / 4)
    with h5py.File(tmp_path / "in.h5", "a") as file:
        file["examples/c1/speed"][1] = np.nan
    tells(lambda: keep.keep("tff", {"path": at, "target": "speed"}, tmp_path / "no"), "in.h5: speed, row 4", DataError)
