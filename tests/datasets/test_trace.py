"""Traces in Parquet: what is read, and what is refused in one line naming file and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.datasets.files import DataError
from fedfleet.datasets.trace import client_numbers, read_trace
from fedfleet.simulator.errors import ConfigError
from tests.refusals import all_refused, refused, tells

GOOD: dict[str, Any] = {"client": [7, 2, 7, 2], "start_s": [10.0, 0.0, 0.0, 5.0], "end_s": [20.0, 5.0, 4.0, 6.0]}


def write(path: Path, **columns: Any) -> Path:
    """Write a good trace with some columns replaced, or left out (None)."""
    pq.write_table(pa.table({k: v for k, v in {**GOOD, **columns}.items() if v is not None}), path)
    return path


def said(path: Path, horizon_s: float | None = None, kind: Any = DataError) -> str:
    return refused(lambda: read_trace(path, horizon_s), "", kind)


def test_rows_in_any_order(tmp_path):
    found, table = read_trace(write(tmp_path / "t.parquet"))
    assert (table.names.to_pylist(), found.first.tolist(), found.start.tolist()) == ([2, 7], [0, 2, 4], [0, 5, 0, 10])
    assert (found.end.tolist(), found.period.tolist()) == ([5, 6, 4, 20], [20])
    assert read_trace(tmp_path / "t.parquet", 30.0)[0].period.tolist() == [30]
    assert client_numbers(table, 8).tolist() == [2, 7]


def test_text_categories_whole_numbers_and_several_files(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    names = pa.array(["b", "a", "b", "ä"]).dictionary_encode()
    write(folder / "1.parquet", client=names, start_s=[1, 0, 3, 0], end_s=[2, 1, 4, 9])
    write(folder / "2.parquet", client=pa.array(["c", "b", "c", "a"]), start_s=[1, 0, 3, 7], end_s=[2, 1, 4, 9])
    found, table = read_trace(folder)
    assert (table.names.to_pylist(), found.first.tolist()) == (["a", "b", "c", "ä"], [0, 2, 5, 7, 8])
    assert found.start.tolist() == [0, 7, 0, 1, 3, 1, 3, 0]


def test_periods_of_each_client(tmp_path):
    found, _ = read_trace(write(tmp_path / "t.parquet", period_s=[50.0, 6.0, 50.0, 6.0]))
    assert found.period.tolist() == [6, 50]


@pytest.mark.parametrize("rows", [3, 500])
def test_against_sorting_by_hand(tmp_path, rows):
    generator = np.random.default_rng(rows)
    client = generator.integers(0, 40, rows)
    start = generator.permutation(rows) * 10.0
    path = write(tmp_path / "t.parquet", client=client, start_s=start, end_s=start + 10)
    found, _ = read_trace(path)
    expected = sorted(zip(client.tolist(), start.tolist(), strict=True))
    assert found.start.tolist() == [s for _, s in expected]
    assert found.first.diff().tolist() == np.unique(client, return_counts=True)[1].tolist()


def test_rows_that_cannot_be(subtests, tmp_path):
    rows = [
        ({"client": None}, "no column 'client' among start_s, end_s"),
        ({"end_s": None}, "no column 'end_s' among client, start_s"),
        ({"start_s": ["1", "2", "3", "4"]}, "column 'start_s' is string"),
        ({"client": [0.5, 1.0, 1.0, 2.0]}, "column 'client' is double"),
        ({"period_s": [True] * 4}, "column 'period_s' is bool"),
        ({"client": [1, None, 2, 2]}, "column 'client', row 1: is null"),
        ({"end_s": [1.0, 2.0, None, 4.0]}, "column 'end_s', row 2: is null"),
        ({"start_s": [10.0, 0.0, 0.0, float("nan")]}, "column 'start_s', row 3: is not a finite number"),
        ({"end_s": [20.0, 5.0, float("inf"), 6.0]}, "column 'end_s', row 2: is not a finite number"),
        ({"start_s": [10.0, 0.0, -3.0, 5.0]}, "row 2: start_s=-3 is negative"),
        ({"end_s": [20.0, 0.0, 4.0, 6.0]}, "row 1: end_s=0 is not after start_s=0"),
        ({"end_s": [9.0, 5.0, 4.0, 6.0]}, "row 0: end_s=9 is not after start_s=10"),
        ({"end_s": [20.0, 5.5, 4.0, 6.0]}, "row 3: client 2 is online from 5 to 6 s, and from 0 to 5.5 s ("),
        ({"client": list("abab"), "end_s": [20.0, 5.5, 11.0, 6.0]},
         "row 0: client 'a' is online from 10 to 20 s, and from 0"),
        ({"period_s": [50.0, 6.0, 60.0, 6.0]}, "row 0: period_s=50, where client 7 has 60 elsewhere"),
        ({"period_s": [50.0, 5.5, 50.0, 5.5]}, "row 3: end_s=6 is beyond period_s=5.5"),
    ]  # fmt: skip
    path = tmp_path / "t.parquet"
    all_refused(
        subtests, lambda columns: read_trace(write(path, **columns)), [(c, f"{path}: {s}") for c, s in rows], DataError
    )


def test_no_one_ever_available(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({k: np.zeros(0) if k != "client" else np.zeros(0, int) for k in GOOD}), path)
    assert said(path) == f"{path}: holds no rows: give a file with some"
    assert "no such file" in said(tmp_path / "none.parquet")
    path.write_text("client,start_s,end_s\n")
    assert "not a Parquet file" in said(path)


def test_rows_are_numbered_within_their_file(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "1.parquet")
    other = write(folder / "2.parquet", client=[1, 7, 1, 3], end_s=[20.0, 5.0, 4.0, 6.0])
    assert said(folder).startswith(
        f"{other}: row 1: client 7 is online from 0 to 5 s, and from 0 to 4 s ({folder}/1.parquet: row 2)"
    )
    write(other, client=list("abcd"))
    assert said(folder).startswith(f"{folder}: the column 'client' is integers in one file and text in another")
    write(other, period_s=[30.0] * 4)
    assert said(folder).startswith(f"{folder}/1.parquet: no column 'period_s'")


def test_the_horizon_has_to_hold_the_intervals(tmp_path):
    path = write(tmp_path / "t.parquet")
    expected = f"availability.horizon_s=15: an interval ends at 20 s ({path}: row 0): raise it, or leave it out"
    assert said(path, 15.0, ConfigError) == expected
    write(path, period_s=[50.0] * 4)
    assert "has a column 'period_s': leave one of them out" in said(path, 60.0, ConfigError)


@pytest.mark.parametrize("clients", [[7, 2, 12, 2], [7, 2, -1, 2]])
def test_unknown_clients(tmp_path, clients):
    path = write(tmp_path / "t.parquet", client=clients)
    call = lambda: client_numbers(read_trace(path)[1], 10)  # noqa: E731
    tells(call, f"t.parquet: row 2: client {clients[2]} is none of 0 to 9", DataError)
    write(path, client=list("abcd"))
    tells(call, "column 'client' is text, and availability.map is direct", DataError)


def check_read_or_refused(path: Path) -> None:
    try:
        found, _ = read_trace(path)
    except (DataError, ConfigError) as e:
        message = str(e)
    else:
        message = ""
        assert (found.start < found.end).all()
        assert (found.start >= 0).all()
    assert message.isprintable()


@given(data=st.data())
def test_a_damaged_file_is_a_trace_or_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    whole = bytearray(write(folder / "whole.parquet", period_s=[50.0, 6.0, 50.0, 6.0]).read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "t.parquet").write_bytes(whole)
    check_read_or_refused(folder / "t.parquet")


cells = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=3), st.booleans())


@given(columns=st.fixed_dictionaries({name: st.lists(cells, min_size=3, max_size=3) for name in GOOD}))
def test_any_columns_are_a_trace_or_one_line(tmp_path_factory, columns):
    try:
        table = pa.table(columns)
    except (pa.ArrowException, UnicodeEncodeError):
        return  # a column of several types
    path = tmp_path_factory.mktemp("any") / "t.parquet"
    pq.write_table(table, path)
    check_read_or_refused(path)


def test_clients_that_are_no_text(tmp_path):
    names = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff"))
    pq.write_table(pa.table({"client": names, "start_s": [0, 0], "end_s": [1, 1]}), tmp_path / "t.parquet")
    tells(lambda: read_trace(tmp_path / "t.parquet"), "column 'client', from row 0: … UTF8", DataError)
