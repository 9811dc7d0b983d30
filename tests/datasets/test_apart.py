"""Targets that differ and become one number in float32 are named, however they come."""

import itertools
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from fedfleet import data
from fedfleet.datasets.apart import COARSE, Apart
from fedfleet.datasets.convert import convert
from fedfleet.datasets.example_table import Columns
from fedfleet.datasets.files import DataError
from tests.refusals import refused

WHOLE = st.lists(
    st.integers(-(2**40), 2**40) | st.integers(2**24 - 2, 2**24 + 6) | st.integers(2**61, 2**61 + 3), min_size=1
)


def problem(values, pieces=1):
    watched = Apart()
    for part in np.array_split(values, pieces):
        watched.add(part)
    return watched.problem()


@given(WHOLE, st.sampled_from([np.int64, np.float64]), st.integers(1, 3))
def test_whole_numbers_are_told_apart_or_named(values, dtype, pieces):
    column = np.array(values).astype(dtype)
    lost = len({*column.astype(np.float32).tolist()}) < len({*column.tolist()})
    found = problem(column, pieces)
    assert not lost or found is not None
    if found is not None and "are one number" in found:
        one, two = (int(word) for word in found.split(" are ")[0].split(" and "))
        assert one != two
        assert np.float32(one) == np.float32(two)
        assert {one, two} <= {int(v) for v in column.tolist()}


@given(
    nps.arrays(np.float64, 20, elements=st.floats(-1, 1, width=64)), st.sampled_from([0.0, 1.0, 1e3, 1e6, 1e9, 1e15])
)
def test_numbers_far_from_0_that_hardly_vary_are_named(values, far):
    column = values + far
    exact = [Fraction(v) - Fraction(float(np.float32(v))) for v in column.tolist()]
    lost, spread = float(max(map(abs, exact))), float(np.std(column - column[0]))
    if spread > 1e-300 and lost > 2 * COARSE * spread:
        assert problem(column, 3) is not None
    if lost < COARSE * spread / 2 and not (column == np.floor(column)).all():
        assert problem(column, 3) is None


def test_every_way_in_looks_at_targets(tmp_path, subtests):
    values = [16777216, 16777217, 5, 7]
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "t": values, "client": [0, 0, 1, 1]})
    pq.write_table(pa.table({"client": [0, 0, 1, 1], "a": x[:, 0], "t": values}), tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    called = Columns(target=("t",))
    ways = {
        "array": lambda: data.from_arrays(x, target=np.array(values)),
        "floats": lambda: data.from_arrays(x, target=np.array(values, dtype=np.float64)),
        "one of several": lambda: data.from_arrays(x, target=np.stack([np.arange(4), values], 1)),
        "texts": lambda: data.from_texts(["a", "b", "c", "d"], target=np.array(values)),
        "data frame": lambda: data.from_dataframe(frame, target="t"),
        "data frame, two": lambda: data.from_dataframe(frame, target=["client", "t"]),
        "parquet": lambda: convert(tmp_path / "t.parquet", tmp_path / "p", called=called, hold_out=0.5),
        "csv": lambda: convert(tmp_path / "t.csv", tmp_path / "c", called=called, hold_out=0.5, layout="csv"),
    }
    for name, way in ways.items():
        with subtests.test(name):
            assert "16777216 and 16777217" in refused(way, "", DataError)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_ordinary_targets_are_taken(scale):
    values = scale * np.random.default_rng(0).normal(size=10_000)
    assert problem(values) is None
    for whole, size in itertools.product((np.int64, np.int32, np.uint8), (7, 100)):
        assert problem(np.arange(size).astype(whole)) is None
