"""``--json``: one object on standard output that scripts read, and everything else on standard error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.commands import terminal
from fedfleet.config.schema import load
from fedfleet.files.summary import summary_of
from tests.front.commands.lines import all_told

Command = Callable[..., tuple[int, str, str]]


def read(found: tuple[int, str, str]) -> Any:
    """Return the object that a command printed."""
    assert found[0] == 0, found[2]
    return json.loads(found[1])


def test_a_plan(command: Command, tiny: Path) -> None:
    one, two = read(command("plan", tiny, "rounds=2", "compare={one: {}, two: {algorithm: fedprox}}", "--json"))["runs"]
    assert (one["name"], two["name"]) == ("one", "two")
    assert (one["clients"], one["cohort"], one["floats"], one["model_bytes"]) == (20, 4, 650, 2600)
    assert one["phases"] == ["train"]
    assert one["lines"]["rounds, seed"] == "2, 0"
    assert load(two["config"]).algorithm.name == "fedprox"


def test_a_run_its_report_and_going_on(command: Command, tiny: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "report"
    found = command("run", tiny, "rounds=2", "--out", out, "--no-report", "--json")
    assert "round 2/2" in found[2]
    assert read(found) == {
        "folder": str(out),
        "report": None,
        "runs": [{"folder": str(out), "summary": summary_of(out)}],
    }
    longer = read(command("resume", out, "rounds=3", "--no-report", "--json"))
    assert longer["runs"][0]["summary"]["rounds"] == 3
    told = read(command("report", out, "--out", elsewhere, "--json"))
    assert told == {**longer, "folder": str(elsewhere), "report": str(elsewhere / "report.html")}


def test_a_bench(command: Command, tiny: Path) -> None:
    found = command("bench", tiny, "rounds=2", "--rounds", 1, "--json")
    assert found[2].startswith("starting: ")
    assert read(found)["rounds"] == 1


def test_what_is_shown(command: Command, tiny: Path) -> None:
    named = read(command("show", "algorithm", "fedprox", "--json"))
    assert (named["kind"], named["name"]) == ("algorithm", "fedprox")
    (mu,) = [row for row in named["options"] if row["option"] == "mu"]
    assert (mu["type"], mu["default"]) == ("number ≥ 0", "0.01")
    assert load(named["example"]).algorithm.name == "fedprox"
    assert [paper["year"] for paper in named["papers"]] == [2020]
    section = read(command("show", "cohort", "--json"))
    assert (section["kind"], section["options"][0]["option"]) == ("section", "size")
    assert [*read(command("show", "algorithms", "--json"))["names"]] == [*ALGORITHMS]
    held = read(command("show", "data", tiny, "--json"))
    assert (held["clients"], len(held["sizes"]), len(held["labels"][0])) == (20, 20, 10)
    online = read(command("show", "availability", tiny, "rounds=2", "--json"))
    assert np.shape(online["online"]) == (20, 2)


def test_numbers_that_json_has_not_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json(
        {"a": [math.nan, np.float64("inf"), 1.5], "b": {"c": np.array([1.0, math.nan])}, "d": Path("e")}
    )
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": {"c": [1.0, None]}, "d": "e"}


def test_what_does_not_apply_is_refused(subtests: pytest.Subtests, command: Command, tiny: Path) -> None:
    rows = [
        ("show algorithm --bibtex", "--bibtex"),
        ("show task auc --bibtex", "--bibtex"),
        ("show algorithm fedavg --bibtex --json", "--bibtex"),
        ("show algorithm fedavgg --bibtex", "show algorithm='fedavgg'"),
    ]
    all_told(subtests, lambda given: command(*given.split()), rows)
    (tiny.parent / "tune.yaml").touch()
    all_told(subtests, lambda given: command(*given), [(["resume", tiny.parent, "--json"], "--json")])
