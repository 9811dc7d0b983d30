"""The arithmetic of a report: what its tables and figures are made of, how numbers are written, what values are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedfleet.config.schema import load
from fedfleet.experiments.sweep import planned
from fedfleet.report import least_completed
from fedfleet.report.curves import at, band, smooth, window, worst_tenth
from fedfleet.report.tables import completed_counts, gini, outcome_shares, read
from fedfleet.report.values import names
from fedfleet.report.words import duration, number, quantity, share
from tests.front.report.report_runs import make_run, rounds_table


def test_cumulative_sums_and_evaluated_rows(tmp_path: Path) -> None:
    table = rounds_table(4, accuracy=[None, 0.4, None, 0.5]).iloc[[3, 0, 1, 2]]
    run = read(make_run(tmp_path / "run", rounds=table))
    assert run.metrics == ["accuracy"]
    x, y = run.curve("eval/accuracy", "total/floats_up")
    assert x.tolist() == [0, 200, 400]
    assert y.tolist() == [0.1, 0.4, 0.5]
    assert run.curve("eval/accuracy", "rounds_completed")[0].tolist() == [0, 2, 4]
    assert run.curve("eval/accuracy", "total/virtual_s")[0].tolist() == [0, 10, 20]
    assert run.total("floats_up") == 400
    assert run.total("unheard_of") is None
    again = table[table["round"] == 3].assign(floats_up=7)  # of a round that is there twice the last counts
    assert read(make_run(tmp_path / "again", rounds=pd.concat([table, again]))).total("floats_up") == 307


def test_gini_by_hand() -> None:
    assert gini(np.array([4]), 4) == pytest.approx(0.75)
    assert gini(np.array([2, 2, 2]), 3) == pytest.approx(0)
    assert gini(np.array([3, 1]), 2) == pytest.approx(0.25)
    assert gini(np.array([1, 3]), 5) == pytest.approx(0.7)
    assert gini(np.array([1, 3, 0, 0, 0]), 5) == pytest.approx(gini(np.array([3, 1]), 5))
    assert gini(np.array([0.9, 0.5, 0.3, 0.1]), 4) == pytest.approx(0.36111, abs=5e-6)  # of chances
    low = 0.2  # of U(low, 1): (1 - low) / (3 (1 + low))
    even = low + (1 - low) * (np.arange(1000) + 0.5) / 1000
    assert gini(even, 1000) == pytest.approx((1 - low) / (3 * (1 + low)), abs=1e-6)
    assert np.isnan(gini(np.array([]), 5))
    assert gini(np.array([1]), 10**10) == pytest.approx(1)  # no array of ten thousand million zeros


def test_heard_counts(tmp_path: Path) -> None:
    rows = [
        (0, "a", 1, "completed"),
        (0, "b", 1, "completed"),
        (1, "a", 1, "stale"),
        (1, "a", 2, "completed"),
        (1, "a", 3, "late"),
    ]
    outcomes = pd.DataFrame(rows, columns=["round", "phase", "client", "outcome"])
    outcomes["outcome"] = outcomes["outcome"].astype("category")
    counts, size = completed_counts(read(make_run(tmp_path / "run", outcomes=outcomes))) or (np.empty(0), 0)
    assert (sorted(counts.tolist()), size) == ([1, 2], 5)  # two phases of a round once, stale replies too
    offline = {"outcomes": outcomes.assign(outcome="unavailable")}
    for name, more, expected in (("other", {"config": None}, ([1, 2], 3)), ("nobody", offline, ([], 5))):
        counts, size = completed_counts(read(make_run(tmp_path / name, **{"outcomes": outcomes, **more}))) or (
            np.empty(0),
            0,
        )
        assert (sorted(counts.tolist()), size) == expected


def test_who_was_heard_least_is_named(tmp_path: Path) -> None:
    called = {"examples": {"client_names": ["ann", "bob", "<b>"]}}
    found = least_completed.table(read(make_run(tmp_path / "run", summary=called)))
    assert found is not None
    assert found.caption.startswith("3 of 5 never completed a round. All, those with the fewest first;")
    assert [list(row) for row in found.rows] == [
        ["client 2: <b>", "0", "1"], ["client 3", "0", "0"], ["client 4", "0", "0"], ["client 1: bob", "1", "2"],
        ["client 0: ann", "3", "3"],
    ]  # fmt: skip
    assert least_completed.table(read(make_run(tmp_path / "none", outcomes=None))) is None
    alike = pd.DataFrame([(0, i, "completed") for i in range(5)], columns=["round", "client", "outcome"])
    assert least_completed.table(read(make_run(tmp_path / "alike", outcomes=alike))) is None
    many = {"population": {"clients": 10**6}}
    some = least_completed.table(read(make_run(tmp_path / "many", outcomes=alike, config=many)))
    assert some is not None
    assert [row[0] for row in some.rows] == [f"client {i}" for i in range(5, 15)]
    assert some.caption.startswith("999,995 of 1,000,000 never completed a round. The 10 with the fewest;")


def test_fate_shares_from_fates_else_from_counts(tmp_path: Path) -> None:
    dealt = [[0.5, 0, 0.5, 0, 0], [0.5, 0, 0, 0, 0.5], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    for name, more, expected in (("a", {}, dealt), ("b", {"outcomes": None}, [[0.6, 0, 0.2, 0.1, 0.1]] * 4)):
        rounds, shares = outcome_shares([read(make_run(tmp_path / name, **more))]) or (np.empty(0), np.empty(0))
        assert rounds.tolist() == [0, 1, 2, 3]
        np.testing.assert_allclose(shares, expected)


def test_interpolation_and_band_over_seeds() -> None:
    x, y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 3.0, 5.0])
    np.testing.assert_allclose(at(x, y, np.array([0.5, 1.5, 2.0, 3.0, 9.0])), [np.nan, 1.5, 3.0, 4.0, 5.0])
    assert np.isnan(at(np.empty(0), np.empty(0), np.array([1.0]))).all()
    x = np.array([0.0, 1.0, 2.0])
    assert np.array(band([(x, x), (x, 3 * x)])).tolist() == [[0, 1, 2], [0, 2, 4], [0, 1, 2], [0, 3, 6]]
    shifted = band([(x, x), (x + 1, x + 1)], points=3)  # both are the line y = x, and share 1 to 2
    assert np.array(shifted).tolist() == [[1, 1.5, 2]] * 4
    assert band([(x, x), (x + 10, x)]) is None
    assert band([]) is None


def test_smooth_window_and_worst_tenth() -> None:
    assert smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist() == [1.5, 3, 3, 3]
    assert window(100) == 1
    assert all(window(rounds) % 2 == 1 for rounds in range(90, 500))
    values = np.arange(20.0)
    assert smooth(values, 1).tolist() == values.tolist()
    assert (worst_tenth(values, high_is_bad=False), worst_tenth(values, high_is_bad=True)) == (0.5, 18.5)
    assert worst_tenth(np.array([3.0, 4.0]), high_is_bad=False) == 3


def test_quantities_and_durations() -> None:
    assert [quantity(v, "B") for v in (3_400_000, 12, None)] == ["3.4 MB", "12 B", "–"]
    assert [quantity(v, "floats") for v in (1_250_000, 0)] == ["1.25 M floats", "0 floats"]
    assert [quantity(v, "") for v in (999_950, 999_400, 7.5e12, float("nan"))] == ["1 M", "999 k", "7.5 T", "–"]
    assert [duration(v) for v in (0.25, 0.9999, 12.5, 99.96)] == ["250 ms", "1 s", "12.5 s", "1 min 40 s"]
    assert [duration(v) for v in (3599.6, 7320, 3 * 86400)] == ["1 h 0 min", "2 h 2 min", "3 days"]
    assert [duration(v) for v in (0, None)] == ["0 s", "–"]
    assert number(0.123456) == "0.1235"
    assert number(None) == number(float("nan")) == "–"
    assert (share(1), share(0.9999), share(0.571), share(0)) == ("100 %", "99.9 %", "57.1 %", "0 %")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, "iid", True, None], ["0.1", "iid", "true", "null"]),
        ([{"kind": "none"}, {"kind": "noise", "share": 0.2}], ["none", "noise"]),
        ([{"kind": "noise", "share": s, "std": 1} for s in (0.2, 0.1)], ["noise share=0.2", "noise share=0.1"]),
        ([{"share": 0.2}, {"share": 0.1}], ["share=0.2", "share=0.1"]),
        ([{"kind": "noise"}, {"kind": "noise", "share": 0.2}], ["noise", "noise share=0.2"]),
        ([None, {"share": 0.2}], ["null", "share=0.2"]),
        # What would be called alike is written out.
        (["noise", {"kind": "noise"}], ["noise", '{"kind": "noise"}']),
    ],
)
def test_a_mapping_is_called_by_what_tells_it_from_the_others(values, expected):
    assert names(values) == expected


def test_runs_are_called_by_it():
    attacks = [{"kind": "none"}, {"kind": "noise", "share": 0.2}, {"kind": "sign_flip", "share": 0.2}]
    plan = planned(load({"vary": {"attack": attacks, "rounds": [1, 2]}, "compare": {"mean": {}}}))
    called = ["attack=none rounds=1", "attack=none rounds=2", "attack=noise rounds=1"]
    assert [t.name for t in plan][:3] == [f"mean {name}" for name in called]
    assert [t.point["attack"] for t in plan][2] == attacks[1]
