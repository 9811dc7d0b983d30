"""The arithmetic of a report: what its tables and figures are made of, and how numbers are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedfleet.report import least_heard
from fedfleet.report.curves import at, band, smooth, window, worst_tenth
from fedfleet.report.tables import fate_shares, gini, heard_counts, read
from fedfleet.report.words import duration, number, quantity, share
from tests.front.report.report_runs import make_run, rounds_table


def test_cumulative_sums_and_evaluated_rows(tmp_path: Path) -> None:
    table = rounds_table(4, accuracy=[None, 0.4, None, 0.5]).iloc[[3, 0, 1, 2]]
    run = read(make_run(tmp_path / "run", rounds=table))
    assert run.metrics == ["accuracy"]
    x, y = run.curve("eval/accuracy", "total/floats_up")
    assert x.tolist() == [0, 200, 400]
    assert y.tolist() == [0.1, 0.4, 0.5]
    assert run.curve("eval/accuracy", "completed")[0].tolist() == [0, 2, 4]
    assert run.curve("eval/accuracy", "total/virtual_s")[0].tolist() == [0, 10, 20]
    assert run.total("floats_up") == 400
    assert run.total("unheard_of") is None


def test_a_repeated_round_counts_once(tmp_path: Path) -> None:
    table = rounds_table(4)
    again = table[table["round"] == 3].assign(floats_up=7)
    run = read(make_run(tmp_path / "run", rounds=pd.concat([table, again])))
    assert run.total("floats_up") == 307


def test_gini_by_hand() -> None:
    assert gini(np.array([4]), 4) == pytest.approx(0.75)
    assert gini(np.array([2, 2, 2]), 3) == pytest.approx(0)
    assert gini(np.array([3, 1]), 2) == pytest.approx(0.25)
    assert gini(np.array([1, 3]), 5) == pytest.approx(0.7)
    assert gini(np.array([1, 3, 0, 0, 0]), 5) == pytest.approx(gini(np.array([3, 1]), 5))
    assert np.isnan(gini(np.array([]), 5))
    assert gini(np.array([1]), 10**10) == pytest.approx(1)  # no array of ten thousand million zeros


def test_heard_counts(tmp_path: Path) -> None:
    rows = [(0, "a", 1, "heard"), (0, "b", 1, "heard"), (1, "a", 1, "stale"), (1, "a", 2, "heard"), (1, "a", 3, "late")]
    fates = pd.DataFrame(rows, columns=["round", "phase", "client", "fate"])
    fates["fate"] = fates["fate"].astype("category")
    counts, size = heard_counts(read(make_run(tmp_path / "run", fates=fates))) or (np.empty(0), 0)
    assert (sorted(counts.tolist()), size) == ([1, 2], 5)  # two phases of a round once, stale replies too
    unknown = heard_counts(read(make_run(tmp_path / "other", fates=fates, config=None)))
    assert unknown is not None
    assert unknown[1] == 3
    nobody = heard_counts(read(make_run(tmp_path / "nobody", fates=fates.assign(fate="offline"))))
    assert nobody is not None
    assert (nobody[0].tolist(), nobody[1]) == ([], 5)


def test_who_was_heard_least_is_named(tmp_path: Path) -> None:
    names = {"examples": {"client_names": ["ann", "bob", "<b>"]}}
    found = least_heard.table(read(make_run(tmp_path / "run", summary=names)))
    assert found is not None
    assert (
        found.caption
        == "3 of 5 were never heard. All, those heard least first; of those alike first who was invited most."
    )
    assert [list(row) for row in found.rows] == [
        ["client 2: <b>", "0", "1"],
        ["client 3", "0", "0"],
        ["client 4", "0", "0"],
        ["client 1: bob", "1", "2"],
        ["client 0: ann", "3", "3"],
    ]
    assert least_heard.table(read(make_run(tmp_path / "none", fates=None))) is None
    alike = pd.DataFrame([(0, i, "heard") for i in range(5)], columns=["round", "client", "fate"])
    assert least_heard.table(read(make_run(tmp_path / "alike", fates=alike))) is None
    many = {"population": {"clients": 10**6}}
    some = least_heard.table(read(make_run(tmp_path / "many", fates=alike, config=many)))
    assert some is not None
    assert [row[0] for row in some.rows] == [f"client {i}" for i in range(5, 15)]
    assert some.caption.startswith("999,995 of 1,000,000 were never heard. The 10 heard least;")


def test_fate_shares_from_fates_else_from_counts(tmp_path: Path) -> None:
    with_fates = fate_shares([read(make_run(tmp_path / "a"))])
    assert with_fates is not None
    assert with_fates[0].tolist() == [0, 1, 2, 3]
    assert with_fates[1].tolist() == [[0.5, 0, 0.5, 0, 0], [0.5, 0, 0, 0, 0.5], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    counted = fate_shares([read(make_run(tmp_path / "b", fates=None))])
    assert counted is not None
    assert counted[0].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(counted[1], [[0.6, 0, 0.2, 0.1, 0.1]] * 4)


def test_interpolation() -> None:
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 3.0, 5.0])
    np.testing.assert_allclose(at(x, y, np.array([0.5, 1.5, 2.0, 3.0, 9.0])), [np.nan, 1.5, 3.0, 4.0, 5.0])
    assert np.isnan(at(np.empty(0), np.empty(0), np.array([1.0]))).all()


def test_band_over_seeds() -> None:
    x = np.array([0.0, 1.0, 2.0])
    same = band([(x, x), (x, 3 * x)])
    assert same is not None
    assert [part.tolist() for part in same] == [[0, 1, 2], [0, 2, 4], [0, 1, 2], [0, 3, 6]]
    shifted = band([(x, x), (x + 1, x + 1)], points=3)  # both are the line y = x, and share 1 to 2
    assert shifted is not None
    assert [part.tolist() for part in shifted] == [[1, 1.5, 2]] * 4
    assert band([(x, x), (x + 10, x)]) is None
    assert band([]) is None


def test_smooth_and_window() -> None:
    assert smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [1.5, 3, 3, 3]
    assert window(100) == 1
    assert all(window(rounds) % 2 == 1 for rounds in range(90, 500))
    values = np.arange(7.0)
    assert smooth(values, 1).tolist() == values.tolist()


def test_worst_tenth() -> None:
    values = np.arange(20.0)
    assert worst_tenth(values, high_is_bad=False) == 0.5
    assert worst_tenth(values, high_is_bad=True) == 18.5
    assert worst_tenth(np.array([3.0, 4.0]), high_is_bad=False) == 3


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1_250_000, "floats", "1.25 M floats"),
        (3_400_000, "B", "3.4 MB"),
        (999_950, "", "1 M"),
        (999_400, "", "999 k"),
        (0, "floats", "0 floats"),
        (12, "B", "12 B"),
        (7.5e12, "", "7.5 T"),
        (None, "B", "–"),
        (float("nan"), "", "–"),
    ],
)
def test_quantity(value: float | None, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (12.5, "12.5 s"),
        (99.96, "1 min 40 s"),
        (3599.6, "1 h 0 min"),
        (7320, "2 h 2 min"),
        (3 * 86400, "3 days"),
        (0, "0 s"),
        (None, "–"),
    ],
)
def test_duration(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_small_numbers() -> None:
    assert number(0.123456) == "0.1235"
    assert number(None) == number(float("nan")) == "–"
    assert (share(1), share(0.9999), share(0.571), share(0)) == ("100 %", "99.9 %", "57.1 %", "0 %")
