"""Parquet that cannot be converted: one line naming the file, the column or the row, and nothing left behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedfleet.datasets import convert as module
from fedfleet.datasets.convert import convert
from fedfleet.datasets.example_table import Columns
from fedfleet.datasets.files import DataError
from tests import refusals
from tests.refusals import tells

GOOD: dict[str, Any] = {"client": ["a", "b", "b", "c"], "x": [[1.0, 2.0]] * 4, "y": [0, 1, 2, 0]}
COLUMNS = {"client": ["a", "b", "b", "c"], "f": [1.0, 2.0, 3.0, 4.0], "g": [1, 2, 3, 4], "y": [0, 1, 2, 0]}


def refused(source: Path, out: Path, **options: Any) -> str:
    before = sorted(out.parent.iterdir())
    line = refusals.refused(lambda: convert(source, out, **options), "", DataError)
    assert sorted(out.parent.iterdir()) == before
    return line


def test_columns_and_values(subtests, tmp_path):
    two, nan = [1.0, 2.0], float("nan")
    rows = [
        ({"client": None}, "no column 'client' … x, y"), ({"y": None}, "no column 'y' … client, x"),
        ({"x": None}, "no features"), ({"client": ["a", None, "b", "b"]}, "'client', row 1 … null"),
        ({"y": [0, 1, None, 1]}, "'y', row 2 … null"), ({"x": [two, None, two, two]}, "'x', row 1 … null"),
        ({"x": [two, two, [1.0, None], two]}, "'x', row 2 … null"),
        ({"x": [two, [1.0], two, two]}, "'x', row 1 … has 1 entries, earlier rows 2"),
        ({"x": pa.array([[], [], [], []], pa.list_(pa.float32()))}, "'x', row 0 … empty"),
        ({"x": [[two], [two], [[1.0]], [two]]}, "'x', row 2 … has 1 entries"),
        ({"x": [two, two, two, [1.0, nan]]}, "'x', row 3 … finite"),
        ({"x": [two, [1e300, 2.0], two, two]}, "'x', row 1 … finite"),
        ({"x": ["1", "2", "3", "4"]}, "column 'x' is string … numbers"),
        ({"y": [0, -1, 0, 0]}, "'y', row 1 … -1 is negative"),
        ({"y": [0.0, 1.0, 2.0, 0.0]}, "column 'y' is double … integers"),
        ({"y": ["cat", "dog", "cat", "dog"]}, "column 'y' is string … integers"),
        ({"client": [0.5, 1.0, 1.0, 2.0]}, "column 'client' is double … integers or text"),
        ({"client": np.array([1, 2**63, 3, 3], dtype=np.uint64)}, "'client', from row 0 … 9223372036854775808"),
        ({"domain": [0, 1, 0, 0]}, "'domain' … client 'b' … 0 and 1"),
        ({"domain": ["p", "q", None, "q"]}, "'domain', row 2 … null"),
        ({"extra": [1, 2, 3, 4]}, "beside 'x' … 'extra'"),
        ({**COLUMNS, "x": None, "f": [1.0, float("inf"), 2.0, 3.0]}, "'f', row 1 … finite"),
        ({**COLUMNS, "x": None, "g": [1, 2, 3, None]}, "'g', row 3 … null"),
        ({**COLUMNS, "x": None, "f": ["1", "2", "3", "4"]}, "column 'f' is string"),
        ({**COLUMNS, "x": None, "f": [[1.0]] * 4}, "column 'f' is list"),
    ]  # fmt: skip
    for columns, says in rows:
        table = pa.table({k: v for k, v in {**GOOD, **columns}.items() if v is not None})
        with subtests.test(says):
            said = refused(_written(table, tmp_path / "in.parquet"), tmp_path / "out")
            assert [part for part in ["in.parquet", *says.split(" … ")] if part not in said] == [], said


def test_rows_are_numbered_within_their_file(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, labels in (("1.parquet", [0, 0, 0, 0]), ("2.parquet", [0, 0, 0, -5])):
        pq.write_table(pa.table({**GOOD, "y": labels}), folder / name, row_group_size=2)
    assert "2.parquet: column 'y', row 3" in refused(folder, tmp_path / "out")
    pq.write_table(pa.table({**GOOD, "x": [[1.0, 2.0, 3.0]] * 4}), folder / "2.parquet")
    assert "2.parquet: column 'x', row 0: is float32 of shape (3,), earlier" in refused(folder, tmp_path / "out")
    pq.write_table(pa.table({**GOOD, "client": [1, 2, 3, 4]}), folder / "2.parquet")
    assert "2.parquet: its columns are not those of" in refused(folder, tmp_path / "out")


def test_files_that_are_none(tmp_path):
    out = tmp_path / "out"
    assert "no such file" in refused(tmp_path / "none.parquet", out)
    assert "ends in .parquet" in refused(tmp_path, out)
    (tmp_path / "a.parquet").write_text("client,x,y\n1,2,3\n")
    assert "not a Parquet file" in refused(tmp_path / "a.parquet", out)
    pq.write_table(pa.table(GOOD), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-10])
    assert "not a Parquet file" in refused(tmp_path / "a.parquet", out)
    (tmp_path / "a.parquet").write_bytes(
        b"PAR1" + b"\xff" * 60 + content[64:]
    )  # the footer is whole, the pages are not
    assert "a.parquet: cannot be read" in refused(tmp_path / "a.parquet", out)
    pq.write_table(pa.table(GOOD).slice(0, 0), tmp_path / "a.parquet")
    assert "no rows" in refused(tmp_path / "a.parquet", out)


def test_the_classes_and_the_test_examples_have_to_fit(tmp_path):
    source, test, out = tmp_path / "in.parquet", tmp_path / "test.parquet", tmp_path / "out"
    pq.write_table(pa.table(GOOD), source)
    assert "'y', row 2: the label 2 is none of 0 to 1" in refused(source, out, classes=2)
    pq.write_table(pa.table({"x": [[1.0, 2.0]], "y": [7]}), test)
    assert "test.parquet: column 'y', row 0" in refused(source, out, test=test, classes=3)
    pq.write_table(pa.table({"x": [[1.0]], "y": [0]}), test)
    assert "test.parquet: x is float32 of shape (1,)" in refused(source, out, test=test)
    assert "no column 'y'" in refused(source, out, test=_written(pa.table({"x": [[1.0, 2.0]]}), test))
    assert "holding out 3 of 3 clients" in refused(source, out, hold_out=1.0)
    assert "holding out 1 of 1 clients" in refused(_written(pa.table({**GOOD, "client": [1] * 4}), source), out)


def test_columns_that_say_the_domain_have_to_fit(tmp_path):
    source, test, out = tmp_path / "in.parquet", tmp_path / "test.parquet", tmp_path / "out"
    said: list[str] = []
    _written(pa.table({**GOOD, "domain": ["p", "q", "q", "p"]}), source)
    _written(pa.table({"x": [[1.0, 2.0]] * 2, "y": [0, 1], "domain": ["p", "z"]}), test)
    assert "test.parquet: column 'domain': 'z' is the domain of no client: mend it" in refused(source, out, test=test)
    _written(pa.table({"x": [[1.0, 2.0]], "y": [0], "domain": [0]}), test)
    assert "0 is the domain of no client" in refused(source, out, test=test)
    assert "no column 'sex' among client, x, y, domain: give the name of one" in refused(
        source, out, called=Columns(domain="sex")
    )
    assert "the column 'y' says no domain" in refused(source, out, called=Columns(domain="y"))
    alone = "every client that would be held out is the only one of its domain: give a file of test examples"
    single = _written(pa.table({**GOOD, "domain": ["p", "q", "q", "r"]}), tmp_path / "single.parquet")
    assert alone in refused(single, out)
    convert(source, tmp_path / "some", test=_written(pa.table({"x": [[1.0, 2.0]], "y": [0]}), test), say=said.append)
    assert said == [
        f"{test}: no column 'domain': test examples are of no domain, and there will be no metrics by domain"
    ]
    _written(pa.table({"x": [[1.0, 2.0]], "y": [0], "domain": ["p"]}), test)
    assert "column 'domain': " in refused(_written(pa.table(GOOD), source), out, test=test)
    _written(pa.table({**GOOD, "domain": list("pqqp"), "sex": list("mffm")}), source)
    assert "beside 'sex' there is a column 'domain'" in refused(source, out, called=Columns(domain="sex"))
    _written(pa.table({**COLUMNS, "sex": list("mfmm")}), source)
    assert "column 'sex': client 'b' has examples of 'f' and 'm'" in refused(source, out, called=Columns(domain="sex"))


def test_test_examples_have_the_features_of_the_clients(tmp_path):
    source = _written(pa.table(COLUMNS), tmp_path / "in.parquet")
    test = _written(pa.table({"f": [1.0], "h": [1.0], "y": [0]}), tmp_path / "test.parquet")
    assert "has the feature 'g'" in refused(source, tmp_path / "out", test=test)
    numbers = np.array([1, 2, 3, 2**63], dtype=np.uint64)
    _written(pa.table({**COLUMNS, "f": [1, 2, 3, 4], "g": numbers}), source)
    assert "column 'g', row 3: is not a finite int64" in refused(source, tmp_path / "out")


def _written(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path)
    return path


def test_a_folder_is_never_written_over(tmp_path):
    source = _written(pa.table(GOOD), tmp_path / "in.parquet")
    (tmp_path / "out").mkdir()
    assert "exists" in refused(source, tmp_path / "out")
    tells(lambda: convert(source, source / "below"), "below: cannot be written", DataError)


def test_nothing_is_left_when_it_is_interrupted(tmp_path):
    source = _written(pa.table(GOOD), tmp_path / "in.parquet")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", tell=interrupt)
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk_is_said_before_a_row_is_written(tmp_path, monkeypatch):
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full, raising=False)
    said = refused(_written(pa.table(GOOD), tmp_path / "in.parquet"), tmp_path / "out")
    assert "out: cannot be written (No space left on device)" in said


def test_progress(tmp_path):
    told: list[tuple[int, int]] = []
    totals = convert(
        _written(pa.table(GOOD), tmp_path / "in.parquet"), tmp_path / "out", tell=lambda *n: told.append(n)
    )
    assert (told[-1], totals.examples + totals.test_examples) == ((4, 4), 4)
