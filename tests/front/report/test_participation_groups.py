"""Clients grouped by how often they took part: by hand, on the page, and in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedfleet
from fedfleet.report import participation_groups, write_report
from fedfleet.report.participation_groups import group_of, grouped
from fedfleet.report.tables import read
from tests.front.report.report_runs import figures, make_run

RARE = {
    "rounds": 4, "population": {"clients": 12, "partition": "label_sorted"}, "task": {"model": "logistic"},
    "cohort": {"size": 4}, "executor": {"kind": "local"}, "evaluation": {"every": 2, "per_client": True},
}  # fmt: skip


def test_groups_by_hand(tmp_path: Path) -> None:
    """Of five clients, 0 completed three rounds and 1 one; 2 to 4 none."""
    accuracy = [[0.9, 0.5, 0.1, 0.2, 0.3], [1.0, 0.6, 0.2, 0.3, np.nan]]
    rows = [
        {"round": t, "client": k, "accuracy": a}
        for t, each in zip((1, 3), accuracy, strict=True)
        for k, a in enumerate(each)
    ]
    folder = make_run(tmp_path / "run", clients=pd.DataFrame(rows).sample(frac=1, random_state=0))
    found = grouped(read(folder), "accuracy")
    assert found is not None
    assert (found.rounds.tolist(), found.sizes.tolist()) == ([2, 4], [3, 1, 0, 1])
    assert found.values[:, 0] == pytest.approx([0.2, 0.25])
    assert found.values[:, [1, 3]].tolist() == [[0.5, 0.9], [0.6, 1.0]]
    assert np.isnan(found.values[:, 2]).all()
    assert found.mean == pytest.approx([0.4, 2.1 / 4])
    assert found.weighted == pytest.approx([(3 * 0.9 + 0.5) / 4, (3 * 1.0 + 0.6) / 4])
    table = participation_groups.frame(read(folder), ["accuracy"])
    assert table[table["rounds"] == 4]["group"].tolist() == [
        *participation_groups.NAMES,
        "mean of clients",
        "participation-weighted",
    ]
    assert table["accuracy"].iloc[-1] == pytest.approx(0.9)
    bounds = table[table["rounds"] == 2].set_index("group")[["clients", "least", "most"]].astype(object)
    assert bounds.loc[["never", "rarely", "often", "mean of clients"]].to_numpy().tolist() == [
        [3, 0, 0], [1, 1, 1], [1, 3, 3], [5, 0, 3],
    ]  # fmt: skip
    assert bounds.loc["sometimes"].isna().tolist() == [False, True, True]
    write_report([folder], tmp_path / "out")
    assert "clients-by-participation-accuracy" in figures(tmp_path / "out")


def test_thirds_put_equals_together() -> None:
    assert group_of(np.array([0, 1, 2, 3, 4, 5, 6, 0])).tolist() == [0, 1, 1, 2, 2, 3, 3, 0]
    assert group_of(np.array([2, 2, 0, 2])).tolist() == [2, 2, 0, 2]
    assert group_of(np.zeros(3)).tolist() == [0] * 3
    many = np.repeat([1, 2, 3, 4], [7, 4, 2, 8])  # those that took part most are "often", though more than a third
    assert group_of(many).tolist() == np.repeat([1, 2, 2, 3], [7, 4, 2, 8]).tolist()


def test_a_run_tells_it_in_python(tmp_path: Path) -> None:
    run = fedfleet.run(RARE, out=tmp_path / "run")
    found = run.by_participation()
    assert found["rounds"].unique().tolist() == [2, 4]
    last = found[found["rounds"] == 4].set_index("group")
    each = run.table("clients").query("round == 3").set_index("client")["accuracy"]
    done = (
        run.table("outcomes")
        .query("outcome == 'completed'")
        .groupby("client")["round"]
        .nunique()
        .reindex(each.index, fill_value=0)
    )
    assert last.loc["participation-weighted", "accuracy"] == pytest.approx((each * done).sum() / done.sum())
    assert last.loc["never", "accuracy"] == pytest.approx(each[done == 0].mean())
    assert last.loc["never", "clients"] == (done == 0).sum()
    alone = fedfleet.run(RARE, {"evaluation.per_client": False, "rounds": 1}, out=tmp_path / "alone")
    with pytest.raises(fedfleet.ConfigError, match="per_client"):
        alone.by_participation()
