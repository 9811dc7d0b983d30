"""Traps that a page names: a constant that does as well, and clients that count differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedfleet.report import finals, overview, study_page, traps
from fedfleet.report.groups import grouped
from fedfleet.report.study_tables import Tables
from fedfleet.report.tables import Run, read
from tests.front.report.report_runs import make_run

SAID = [(0, 0, 60), (0, 1, 10), (1, 0, 20), (1, 1, 10)]  # label, predicted, examples: 70 of 100 right
CONSTANT = [(0, 0, 70), (1, 0, 30)]


def run(path: Path, table: list[tuple[int, int, int]], label: str = "a", **changes: Any) -> Run:
    right, examples = sum(n for k, said, n in table if k == said), sum(n for *_, n in table)
    algorithm = {"name": "fedavg", "weight": changes.get("weight", "uniform")}
    task = {"name": "classification", "model": "logistic"}
    summary = {
        "status": "finished",
        "label": label,
        "final": {"eval/accuracy": right / examples},
        "client_examples": changes.get("sizes", {"least": 5, "most": 5}),
    }
    config = {"seed": 0, "algorithm": algorithm, "task": task, "population": {"dataset": "digits"}}
    folder = make_run(path, config=config, summary=summary)
    pd.DataFrame([(1, *row) for row in table], columns=["rounds", "label", "predicted", "examples"]).to_parquet(
        folder / "classes.parquet"
    )
    return read(folder)


@pytest.mark.parametrize(("table", "constant"), [
    (SAID, True), (CONSTANT, True), ([(0, 0, 70), (1, 0, 10), (1, 1, 20)], False),
    ([(0, 0, 64), (0, 1, 6), (1, 0, 15), (1, 1, 15)], True), ([(0, 0, 68), (0, 1, 2), (1, 0, 8), (1, 1, 22)], False),
])  # fmt: skip
def test_accuracy_within_two_errors_of_the_most_frequent_class_is_not_called_learnt(table, constant, tmp_path):
    made = run(tmp_path / "run", table)
    said = traps.constant(made)
    assert (said is not None) == constant
    text = " ".join(overview.of_run(made))
    assert ("did not clearly learn to classify" in text) == ("always saying class 0 (0.7)" in text) == constant
    assert ("fedavg learnt" in text) != constant


def test_a_table_of_other_examples_says_nothing_of_accuracy(tmp_path):
    made = run(tmp_path / "run", CONSTANT)
    made.summary["final"]["eval/accuracy"] = 0.9
    assert traps.constant(made) is None


@pytest.mark.parametrize(("sizes", "weights", "told"), [
    ({"least": 5, "most": 9}, ("uniform", "num_examples"), True),
    ({"least": 5, "most": 9}, ("uniform", "uniform"), False),
    ({"least": 5, "most": 5}, ("uniform", "num_examples"), False),
    (None, ("uniform", "num_examples"), True),
])  # fmt: skip
def test_labels_that_count_clients_differently_are_told(sizes, weights, told, tmp_path):
    runs = [
        run(tmp_path / label, SAID, label, weight=weight, sizes=sizes)
        for label, weight in zip("ab", weights, strict=True)
    ]
    text = " ".join(overview.of_comparison(grouped(runs)))
    assert ("“a”" in text.partition("Clients count differently: alike in ")[2]) == told
    assert any("algorithm.weight" in line for line in finals([made.path for made in runs])) == told


def test_a_study_says_which_points_learnt_nothing_and_that_labels_count_clients_differently(tmp_path):
    sizes = {"least": 5, "most": 9}
    given = [
        ("a", 1.0, SAID, "uniform"),
        ("b", 1.0, SAID, "num_examples"),
        ("b", 0.5, [(0, 0, 50), (1, 1, 50)], "uniform"),
    ]
    runs = [
        run(tmp_path / f"{label}-{rate}", table, label, weight=weight, sizes=sizes)
        for label, rate, table, weight in given
    ]
    study = pd.DataFrame([{"label": label, "availability.rate": rate, "seed": 0} for label, rate, *_ in given])
    tables = Tables({"availability.rate": [1.0, 0.5]}, None, study, pd.DataFrame(), pd.DataFrame(), runs)
    learnt, counted, *_ = study_page.answers(tables)
    assert [f"“{point}”" in learnt for point in ("a, rate = 1", "b, rate = 1", "b, rate = 0.5")] == [True, True, False]
    assert "by their examples in “b”" in counted
    assert "and 1 more" in str(traps.not_learnt({"a": runs[:1], "b": runs[1:2]}, 1))


def test_several_seeds_of_one_label_that_learnt_nothing_are_told_on_the_terminal(tmp_path):
    lines = finals([run(tmp_path / name, CONSTANT).path for name in ("first", "second")])
    assert "Not clearly learnt" in lines[-1]


def test_the_worst_class_is_told_by_label_on_the_page_and_on_the_terminal(tmp_path):
    other = [(0, 0, 10), (0, 1, 60), (1, 1, 30)]
    runs = [run(tmp_path / label, table, label) for label, table in (("a", other), ("b", SAID))]
    text = " ".join(overview.of_comparison(grouped(runs)))
    assert "Recall of the worst class: “b” 0.3333 (class 1), “a” 0.1429 (class 0)." in text
    first, second, *_ = finals([made.path for made in runs])
    assert first.endswith("recall of the worst class 0.1429")
    assert second.endswith("recall of the worst class 0.3333")
