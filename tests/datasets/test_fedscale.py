"""FedScale's layout of traces, pickled or JSON: converted as FedScale would read it, and never unpickled."""

from __future__ import annotations

import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.datasets.fedscale import convert_trace
from fedfleet.datasets.files import DataError
from fedfleet.datasets.plain_pickle import NotPlain, loads
from fedfleet.datasets.trace import read_trace
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.online.trace import Trace
from tests.refusals import all_say, refused, tells

TRACE: dict[Any, Any] = {
    1: {"duration": 9, "active": [1, 5, 8], "inactive": [3, 6, 10], "finish_time": 10, "model": "CPH1801"},
    5: {"duration": 9, "active": [0], "inactive": [4.5], "finish_time": 20, "model": "M"},
    2: {"duration": 9, "active": [1, 4], "inactive": [2, 30], "finish_time": 7, "model": "CPH1801"},
}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = lambda scalars: st.recursive(  # noqa: E731
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=30,
)


def is_active(trace: dict[str, Any], time: float) -> bool:
    """As FedScale's `is_active` says, but for its pointer, which falls behind where time jumps."""
    norm = time % trace["finish_time"]
    return any(a <= norm <= b for a, b in zip(trace["active"], trace["inactive"], strict=True))


def convert(tmp_path: Path, trace: Any, *, as_json: bool = False) -> Path:
    source, out = tmp_path / "source", tmp_path / "out.parquet"
    source.write_bytes(json.dumps(trace).encode() if as_json else pickle.dumps(trace))
    convert_trace(source, out)
    return out


@pytest.mark.parametrize("as_json", [False, True])
def test_clients_are_online_as_in_fedscale(tmp_path, as_json):
    found, table = read_trace(convert(tmp_path, TRACE, as_json=as_json))
    assert (table.names.to_pylist(), found.period.tolist()) == ([1, 2, 5], [10, 7, 20])
    model = Trace(found, rng.key(0), torch.tensor([1, 2, 5]))
    at = torch.arange(0.05, 60, 0.1, dtype=torch.float64)  # not at the very ends, which FedScale counts in
    for client, trace in TRACE.items():
        online = model.online(rng.key(0), torch.full((len(at),), client), at)
        assert online.tolist() == [is_active(trace, t) for t in at.tolist()]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8), st.integers(1, 20))
def test_intervals_in_any_order_overlapping_backward_or_beyond_the_end(tmp_path_factory, pairs, period):
    trace = {"active": [a for a, _ in pairs], "inactive": [b for _, b in pairs], "finish_time": period}
    always = {"active": [0], "inactive": [1], "finish_time": 1}
    tmp_path = tmp_path_factory.mktemp("trace")
    found, table = read_trace(convert(tmp_path, {"x": trace, "y": always}))
    at = torch.arange(0.5, 60, 1, dtype=torch.float64)
    expected = [is_active(trace, t) for t in at.tolist()]
    if table.names.to_pylist() == ["y"]:
        assert not any(expected)
        return
    model = Trace(found, rng.key(0), torch.tensor([0, 1]))
    assert model.online(rng.key(0), torch.zeros(60, dtype=torch.int64), at).tolist() == expected


def test_what_is_left_out_is_counted(tmp_path):
    source = tmp_path / "t.json"
    idle = {"active": [3, 9], "inactive": [3, 8], "finish_time": 10}
    source.write_text(json.dumps({"a": TRACE[1], "b": idle, "007": TRACE[5]}))
    done = convert_trace(source, tmp_path / "new" / "out.parquet")
    assert done == (2, 4, 2, 1)
    rows = pd.read_parquet(tmp_path / "new" / "out.parquet")
    assert (rows.client.tolist(), rows.end_s.tolist()) == (["a", "a", "a", "007"], [3, 6, 10, 4.5])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@given(data=st.data())
def test_plain_values_of_every_protocol(protocol, data):
    scalars = SCALARS | st.binary() if protocol >= 3 else SCALARS  # before, bytes were a call
    value = data.draw(TREES(scalars))
    assert loads(pickle.dumps(value, protocol)) == value
    assert loads(pickletools.optimize(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("as_json", [False, True])
def test_names_that_are_no_text(tmp_path, as_json):
    tells(lambda: convert(tmp_path, {"\ud800": TRACE[1], "b": TRACE[5]}, as_json=as_json), "ud800", DataError)


def test_what_appears_twice_is_one():
    inner: list[Any] = [1]
    found = loads(pickle.dumps([inner, inner, {"a": inner}]))
    assert found[0] is found[1] is found[2]["a"]
    inner.append(inner)
    found = loads(pickle.dumps(inner))
    assert found[1] is found


class Evil:
    """Would call a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return eval, ("[].append(open('/tmp/never', 'w'))",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(("value", "names"), [
    (Evil(), "eval"), (np.float64(3.0), "scalar"), (np.arange(3), "numpy"), (Path, "Path"), ({1, 2}, ""),
], ids=["call", "numpy number", "numpy array", "class", "set"])  # fmt: skip
def test_nothing_is_imported_or_called(tmp_path, monkeypatch, protocol, value, names):
    monkeypatch.setattr("pickle.loads", None)
    monkeypatch.setattr("pickle.load", None)
    monkeypatch.setattr("pickle.Unpickler", None)
    source, out = tmp_path / "t.pkl", tmp_path / "out.parquet"
    source.write_bytes(pickle.dumps({1: {**TRACE[1], "finish_time": value}}, protocol))
    message = refused(lambda: convert_trace(source, out), f"{source}: ", DataError)
    assert message.isprintable()
    assert names in message
    assert message.endswith("are read: write it with int(), float() and list() around numbers and arrays, or as JSON")
    assert list(tmp_path.iterdir()) == [source]


@given(cut=st.integers(0, 400), junk=st.binary(max_size=20), at=st.integers(0, 400))
def test_broken_pickles(cut, junk, at):
    """Whatever the bytes, a value or one line."""
    whole = pickle.dumps(TRACE)
    data = (whole[:at] + junk + whole[at + len(junk) :])[:cut]
    try:
        loads(data)
    except NotPlain as e:
        assert len(str(e)) < 400  # noqa: PT017


def test_layouts_that_are_not_fedscales(subtests, tmp_path_factory):
    def call(trace):
        tmp_path = tmp_path_factory.mktemp("row")
        try:
            convert(tmp_path, trace)
        finally:
            assert not (tmp_path / "out.parquet").exists()

    rows = [
        ([1], "holds no clients"), ({}, "holds no clients"), ({1: 3}, "client 1: is int"),
        ({1: {"active": [], "finish_time": 3}}, "client 1: has no 'inactive'"),
        ({"x": {**TRACE[1], "finish_time": 0}}, "client 'x': finish_time=0"),
        ({"x": {**TRACE[1], "finish_time": "9"}}, "client 'x': finish_time='9'"),
        ({1: {**TRACE[1], "finish_time": float("nan")}}, "client 1: finish_time=nan"),
        ({1: {**TRACE[1], "active": [1, 2]}}, "client 1: 2 times in active and 3 in inactive"),
        ({1: {**TRACE[1], "active": 3}}, "client 1: active"),
        ({1: {**TRACE[1], "inactive": [1, None, 3]}}, "client 1: inactive[1]=NoneType"),
        ({1: {**TRACE[1], "inactive": [1, 2, float("inf")]}}, "client 1: inactive[2]=inf"),
        ({1: {**TRACE[1], "active": [True, 2, 3]}}, "client 1: active[0]=True"),
        ({1: {**TRACE[1], "active": [1, -2, 3]}}, "client 1: active[1] is negative"),
        ({1: {**TRACE[1], "inactive": [1, 1, 1]}}, "no client is ever active"),
        ({1: TRACE[1], "b": TRACE[5]}, "client 1: make all clients integers, or all of them text"),
        ({2.5: TRACE[1]}, "client 2.5: make all clients integers"),
        ({2**70: TRACE[1]}, "client 1180591620717411303424: make all"),
        ({1: {**TRACE[1], "finish_time": 10**5000}}, "client 1: finish_time=a huge integer: give"),
        ({10**5000: TRACE[1]}, "client a huge integer: make all"),
    ]  # fmt: skip
    all_say(subtests, call, [(trace, f"source: {says}") for trace, says in rows], DataError)


def test_files_that_are_none(tmp_path):
    source, out = tmp_path / "t.json", tmp_path / "out.parquet"
    tells(lambda: convert_trace(source, out), "t.json: cannot be read", DataError)
    source.write_text('{"1": ')
    tells(lambda: convert_trace(source, out), "t.json: not JSON", DataError)
    source.write_text("1,2,3\n")
    tells(lambda: convert_trace(source, out), "t.json: not a whole pickle", DataError)
    source.write_text(json.dumps(TRACE))
    tells(lambda: convert_trace(source, source / "out.parquet"), "cannot be written", DataError)
    out.write_text("mine")
    tells(lambda: convert_trace(source, out), "out.parquet: exists", DataError)
    assert out.read_text() == "mine"
