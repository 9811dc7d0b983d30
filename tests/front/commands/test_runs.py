"""Runs found again: what is a row, expressions with dotted names, tables, orders, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedfleet
from fedfleet.commands import runs as finding
from tests.front.report.report_runs import make_run, rounds_table

pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs in two studies, one without an end, and a folder inside a run that looks like one."""
    root = tmp_path_factory.mktemp("runs")
    for i, (name, rate, seed, auc) in enumerate(
        (("fedavg", 1.0, 0, 0.9), ("fedavg", 0.4, 1, 0.7), ("cdma_one", 0.4, 0, 0.8))
    ):
        config = {
            "seed": seed,
            "algorithm": {"name": name, "lr": 0.1 * i},
            "availability": {"kind": "bernoulli", "rate": rate},
        }
        summary = {
            "status": "finished",
            "rounds": 4,
            "label": f"it's {i}",
            "final": {"eval/auc": auc},
            "initial": {"eval/auc": 0.5},
        }
        found = pd.DataFrame({"label": [0, 0, 1], "predicted": [0, 1, 1], "examples": [i, 1, 2]})
        make_run(
            root / ("one" if i < 2 else "two/deep") / f"run-{i}",
            config=config,
            summary=summary,
            rounds=rounds_table(2 + i),
            classes=found,
        )
    make_run(
        root / "two" / "killed",
        config={"seed": "x", "algorithm": {"name": "fedavg"}},
        summary=None,
        rounds=rounds_table(1),
    )
    make_run(root / "one" / "run-0" / "checkpoints" / "no")
    return root


def names(frame: pd.DataFrame) -> list[str]:
    return [Path(path).name for path in frame["folder"]]


@pytest.mark.parametrize(("where", "wanted"), [
    ("algorithm = 'fedavg' and availability.rate < 0.5", ["run-1"]), ("eval/auc > 0.75", ["run-0", "run-2"]),
    ("eval/auc/2 > 0.42", ["run-0"]), ("algorithm.lr >= 0.1 or label = 'it''s 0'", ["run-0", "run-1", "run-2"]),
    ("status is null", ["killed"]), ("availability = 'bernoulli' and seed = '0'", ["run-0", "run-2"]),
    ("label = 'eval/auc'", []), ("eval/auc > initial/auc + 0.3 and rounds = 4", ["run-0"]),
    ("folder like '%deep%'", ["run-2"]), ("worst_recall >= 0.5 and worst_class = 0", ["run-1", "run-2"]),
])  # fmt: skip
def test_settings_and_metrics_are_columns_by_their_names(folder: Path, where: str, wanted: list[str]) -> None:
    assert names(finding.select(finding.rows(folder), where)) == wanted


def test_tables_are_read_where_they_lie(folder: Path) -> None:
    every = finding.rows(folder)
    found = finding.select(every, "algorithm = 'fedavg' and round >= 1 and eval/accuracy > 0.25", "rounds")
    kept = [(Path(f).name, r) for f, r in zip(found["folder"], found["round"], strict=True)]
    assert kept == [("run-0", 1), ("run-1", 1), ("run-1", 2)]
    assert found["eval/accuracy"].tolist() == pytest.approx([0.3, 0.3, 0.4])
    assert len(finding.select(every, None, "rounds")) == 2 + 3 + 4 + 1
    found = finding.select(every, "run.label = 'it''s 1' and label = 0", "classes")
    assert found["predicted"].tolist() == [0, 1]
    assert finding.shown(found, every, [], None, None, "classes")[:3] == ["folder", "run.label", "seed"]


@given(
    st.lists(
        st.sampled_from(["a.b", "a.b.c", "eval/x", "eval/x_y", "lr", "'a.b lr'", '"lr"', " < ", "/", "(", "12"]),
        max_size=8,
    )
)
def test_names_are_quoted_once_and_text_is_left_alone(parts: list[str]) -> None:
    columns = ["a.b", "a.b.c", "eval/x", "eval/x_y", "lr"]
    wanted = [f'"{part}"' if part in columns else part for part in parts]
    assert finding.quoted(" ".join(parts), columns) == " ".join(wanted)


def test_the_command_shows_a_table_or_json(folder: Path, command) -> None:
    status, said, error = command(
        "runs", folder, "--where", "algorithm.lr < 0.15", "--sort", "eval/auc", "--descending"
    )
    assert status == 0, error
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert [row[0] for row in shown] == ["one/run-0", "one/run-1"]
    assert said.endswith(f"2 of 4 runs in {folder}\n")
    assert "algorithm.lr" in said
    assert "label like 'it''s %'" in command("runs", folder, "--where", "label = 'it''s'")[1]
    assert "of all rows, round is 0 to 3" in command("runs", folder, "--table", "rounds", "--where", "round = 9")[1]
    status, said, _ = command("runs", folder, "--sort", "eval/auc", "--limit", "3", "--json")
    told: dict[str, Any] = json.loads(said)
    assert told["rows"] == 4
    assert [run["eval/auc"] for run in told["runs"]] == [0.7, 0.8, 0.9]  # one without comes last
    assert told["runs"][0]["availability.rate"] == 0.4
    status, said, _ = command(
        "runs", folder, "--table", "rounds", "--columns", "folder,round", "--limit", "1", "--json"
    )
    assert json.loads(said)["runs"] == [{"folder": "one/run-0", "round": 0}]


REFUSED = [
    (["--where", "algorithm = fedavg"], "quote it: 'fedavg'"),
    (["--where", 'label = "it"'], "write text as 'it'"),
    (["--where", "availability.rat < 0.5"], "--where='availability.rat': unknown; did you mean 'availability.rate'?"),
    (["--where", "eval/aucc > 0.5"], "--where='eval/aucc': unknown; did you mean 'eval/auc'?"),
    (["--where", "algorithm = "], "--where='algorithm = '"),
    (["--where", "seed = (select count(*) from read_csv('/etc/passwd'))"], "--where="),
    (["--sort", "eval/acu"], "--sort='eval/acu': unknown; did you mean 'eval/auc'?"),
    (["--columns", "folder,sed"], "--columns='sed'"), (["--table", "round"], "--table='round'"),
    (["--table", "domains"], "--table='domains': none of these"), (["--descending"], "--descending: nothing"),
]  # fmt: skip


def test_bad_input_is_one_line(subtests, folder: Path, tmp_path: Path, command) -> None:
    for arguments, says in REFUSED:
        with subtests.test(str(arguments)):
            status, _, error = command("runs", folder, *arguments)
            assert (status, error.startswith("error: "), error.count("\n"), says in error) == (2, True, 1, True), error
    for path, says in ((tmp_path / "none", "no such folder"), (tmp_path, "no run there")):
        status, _, error = command("runs", path)
        assert (status, says in error) == (2, True)


def test_runs_of_today_are_found(tmp_path: Path) -> None:
    config = {"rounds": 1, "population": {"clients": 10}, "task": {"model": "logistic"}, "cohort": {"size": 3}}
    done = fedfleet.run({**config, "executor": {"kind": "local"}}, out=tmp_path / "a")
    (row,) = finding.plain(finding.select(finding.rows(tmp_path), "population.dataset = 'digits'"))
    assert row["eval/accuracy"] == done.summary["final"]["eval/accuracy"]
    assert (row["population.clients"], row["cohort.size"], row["status"]) == (10, 3, "finished")
