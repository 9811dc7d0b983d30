"""Watching runs from elsewhere: what the page says while they go on, when they have ended, and when they were killed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedfleet
from fedfleet.commands import watch as watching
from fedfleet.experiments import status as standing
from fedfleet.experiments.status import described, status_of
from tests.front.commands.lines import line
from tests.front.experiments.resuming import BASE, CASES

SMALL = {**BASE, **CASES["stateless"], "rounds": 6, "evaluation": {"every": 2}}


class Looking(fedfleet.Callback):
    """Looks at a run's folder after a round of it."""

    def __init__(self, command: Any, out: Path):
        self.command, self.out = command, out
        self.pages: list[str] = []
        self.found: list[dict[str, Any]] = []

    def round(self, row: Any, phases: Any) -> None:
        self.found.append(status_of(self.out))
        self.pages.append(self.command("watch", self.out, "--once")[1])


def test_a_run_under_way_is_seen_from_its_folder(tmp_path, command, monkeypatch):
    monkeypatch.setattr(standing, "EVERY_S", 0.0)
    out = tmp_path / "run"
    looking = Looking(command, out)
    run = fedfleet.run(SMALL, {"rounds": 5}, out=out, callbacks=looking)
    page, found = looking.pages[-1], looking.found[-1]
    assert "fedavg seed 0  running" in page
    assert "round 4/5" in page  # the last one is told of to callbacks in their order, the page's last
    assert "invited" in page
    assert "rounds/s" in page
    assert (found["state"], found["rounds"], found["done"]) == ("running", 5, 4)
    assert found["metrics"]["eval/accuracy"]["initial"] == run.summary["initial"]["eval/accuracy"]
    assert found["totals"]["completed"] == run.rounds["completed"][:4].sum()
    assert [at for at, _ in found["curve"]] == [0, 2, 4]
    assert not (out / "status.json").exists()
    done = command("watch", out)
    assert done[0] == 0
    assert "finished" in done[1]
    assert "round 5/5" in done[1]
    assert "▁" in done[1]
    again = Looking(command, out)
    fedfleet.resume(out, {"rounds": 7}, again)
    resumed = status_of(out)
    assert again.found[0]["metrics"]["eval/accuracy"]["initial"] == found["metrics"]["eval/accuracy"]["initial"]
    assert resumed["totals"]["invited"] > found["totals"]["invited"]
    assert resumed["metrics"].keys() == found["metrics"].keys()


@pytest.mark.slow
def test_it_ends_when_the_run_does(tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps({**SMALL, "rounds": 40, "checkpoint": {"every_s": None}}))
    command = [sys.executable, "-m", "fedfleet", "run", "c.yaml", "--out", "run", "--no-report"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        until = time.monotonic() + 120
        while not (tmp_path / "run" / "status.json").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        with (tmp_path / "screen").open("w+", encoding="utf-8") as screen:
            watching.watch(tmp_path / "run", Console(file=screen, force_terminal=True, width=150), 0.2, once=False)
            screen.seek(0)
            shown = screen.read()
    assert process.returncode == 0
    assert "running" in shown or "starting" in shown
    assert "finished" in shown


def test_a_run_that_was_killed_is_told_from_one_at_work(tmp_path, command):
    run = fedfleet.run(SMALL, out=tmp_path / "run").folder
    (run / "summary.json").unlink()
    assert status_of(run)["state"] == "killed"
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    found = {"state": "running", "at": 0, "pid": int(ended.stdout), "host": standing.platform.node(), "said": ["hello"]}
    (run / "status.json").write_text(json.dumps(found))
    page = command("watch", run)[1]  # which ends
    assert f"go on with `fedfleet resume {run}`" in page.replace("\n", " ").replace("  ", " ")
    (run / "status.json").write_text(json.dumps({**found, "host": "elsewhere"}))
    assert status_of(run)["state"] == "running"


@pytest.mark.parametrize("given", [{"patience": {"metric": "eval/accuracy", "evaluations": 1, "min_delta": 0.9}}, {}])
def test_why_a_run_ended_and_what_happened_is_there(tmp_path, command, given):
    run = fedfleet.run(SMALL, given, out=tmp_path / "run").folder
    (run / "events.jsonl").write_text('{"round": 1, "event": "worker_died", "blocks": 2}\n{"rou')
    page = command("watch", run, "--once")[1]
    assert ("patience: eval/accuracy" in page) == bool(given)
    assert "round 1: worker_died (blocks 2)" in page


def test_several_runs_are_a_row_each(tmp_path, command):
    (tmp_path / "c.yaml").write_text(json.dumps({**SMALL, "rounds": 2}))
    study = ["study", tmp_path / "c.yaml", "--vary", "algorithm.lr=0.1,0.2", "--jobs", 1, "--out", tmp_path / "s"]
    assert command(*study)[0] == 0
    status, page, _ = command("watch", tmp_path / "s")
    assert status == 0
    assert "2 finished" in page
    assert page.count("accuracy") == 2
    marked = json.loads((tmp_path / "s" / "study.json").read_text())
    (tmp_path / "s" / "study.json").write_text(json.dumps({**marked, "trials": 5}))
    assert "3 to come" in command("watch", tmp_path / "s", "--once")[1]


def test_where_there_is_no_run_it_is_said(tmp_path, command):
    for folder, said in (("none", "no such folder"), (".", "no run there or below")):
        assert said in line(command("watch", tmp_path / folder))


def test_on_a_terminal_a_run_that_is_not_there_yet_is_awaited(tmp_path, monkeypatch):
    folder, slept = tmp_path / "run", list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        fedfleet.run({**SMALL, "rounds": 1}, out=folder)

    monkeypatch.setattr(watching.time, "sleep", sleep)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)
    watching.watch(folder, console, 0.5, once=False)
    assert slept == [0.5]
    assert f"waiting for {folder}, which is not there yet" in console.file.getvalue()  # pyright: ignore


def test_metrics_of_which_less_is_better_and_curves_that_are_thinned():
    found = described(1, float("nan"), {}, [(i, {"eval/loss": abs(i - 50)}) for i in range(200)])
    assert found["metrics"]["eval/loss"] == {"initial": 50, "last": 149, "best": 0}
    assert found["train_loss"] is None
    assert len(found["curve"]) <= standing.POINTS + 1
    assert (found["curve"][0], found["curve"][-1]) == ([0, 50], [199, 149])
    assert described(0, None, {}, [(0, {})])["curve"] == []
    assert watching.sparkline([1, 1]) == "1 ▁▁ 1"


def test_the_time_left_is_in_a_unit_that_can_be_read() -> None:
    status = {"state": "running", "rounds_per_second": 0.5, "done": 0}
    rounds = {20: "40 s", 1_000: "33 min", 20_000: "11 h"}
    assert {n: watching._left({**status, "rounds": n}) for n in rounds} == rounds


def test_names_of_several_runs_are_whole_on_a_narrow_terminal(tmp_path: Path):
    name, known = "a-label-of-some-length-0.25", {"eval/accuracy": {"last": 0.5, "best": 0.625}}
    page = watching.several(tmp_path, {tmp_path / name: {"state": "finished", "done": 9, "metrics": known}}, 1)
    told = io.StringIO()
    Console(width=72, file=told).print(page)
    rows = [row.split("│")[1:-1] for row in told.getvalue().splitlines() if row.startswith("│")]
    assert "".join(row[0].strip() for row in rows) == name
    assert [cell.strip() for cell in rows[0][1:]] == ["finished", "9", "accuracy", "0.5000", "0.6250", ""]
