"""Texts on disk: what a table of them becomes is what `from_texts` makes of them; texts of TensorFlow Federated's layout."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedfleet
from fedfleet.config.population import load_data
from fedfleet.data import from_texts
from fedfleet.datasets import csv_part, keep, parquet, text_table
from fedfleet.datasets.convert import convert
from fedfleet.datasets.example_table import Columns
from fedfleet.datasets.examples import FederatedDataset
from fedfleet.datasets.files import DataError
from fedfleet.datasets.texts import Reading
from tests.datasets.layouts import on_disk
from tests.refusals import all_say

WORDS = ["a", "b", "c", "d", "e", "f,", "g!", "the", "of", "and"]
DRAW = np.random.default_rng(0)
TEXTS = [" ".join(DRAW.choice(WORDS, DRAW.integers(2, 15))) + f" own{i}" for i in range(40)]
FRAME = pd.DataFrame({"user": [f"u{i % 7}" for i in range(40)], "said": TEXTS, "mood": [i % 3 for i in range(40)]})
FRAME["numbers"] = [[int(n) for n in DRAW.integers(0, 9, DRAW.integers(2, 9))] for _ in range(40)]
FRAME["price"], FRAME["rent"] = DRAW.normal(size=40).astype(np.float32), DRAW.integers(0, 9, 40)
FRAME["place"] = [f"p{int(u[1]) % 2}" for u in FRAME["user"]]


def held(data: FederatedDataset, names: list[str]) -> dict[str, Any]:
    """Name -> x, y of every client."""
    local = data.population.local_data(torch.arange(data.population.size))
    rows = [row[:count] for row, count in zip(local.rows, local.counts, strict=True)]
    return {n: (local.data["x"][r].tolist(), local.data["y"][r].tolist()) for n, r in zip(names, rows, strict=True)}


def names_of(folder: Path) -> list[str]:
    return pd.read_feather(folder / "clients.arrow")["client"].tolist()


@pytest.mark.parametrize("own_test", [False, True])
@pytest.mark.parametrize("layout", ["parquet", "csv"])
@pytest.mark.parametrize(("label", "target", "how"), [
    ("mood", (), Reading()), ("mood", (), Reading("words", 4, 6)), ("mood", (), Reading("bytes", 9)),
    (None, (), Reading("characters", 5, 9)), (None, (), Reading("words")), ("y", ("price",), Reading("words", 4, 6)),
    (None, ("price", "rent"), Reading("bytes", 9)),
])  # fmt: skip
def test_a_table_of_texts_becomes_what_from_texts_makes_of_it(
    tmp_path, label, target, how, layout, own_test, monkeypatch
):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 7)
    monkeypatch.setattr(csv_part, "BLOCK_BYTES", 400)
    monkeypatch.setattr(text_table, "PADDED_BYTES", 700)
    frame = FRAME.drop(columns="numbers")
    frame.to_parquet(tmp_path / "in.parquet")
    frame.to_csv(tmp_path / "in.csv", index=False)
    test = None
    if own_test:
        test = tmp_path / f"test.{layout}"
        last = frame.tail(5).drop(columns="user")
        last.to_csv(test, index=False) if layout == "csv" else last.to_parquet(test, index=False)
    said: list[str] = []
    called = Columns(client="user", label=label, target=target, text="said", domain="place")
    options: dict[str, Any] = {"called": called, "how": how, "layout": layout, "say": said.append}
    totals = convert(tmp_path / f"in.{layout}", tmp_path / "out", test=test, **options)
    beside = [name for name in ("mood", "price", "rent") if name not in (label, *target)]
    assert said == [f"{tmp_path / f'in.{layout}'}: column {name!r} is beside a text, and left out" for name in beside]
    data, names = on_disk(tmp_path / "out"), names_of(tmp_path / "out")
    one = list(target) if len(target) > 1 else target[0] if target else label
    y = None if one is None else FRAME[one]
    aim = {"target" if target else "y": y if y is None else y.to_numpy()}
    kept = FRAME["user"].isin(names)
    other: Any = (~kept).to_numpy()
    if own_test:
        assert kept.all()
        of = FRAME.tail(5)
        other = (of["said"].tolist(), *([] if one is None else [of[one].to_numpy()]), of["place"])
    domain = FRAME["place"] if own_test else None
    like = from_texts(TEXTS, **aim, client=FRAME["user"], domain=domain, test=other, **how._asdict())
    assert isinstance(like, FederatedDataset)
    assert held(data, names) == held(like, names)
    assert (data.test.x.tolist(), data.test.y.tolist()) == (like.test.x.tolist(), like.test.y.tolist())
    if like.test.domain is not None:
        assert data.test.domain.tolist() == like.test.domain.tolist()
    else:
        place = ["p0", "p1"].index(FRAME["place"][~kept].unique().item())
        assert data.test.domain.tolist() == [place] * len(like.test)
    assert (data.test.words, data.test.classes) == (like.test.words, like.test.classes)
    assert (data.names.vocabulary, data.population.examples["x"].dtype) == (like.names.vocabulary, np.int16)
    assert totals.words == data.test.words == data.sample(5).words
    assert totals.examples == sum(len(x) for x, _ in held(data, names).values())


@pytest.mark.parametrize(("label", "length"), [("mood", 3), (None, 3), (None, None)])
def test_lists_of_token_numbers(tmp_path, label, length):
    FRAME.to_parquet(tmp_path / "in.parquet")
    called = Columns(client="user", label=label, text="numbers")
    convert(tmp_path / "in.parquet", tmp_path / "out", called=called, how=Reading(None, length))
    data, names = on_disk(tmp_path / "out"), names_of(tmp_path / "out")
    out = (~FRAME["user"].isin(names)).to_numpy()
    y = None if label is None else FRAME["mood"]
    like = from_texts(FRAME["numbers"].tolist(), y, client=FRAME["user"], test=out, length=length)
    assert isinstance(like, FederatedDataset)
    assert held(data, names) == held(like, names)
    assert data.test.words == like.test.words == 9


def test_texts_that_cannot_be_read_are_refused(subtests, tmp_path_factory):
    def call(row):
        called, how = row
        tmp_path = tmp_path_factory.mktemp("row")
        frame = FRAME.copy()
        if called.get("text") in ("one", "hole"):
            frame[called["text"]] = [None if i == 3 else "a b" for i in range(40)]
            frame = frame.fillna({"one": "b"}) if called["text"] == "one" else frame
        frame.to_parquet(tmp_path / "in.parquet")
        columns = Columns(**{"client": "user", "label": "mood", **called})
        try:
            convert(tmp_path / "in.parquet", tmp_path / "out", called=columns, how=Reading(**how))
        finally:
            assert sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet"]

    rows = [
        (({"text": "sad"}, {}), "no column 'sad' among user, said, mood, numbers, price, rent, place"),
        (({"text": "mood", "label": None}, {}), "column 'mood' is int64"),
        (({"text": "said"}, {"tokenizer": "word"}), "tokenizer: is 'word'"),
        (({"text": "numbers"}, {"tokenizer": "words"}), "tokenizer: is 'words', and"),
        (({"text": "numbers"}, {"words": 4}), "column 'numbers', row"),
        (({"text": "said"}, {"tokenizer": "bytes", "words": 4}), "words: is 4, and bytes has a vocabulary of its own"),
        (({}, {"length": 4}), "length: is 4, and no column is text"), (({"label": None}, {}), "label: is None"),
        (({"text": "said", "target": ("said",)}, {}), "the column 'said' is named twice: give another"),
        (({"text": "said", "target": ("place",)}, {}), "column 'place' is"),
        (({"text": "said", "label": "said"}, {}), "the column 'said' is named twice: give another"),
        (({"text": "said", "label": "place"}, {}), ": make it integers"),
        (({"text": "one", "label": None}, {}), "column 'one', row 3: has 1 token and none to foresee"),
        (({"text": "hole"}, {}), "column 'hole', row 3"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


def test_texts_are_learnt_from_disk(tmp_path):
    FRAME.to_parquet(tmp_path / "in.parquet")
    config = {"rounds": 1, "algorithm": {"batch_size": 2}, "cohort": {"size": 2}, "executor": {"kind": "local"}}
    for label, task in (("mood", {"model": "bag", "hidden": [4]}), (None, {"name": "language_model", "hidden": 4})):
        out = tmp_path / str(label)
        convert(tmp_path / "in.parquet", out, called=Columns(client="user", label=label, text="said"))
        population = {"dataset": {"name": "disk", "path": str(out)}}
        run = fedfleet.run({**config, "population": population, "task": task}, out=tmp_path / f"run {label}")
        assert ("eval/perplexity" in run.summary["final"]) == (label is None)


def hdf5(path: Path, clients: dict[str, dict[str, Any]]) -> str:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            for field, values in fields.items():
                kind = h5py.string_dtype() if values and isinstance(values[0], str) else None
                file.create_dataset(f"examples/{name}/{field}", data=values, dtype=kind)
    return str(path)


def tff(**options: Any) -> Any:
    return load_data(fedfleet.load({"population": {"dataset": {"name": "tff", **options}}}))


PLAYS = {
    "romeo": {"snippets": ["but soft", "o", "what light"]},
    "juliet": {"snippets": ["ay me", "é"]},
    "nurse": {"snippets": ["x"]},
}
needs_h5py = pytest.mark.skipif(importlib.util.find_spec("h5py") is None, reason="h5py is not installed")


@needs_h5py
def test_snippets_of_tensorflow_federated_are_learnt_from(tmp_path):
    """Of one character nothing is to be foreseen: such texts are left out, and whoever has no others."""
    train = hdf5(tmp_path / "train.h5", PLAYS)
    test = hdf5(tmp_path / "test.h5", {"romeo": {"snippets": ["sleep", "s"]}})
    data = tff(path=train, test=test, tokenizer="bytes", length=6)
    assert (data.population.size, data.test.words, data.test.classes) == (2, 256, 256)
    assert data.test.x.tolist() == [[*b"sleep", -1, -1]]
    found = held(data, ["juliet", "romeo"])
    assert found["juliet"] == ([[*b"ay me", -1, -1], [*"é".encode(), *[-1] * 5]], [0, 0])
    assert found["romeo"][0] == [[*b"but sof"], [*b"ft", *[-1] * 5], [*b"what li"], [*b"ight", *[-1] * 3]]
    totals = keep.keep("tff", {"path": train, "test": test, "tokenizer": "bytes", "length": 6}, tmp_path / "out")
    assert totals.words == 256
    kept = on_disk(tmp_path / "out")
    assert held(kept, names_of(tmp_path / "out")) == found
    assert (kept.test.words, kept.test.x.tolist()) == (256, data.test.x.tolist())


@needs_h5py
def test_a_field_of_texts_may_have_labels_and_another_name(tmp_path):
    posts = {f"u{i}": {"tokens": ["a b", "b"], "title": ["x y z", "x"], "kind": [0, i % 2]} for i in range(4)}
    path = hdf5(tmp_path / "in.h5", posts)
    data = tff(path=path, label="kind")
    assert (data.test.classes, data.test.words, data.test.x.shape) == (2, 3, (2, 2))
    titles = tff(path=path, text="title", words=2)
    assert (titles.test.words, titles.test.x.tolist()) == (2, [[1, 0, 0]])


@needs_h5py
def test_snippets_have_targets_where_a_field_is_named(tmp_path):
    plays = {name: {**fields, "speed": [len(t) / 8 for t in fields["snippets"]]} for name, fields in PLAYS.items()}
    train = hdf5(tmp_path / "train.h5", plays)
    data = tff(path=train, target="speed", tokenizer="bytes", hold_out=0.3)
    assert (data.population.size, data.test.words, data.test.classes) == (2, 256, 0)
    found = data.population.local_data(torch.arange(2))
    for x, y in zip(found.data["x"], found.data["y"], strict=True):
        assert y.dtype == torch.float32
        assert 8 * y == len("".join(chr(c) for c in x[x >= 0].tolist()).encode("latin-1").decode())


@needs_h5py
def test_bad_texts_of_hdf5_are_refused(subtests, tmp_path_factory):
    def call(row):
        clients, options = row
        tmp_path = tmp_path_factory.mktemp("row")
        tff(path=hdf5(tmp_path / "in.h5", clients), **options)

    rows = [
        ((PLAYS, {"text": "words"}), "a client has no field words"),
        ((PLAYS, {"target": "speed"}), "a client has no field speed"),
        ((PLAYS, {"features": "snippets"}), "'snippets' is object, no numbers"),
        ((PLAYS, {"classes": 3}), "classes: is 3, and there are no labels"),
        ((PLAYS, {"tokenizer": "word"}), "tokenizer: is 'word'"),
        (({"a": {"snippets": ["x"]}, "b": {"snippets": ["y"]}}, {}), "no text has tokens enough to learn from"),
        (({"a": {"x": [[1.0]], "y": [0]}, "b": {"x": [[1.0]], "y": [0]}}, {"length": 3}),
         "length: is 3, and no column"),
        (({"a": {"x": [[1.0]], "y": [0]}}, {"text": "x"}), "'x' is float64 of shape (1, 1), no texts: name another"),
        (({**PLAYS, "z": {"x": [[1.0]], "y": [0]}}, {}), "some clients have texts, and others numbers: name the field"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)
