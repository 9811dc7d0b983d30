"""Pages when metrics double: what was asked is open, other splits and spreads are folded."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from fedfleet.report import write_report
from fedfleet.report.shown import asked_for, parted
from fedfleet.report.tables import read
from tests.front.report.report_runs import Page, figures, make_run, rounds_table

METRICS = ["accuracy", "loss", "validation_accuracy", "clients_accuracy_std", "target_accuracy", "own_accuracy"]


def doubled(path: Path, label: str) -> Path:
    table: pd.DataFrame = rounds_table(4)
    final = {}
    for metric in METRICS[:4]:
        table[f"eval/{metric}"] = table["eval/accuracy"]
        final[f"eval/{metric}"] = 0.5
    summary = {"label": label, "status": "finished", "final": final}
    return make_run(path, rounds=table, summary=summary, config={"seed": 0})


@pytest.mark.parametrize(("asked", "shown"), [
    ((), ["accuracy", "loss", "target_accuracy", "own_accuracy"]),
    (("validation_accuracy",), ["accuracy", "loss", "validation_accuracy", "target_accuracy", "own_accuracy"]),
])  # fmt: skip
def test_metrics_are_folded_by_their_names_unless_asked_for(asked: tuple[str, ...], shown: list[str]) -> None:
    assert parted(METRICS, asked) == (shown, [metric for metric in METRICS if metric not in shown])
    assert parted(["validation_loss", "train_loss"], ()) == (["validation_loss"], ["train_loss"])


def test_what_selects_a_model_or_stops_a_run_was_asked_for(tmp_path: Path) -> None:
    config = {"until": "eval/a>=0.9", "patience": {"metric": "eval/b"}, "checkpoint": {"best": "eval/c"}}
    assert asked_for([read(make_run(tmp_path / "run", config=config))]) == {"a", "b", "c"}


@pytest.mark.slow
def test_folded_figures_and_columns_are_there_to_be_opened(tmp_path: Path) -> None:
    page = Page(write_report([doubled(tmp_path / "a", "a"), doubled(tmp_path / "b", "b")], tmp_path / "out"))
    before, _, rest = page.html.partition('<details class="more"><summary>More of Runs: Other metrics')
    assert "final validation_accuracy" not in before
    assert "final validation_accuracy" in rest.partition("</details>")[0]
    learning = re.search(
        r'<details class="more"><summary>More of Learning: (.*?)</summary>(.*?)</details>', rest, re.DOTALL
    )
    assert learning is not None
    assert learning[1] == "validation_accuracy, clients_accuracy_std"
    assert 'id="metric-validation-accuracy"' in learning[2]
    assert 'id="metric-loss"' in before + rest.partition("<details")[0]
    assert {"metric-loss", "metric-validation-accuracy"} <= figures(tmp_path / "out")  # files are of all
