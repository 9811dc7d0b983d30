"""Tables on disk: from CSV as from Parquet, by whatever names their columns have, with targets in the place of labels."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedfleet
from fedfleet.datasets import csv_part
from fedfleet.datasets.convert import convert
from fedfleet.datasets.example_table import Columns
from fedfleet.datasets.files import DataError
from tests import refusals
from tests.datasets.layouts import on_disk
from tests.refusals import tells

ROWS = 24
FRAME = pd.DataFrame({
    "shop": [f"s{i % 6}" for i in range(ROWS)], "age": np.arange(ROWS), "size": np.linspace(-1, 1, ROWS),
    "late": [i % 2 == 0 for i in range(ROWS)], "price": np.linspace(0, 5, ROWS), "cost": np.linspace(9, 2, ROWS),
    "y": [i % 3 for i in range(ROWS)],
})  # fmt: skip
SHOPS = Columns(client="shop")


def held(folder: Path) -> dict[Any, tuple[list[Any], list[Any]]]:
    """Name -> x, y of every client, and of None those of the test examples."""
    data = on_disk(folder)
    local = data.population.local_data(torch.arange(data.population.size))
    found: dict[Any, tuple[list[Any], list[Any]]] = {None: (data.test.x.tolist(), data.test.y.tolist())}
    for name, rows, count in zip(
        pd.read_feather(folder / "clients.arrow")["client"].tolist(), local.rows, local.counts, strict=True
    ):
        mine = rows[:count]
        found[name] = local.data["x"][mine].tolist(), local.data["y"][mine].tolist()
    return found


def written(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def refused(source: Path, out: Path, **options: Any) -> str:
    line = refusals.refused(lambda: convert(source, out, **options), "", DataError)
    assert not out.exists()
    return line


@pytest.mark.parametrize("block", [1 << 23, 200])
@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz"])
def test_csv_is_read_as_parquet_is(tmp_path, name, block, monkeypatch):
    monkeypatch.setattr(csv_part, "BLOCK_BYTES", block)
    FRAME.to_parquet(tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "one", called=SHOPS)
    FRAME.to_csv(tmp_path / name, index=False)
    totals = convert(tmp_path / name, tmp_path / "two", called=SHOPS, layout="csv")
    assert held(tmp_path / "one") == held(tmp_path / "two")
    assert (totals.clients, totals.classes, totals.examples) == (5, 3, 20)
    assert on_disk(tmp_path / "two").test.x.shape == (4, 5)


def test_the_types_of_columns_are_those_of_all_files(tmp_path, monkeypatch):
    """A number among integers comes late, in the second file; so does text among numbers of clients."""
    monkeypatch.setattr(csv_part, "BLOCK_BYTES", 40)
    (tmp_path / "in").mkdir()
    first = "\n".join(["client,a,b,y", *(f"{i},{i},{i},0" for i in range(20))])
    written(tmp_path / "in" / "0.csv", first)
    written(tmp_path / "in" / "1.csv", "client,a,b,y\n20,1,2.5,1\nnobody,1e3,2,1\n")
    convert(tmp_path / "in", tmp_path / "out", layout="csv")
    found = held(tmp_path / "out")
    test = found.pop(None)
    assert {*found} < {*map(str, range(21)), "nobody"}
    x = [*test[0], *(row for x, _ in found.values() for row in x)]
    assert on_disk(tmp_path / "out").test.x.dtype == torch.float32
    assert sorted(x) == sorted([[float(i), float(i)] for i in range(20)] + [[1.0, 2.5], [1000.0, 2.0]])
    written(tmp_path / "in" / "1.csv", "client,a,b,y\n20,1,2,1\n")
    convert(tmp_path / "in", tmp_path / "whole", layout="csv")
    assert on_disk(tmp_path / "whole").test.x.dtype == torch.int64
    assert {*held(tmp_path / "whole")} < {None, *range(21)}


def test_names_keep_their_zeros_and_quotes_their_lines(tmp_path):
    written(tmp_path / "in.csv", 'client,a,y\n007,1,0\n7,2,1\n"a\nb",3,1\n"NA",4,0\n')
    written(tmp_path / "test.csv", "a,y\n5,1\n")
    convert(tmp_path / "in.csv", tmp_path / "out", test=tmp_path / "test.csv", layout="csv")
    names = {"007": ([[1]], [0]), "7": ([[2]], [1]), "a\nb": ([[3]], [1]), "NA": ([[4]], [0])}
    assert held(tmp_path / "out") == {None: ([[5]], [1]), **names}
    written(tmp_path / "in.csv", "client,a,y\n007,01,0\n7,2,1\n")  # all whole numbers, of which names are not made
    convert(tmp_path / "in.csv", tmp_path / "two", test=tmp_path / "test.csv", layout="csv")
    assert held(tmp_path / "two") == {None: ([[5]], [1]), "007": ([[1]], [0]), "7": ([[2]], [1])}


def test_an_index_of_pandas_is_left_out_of_csv(tmp_path):
    said: list[str] = []
    FRAME.to_csv(tmp_path / "in.csv")
    convert(tmp_path / "in.csv", tmp_path / "out", called=SHOPS, layout="csv", say=said.append)
    pd.read_csv(tmp_path / "in.csv").to_csv(tmp_path / "again.csv", index=False)
    convert(tmp_path / "again.csv", tmp_path / "again", called=SHOPS, layout="csv", say=said.append)
    assert [line.split(": column ")[1] for line in said] == [
        "'' is an index of pandas, and left out",
        "'Unnamed: 0' is an index of pandas, and left out",
    ]
    assert held(tmp_path / "out") == held(tmp_path / "again")
    assert on_disk(tmp_path / "out").test.x.shape[1:] == (5,)


def test_whole_numbers_of_a_test_file_become_what_training_has(tmp_path):
    written(tmp_path / "in.csv", "client,x,y\na,1.5,0\nb,2,1\n")
    written(tmp_path / "test.csv", "x,y\n3,1\n")
    convert(tmp_path / "in.csv", tmp_path / "out", test=tmp_path / "test.csv", layout="csv")
    assert held(tmp_path / "out") == {None: ([[3.0]], [1]), "a": ([[1.5]], [0]), "b": ([[2.0]], [1])}
    written(tmp_path / "in.csv", "client,x,y\na,1,0\nb,2,1\n")
    written(tmp_path / "test.csv", "x,y\n3.5,1\n")
    said = refused(tmp_path / "in.csv", tmp_path / "no", test=tmp_path / "test.csv", layout="csv")
    assert "test.csv: x is float32 of shape (1,), and that of the clients int64 of shape (1,)" in said


def test_bad_csv_is_refused(subtests, tmp_path):
    rows = [
        ("client,a,y\nu,1,0\nv,2\n", "in.csv: row 1: Expected 3 columns, got 2: v,2"),
        ("client,a,y\nu,1,0\nv,NA,1\n", "in.csv: column 'a', row 1: 'NA' is no number"),
        ("client,a,y\nu,1,0\nv,,1\n", "in.csv: column 'a', row 1: is null"),
        ("client,a,y\nu,1,0\n,1,1\n", "in.csv: column 'client', row 1: is null"),
        ("client,a,y\nu,1,0\nv,inf,1\n", "in.csv: column 'a', row 1: is not a finite float32"),
        ("client,a,y\nu,1,0\nv,2,0.5\n", "in.csv: column 'y' is double"),
        ("client,a,a,y\nu,1,1,0\n", "in.csv: two columns 'a'"),
        ("client;a;y\nu;1;0\n", "in.csv: its columns are not separated"),
        ("client,a,label\nu,1,0\n", "in.csv: no column 'y' among client, a, label"),
        ("client,a,y\n", "in.csv: holds no rows"), ("", "in.csv: not readable as CSV (Empty CSV file)"),
    ]  # fmt: skip
    for text, says in rows:
        with subtests.test(says):
            assert says in refused(written(tmp_path / "in.csv", text), tmp_path / "out", layout="csv")


def test_rows_are_counted_beyond_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_part, "BLOCK_BYTES", 40)
    rows = "\n".join(f"u{i},{'NA' if i == 15 else i},0" for i in range(20))
    source = written(tmp_path / "in.csv", f"client,a,y\n{rows}\n")
    assert "column 'a', row 15: 'NA' is no number" in refused(source, tmp_path / "out", layout="csv")


def test_csv_that_is_no_text_and_folders_without_any(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"client,a,y\nu,1,0\n\xff,2,1\n")
    assert "in.csv: row 1: CSV conversion error to string" in refused(
        tmp_path / "in.csv", tmp_path / "out", layout="csv"
    )
    (tmp_path / "in.csv.gz").write_bytes(b"no")
    assert "in.csv.gz: not readable as CSV (" in refused(tmp_path / "in.csv.gz", tmp_path / "out", layout="csv")
    (tmp_path / "none").mkdir()
    assert "no file in this folder ends in .csv: give a CSV" in refused(tmp_path / "none", tmp_path / "o", layout="csv")
    (tmp_path / "none" / "a.csv").write_text("client,a,y\nu,1,0\n")
    (tmp_path / "none" / "b.csv").write_text("client,b,y\nu,1,0\n")
    said = refused(tmp_path / "none", tmp_path / "o", layout="csv")
    assert "b.csv: its columns are not those of" in said


@pytest.mark.parametrize("layout", ["csv", "parquet"])
@pytest.mark.parametrize("aims", [("price",), ("cost", "price"), ("age",)])
def test_targets_on_disk(tmp_path, layout, aims):
    frame = FRAME.drop(columns="y")
    frame.to_csv(tmp_path / "in.csv", index=False)
    frame.to_parquet(tmp_path / "in.parquet")
    called = Columns(client="shop", target=aims)
    totals = convert(tmp_path / f"in.{layout}", tmp_path / "out", called=called, layout=layout)
    data = on_disk(tmp_path / "out")
    assert (totals.classes, data.test.classes, data.test.y.dtype) == (0, 0, torch.float32)
    assert data.sample(3).y.shape == data.test.y[:3].shape
    features = [c for c in frame.columns if c not in ("shop", *aims)]
    found = held(tmp_path / "out")
    out = found.pop(None)
    assert len(found) == 5
    found[({*frame["shop"]} - {*found}).pop()] = out
    for shop, (x, y) in found.items():
        mine = frame[frame["shop"] == shop]
        assert x == torch.tensor(mine[features].to_numpy(dtype=np.float32)).tolist()
        of = mine[[*aims]].to_numpy(dtype=np.float32)
        assert y == torch.tensor(of[:, 0] if len(aims) == 1 else of).tolist()


def test_lists_are_targets_too_and_test_files_have_some(tmp_path):
    table = pd.DataFrame({"client": list("aabb"), "f": [1.5, 2, 3, 4], "to": [[1.0, i] for i in range(4)]})
    table.to_parquet(tmp_path / "in.parquet")
    table.tail(1).to_parquet(tmp_path / "test.parquet")
    called = Columns(target=("to",))
    convert(tmp_path / "in.parquet", tmp_path / "out", test=tmp_path / "test.parquet", called=called)
    found = {None: ([[4.0]], [[1.0, 3.0]]), "a": ([[1.5], [2.0]], [[1.0, 0.0], [1.0, 1.0]])}
    assert held(tmp_path / "out") == {**found, "b": ([[3.0], [4.0]], [[1.0, 2.0], [1.0, 3.0]])}
    pd.DataFrame({"f": [1.5], "to": [2.0]}).to_parquet(tmp_path / "test.parquet")
    said = refused(tmp_path / "in.parquet", tmp_path / "no", test=tmp_path / "test.parquet", called=called)
    assert "test.parquet: the target is float32 of shape (), and that of the clients float32 of shape (2,)" in said


def test_columns_that_cannot_be_meant_are_refused(subtests, tmp_path):
    of = lambda *target, **more: Columns(**{"client": "shop", "target": target, **more})  # noqa: E731
    rows = [
        (of("price"), "beside 'price' there is a column 'y'"), (of(label="age"), "beside 'age' there is a column 'y'"),
        (of("y", "nothing"), "no column 'nothing' among shop, age"), (of("y", "y"), "the column 'y' is named twice"),
        (of(client="y"), "the column 'y' is named twice"), (of("y", domain="y"), "the column 'y' says no domain"),
        (of(client="shopp"), "no column 'shopp' among shop, age"), (Columns(), "no column 'client' among shop, age"),
        (of("y", "hole"), "column 'hole', row 3: is null"),
        (of("gap", "y"), "column 'gap', row 2: is not a finite float32"),
        (of("y", "shop", client="age"), "column 'shop', row 0: 's0' is no number"),
    ]  # fmt: skip
    for called, says in rows:
        more = {
            "hole": [np.nan if i == 3 else 1.0 for i in range(ROWS)],
            "gap": [np.inf if i == 2 else 1.0 for i in range(ROWS)],
        }
        FRAME.assign(**{k: v for k, v in more.items() if k in called.target}).to_csv(tmp_path / "in.csv", index=False)
        with subtests.test(says):
            assert says in refused(tmp_path / "in.csv", tmp_path / "out", called=called, layout="csv")


def test_targets_take_no_classes(tmp_path):
    FRAME.to_csv(tmp_path / "in.csv", index=False)
    called = Columns(client="shop", target=("y",))
    said = refused(tmp_path / "in.csv", tmp_path / "out", called=called, layout="csv", classes=3)
    assert said == "classes: is 3: leave it out, for there are targets"


def test_a_net_learns_targets_from_disk(tmp_path):
    FRAME.drop(columns="y").to_csv(tmp_path / "in.csv", index=False)
    convert(tmp_path / "in.csv", tmp_path / "out", called=Columns(client="shop", target=("price",)), layout="csv")
    config = {
        "rounds": 2, "population": {"dataset": {"name": "disk", "path": str(tmp_path / "out")}},
        "task": {"name": "module", "model": "tests.tasks.own_nets:plain", "arguments": {"features": 4}, "loss": "mse"},
        "algorithm": {"batch_size": 2, "lr": 1e-4}, "cohort": {"size": 2}, "executor": {"kind": "local"},
    }  # fmt: skip
    run = fedfleet.run(config, out=tmp_path / "run")
    assert {"eval/mae", "eval/r2", "eval/loss"} <= run.summary["final"].keys()
    del config["task"]
    tells(lambda: fedfleet.run(config, out=tmp_path / "labels"), "it is of labels, and disk has targets")
