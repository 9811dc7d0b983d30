"""Classes in a report, from counts made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedfleet.report import classes, write_report
from fedfleet.report.sheet import Heat
from fedfleet.report.tables import Run, read
from tests.front.report.report_runs import Page, make_run

FOUND = [(0, 0, 3), (0, 2, 1), (1, 1, 2), (2, 0, 1), (2, 1, 1)]  # class 2 is never found


def counts(rows: list[tuple[int, int, int]], **more: Any) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["label", "predicted", "examples"]).assign(rounds=4, **more)


def cells(grid: Any) -> list[list[Any]]:
    return [list(row) for row in grid.rows]


def run(path: Path, rows: list[tuple[int, int, int]] = FOUND, **more: Any) -> Run:
    return read(make_run(path, classes=counts(rows, **more)))


def test_recall_and_precision_by_hand(tmp_path: Path) -> None:
    one, confused = classes.tables({"A": [run(tmp_path / "run")]})
    assert cells(one) == [
        ["class 0", "4", "75 %", "75 %", "2, 25 %"], ["class 1", "2", "100 %", "66.7 %", "–"],
        ["class 2", "2", "0 %", "0 %", "0, 50 %"],
    ]  # fmt: skip
    none, all_ = Heat("", 0.0), Heat("100", 1.0)
    assert cells(confused) == [
        ["class 0", Heat("75", 0.75), none, Heat("25", 0.25)], ["class 1", none, all_, none],
        ["class 2", Heat("50", 0.5), Heat("50", 0.5), none],
    ]  # fmt: skip
    text = Page(write_report([tmp_path / "run"], tmp_path / "out")).text
    assert "class 0 4 75 % 75 % 2, 25 %" in text


def test_labels_stand_side_by_side_with_the_spread_of_their_own_seeds(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a0"), run(tmp_path / "a1", [(0, 0, 1), (0, 1, 1)])]
    groups = {"A": runs, "B": [run(tmp_path / "b", [(0, 0, 4), (1, 1, 2)])]}  # B has no class 2
    table, *confused = classes.tables(groups)
    assert list(table.head) == ["recall", "A", "B"]
    assert cells(table) == [
        ["class 0", "0.62 ± 0.18", "1"], ["class 1", "1", "1"], ["class 2", "0", "–"],
    ]  # fmt: skip
    assert [grid.title for grid in confused] == ["Taken for which: A", "Taken for which: B"]
    assert confused[0].rows[0][1] == Heat("67", 4 / 6)  # of both seeds' examples


def test_domains_apart(tmp_path: Path) -> None:
    table = pd.concat([counts([(0, 0, 3), (0, 1, 1)], domain=0), counts([(0, 0, 1), (1, 1, 2), (1, 0, 2)], domain=1)])
    here = make_run(tmp_path / "run", classes=table, summary={"status": "finished", "domains": ["ink", "oil"]})
    _, domains, _ = classes.tables({"A": [read(here)]})
    assert list(domains.head) == ["recall", "ink", "oil"]
    assert cells(domains) == [
        ["class 0", Heat("75 %", 0.75), Heat("100 %", 1.0)],
        ["class 1", Heat("–", 0.0), Heat("50 %", 0.5)],
    ]


def test_of_many_classes_those_of_which_least_is_found(tmp_path: Path) -> None:
    rows = [(k, k if j < k else 0, 1) for k in range(1, 51) for j in range(50)]  # of class k, k of 50
    (table,) = classes.tables({"A": [run(tmp_path / "run", rows)]})
    assert [row[0] for row in table.rows] == [f"class {k}" for k in range(1, 31)]
    assert "The 30 of 51 classes of which least is found." in table.caption


def test_what_is_no_record_of_classes_is_left_out(tmp_path: Path) -> None:
    assert classes.tables({"A": [read(make_run(tmp_path / "none"))]}) == []
    text, holes = counts(FOUND).assign(label="<b>"), counts(FOUND).assign(examples=[1, 2, np.nan, 4, 5])
    for number, table in enumerate((counts([(0, -1, 1)]), counts([(0, 10**9, 1)]), counts([]), text, holes)):
        assert classes.confusion(read(make_run(tmp_path / str(number), classes=table))) is None
