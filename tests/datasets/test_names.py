"""Names of clients, classes and features are kept with the data, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedfleet.config.population import Data, load_data
from fedfleet.config.schema import load
from fedfleet.data import from_arrays, from_dataframe, from_hf, from_image_folder, from_texts
from fedfleet.datasets.convert import convert
from fedfleet.datasets.keep import keep
from fedfleet.datasets.names import Names, some


def table(rows: int = 40) -> pd.DataFrame:
    home = [f"home {i // 4}" for i in range(rows)]
    return pd.DataFrame({"client": home, "age": np.linspace(0, 1, rows), "weight": 1.0, "y": np.arange(rows) % 2})


def on_disk(folder: Path) -> Data:
    return load_data(load({"population": {"dataset": {"name": "disk", "path": str(folder)}}}))


def homes(data: Data) -> set[str]:
    """Every name, of which none is a client's and a held-out client's."""
    assert not {*data.names.clients} & {*data.names.tested}
    assert [*data.names.held_out] == [*data.names.tested]
    return {*data.names.clients, *data.names.tested}


def test_a_table_keeps_its_clients_and_columns_in_memory_and_on_disk(tmp_path: Path):
    df = table()
    data = from_dataframe(df, client="client", label="y", test=0.2)
    assert homes(data) == {*df["client"]}
    assert (len(data.names.tested), data.names.features, data.names.classes) == (2, ("age", "weight"), ())
    df.to_parquet(tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "clients", hold_out=0.2)
    kept = on_disk(tmp_path / "clients")
    assert (homes(kept), kept.names.features) == ({*df["client"]}, ("age", "weight"))
    assert [*kept.names.clients[1:3]] == [kept.names.clients[1], kept.names.clients[2]]
    assert kept.names.of_clients([2, 0]) == (kept.names.clients[2], kept.names.clients[0])
    own = kept.population.clients["start"]  # pyright: ignore
    x = kept.population.examples["x"]  # pyright: ignore
    for client, start in enumerate(own):  # the name is of the client whose examples these are
        assert kept.names.clients[client] == f"home {round(float(x[start, 0]) * 39) // 4}"


def test_test_examples_of_their_own_are_of_no_client(tmp_path: Path):
    df = table()
    assert from_dataframe(df, client="client", label="y", test=df).names.tested == ()
    df.to_parquet(tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "clients", test=tmp_path / "in.parquet")
    assert on_disk(tmp_path / "clients").names.tested == ()


def test_clients_that_train_and_are_tested_on_are_not_held_out():
    df = table().assign(test=np.arange(40) % 2 == 0)
    df.loc[:3, "test"] = True
    names = from_dataframe(df, client="client", label="y", test="test").names
    assert (len(names.tested), names.held_out) == (10, ["home 0"])
    assert from_arrays(np.zeros((4, 2)), [0, 1, 0, 1], test=0.5).names == Names()


def test_folders_and_the_librarys_labels_say_what_classes_are_called(tmp_path: Path):
    for owner in "bca":
        for label in ("owl", "fox"):
            at = tmp_path / "images" / owner / label
            at.mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(at / "1.png")
    folder = from_image_folder(tmp_path / "images", each="client", test=0.3)
    assert (folder.names.classes, homes(folder)) == (("fox", "owl"), {"a", "b", "c"})
    keep("image_folder", {"path": str(tmp_path / "images")}, tmp_path / "kept")
    assert on_disk(tmp_path / "kept").names.classes == ("fox", "owl")
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_pandas(table()).cast_column("y", datasets.ClassLabel(names=["ill", "well"]))
    hf = from_hf(made, client="client", label="y")
    assert (hf.names.classes, hf.names.features) == (("ill", "well"), ("age", "weight"))


def test_data_say_their_names_in_a_line():
    data = from_dataframe(table(), client="client", label="y", test=0.2)
    told = repr(data)
    assert told.endswith(f", tested on clients {', '.join(data.names.tested)}, features age, weight)")
    assert "tested on client 1" in repr(from_arrays(np.zeros((4, 1)), [0, 1, 0, 1], client=[0, 0, 1, 1], test=0.5))
    assert (some([str(i) for i in range(9)], 3), some(["a"], 3)) == ("0, 1, 2 and 6 more", "a")


def test_labels_in_words_are_numbered_by_the_alphabet_and_name_the_classes(tmp_path: Path):
    frame = pd.DataFrame({"a": np.arange(40.0), "who": np.arange(40) // 4, "kind": [*"cab", "b"] * 10})
    held = np.arange(40) % 4 == 3
    own = frame[~held], frame[held].assign(kind=["d", *"b" * 9])
    for data, classes, train, test in (
        (from_dataframe(frame, label="kind", client="who", test=pd.Series(held)), "abc", "cab", "b"),
        (from_dataframe(own[0], label="kind", client="who", test=own[1]), "abcd", "cab", "dbbbbbbbbb"),
        (from_arrays(frame[["a"]], frame["kind"].to_numpy(), client=frame["who"], test=held), "abc", "cab", "b"),
        (from_arrays(frame[["a"]], [*"cab", "b"] * 10, test=held), "abc", "cab", "b"),
        (from_dataframe(frame.astype({"kind": "category"}), label="kind", test=held), "abc", "cab", "b"),
        (from_texts(["x y"] * 40, frame["kind"], test=held), "abc", "cab", "b"),
    ):
        learnt = data.sample(1000).y.tolist()
        assert data.names.classes == tuple(classes)
        assert sorted(learnt) == sorted(classes.index(name) for name in train * 10)
        assert data.test.y.tolist() == [classes.index(name) for name in test * (10 // len(test))]
        assert data.test.classes == len(classes)
    hf = pytest.importorskip("datasets").Dataset.from_pandas(frame)
    assert from_hf(hf, label="kind", client="who", test=0.3).names.classes == ("a", "b", "c")
