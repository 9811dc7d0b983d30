"""The status of a run, as a small file for whoever looks on from elsewhere."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfleet.experiments.runfolder import RunFolder
from fedfleet.files import parquet
from fedfleet.files.documents import json_of
from fedfleet.files.summary import summary_of
from fedfleet.files.writing import replacing
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.tracking.base import numbers
from fedfleet.tracking.callback import Begun, Callback

STATUS = "status.json"
EVERY_S = 2.0
POINTS, LINES = 60, 4  # of the curve; of what was said
COUNTS = ("invited", "completed", "stale", "late", "failed", "unavailable", "client_steps", "virtual_s")


class Status(Callback):
    """Writes ``status.json`` every few seconds while a run goes on, and takes it away when it ends, when the tables say more.

    It is not what a run goes on from, so it is replaced whole, but not waited for until the disk has it.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._said: deque[str] = deque(maxlen=LINES)
        self._run: Begun | None = None
        self._totals: Counter[str] = Counter()
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._row: Mapping[str, Any] = {}
        self._started, self._before = 0.0, 0
        self._next_s = 0.0
        self._write(at_once=True)

    def say(self, text: str) -> None:
        """Keep the last few lines."""
        self._said.append(text)
        self._write()

    def start(self, run: Begun) -> None:
        """Begin with what the tables have."""
        self._run, self._started = run, time.monotonic()
        self._evaluations = [(0, numbers(run.initial))]
        for row in run.rows:
            self._take(row)
        self._before = self._totals["client_steps"]
        self._write(at_once=True)

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> None:
        """Count a round."""
        self._take(row)
        self._write()

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Take an evaluation that did not come with its row."""
        if self._evaluations[-1][0] < done:
            self._evaluations.append((done, numbers(metrics)))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Take the file away."""
        try:
            with self._folder.writing():
                (self._folder.folder / STATUS).unlink(missing_ok=True)
        except FedfleetError:
            return  # the run has said so

    def _take(self, row: Mapping[str, Any]) -> None:
        self._row = row
        for name in COUNTS:
            self._totals[name] += row.get(name) or 0
        if result := numbers({k: v for k, v in row.items() if k.startswith("eval/")}):
            self._evaluations.append((int(row["round"]) + 1, result))

    def _write(self, *, at_once: bool = False) -> None:
        if time.monotonic() < self._next_s and not at_once:
            return
        self._next_s = time.monotonic() + EVERY_S
        path = self._folder.folder / STATUS
        try:
            with self._folder.writing(), replacing(path) as scratch:
                scratch.write_text(json.dumps(self._found()), encoding="utf-8")
        except FedfleetError:
            return  # what a run needs is written elsewhere, and says so

    def _found(self) -> dict[str, Any]:
        process = {"at": time.time(), "pid": os.getpid(), "host": platform.node(), "said": list(self._said)}
        if self._run is None:
            return {"state": "starting", **process}
        spent, done = max(time.monotonic() - self._started, 1e-9), len(self._folder.tables)
        return {
            "state": "running",
            **process,
            "name": self._run.name,
            "rounds": self._run.rounds,
            "seconds": spent,
            "rounds_per_second": (done - self._run.done) / spent,
            "client_steps_per_second": (self._totals["client_steps"] - self._before) / spent,
            **described(done, self._row.get("train_loss"), self._totals, self._evaluations),
        }


def described(
    done: int,
    train_loss: float | None,
    totals: Mapping[str, float],
    evaluations: Sequence[tuple[int, Mapping[str, float]]],
) -> dict[str, Any]:
    """Return what is told of rounds: totals, of each metric the first, the last and the best value, a curve of the first metric."""
    metrics: dict[str, dict[str, float]] = {}
    for _, result in evaluations:
        for name, value in result.items():
            known = metrics.setdefault(name, {"initial": value, "best": value})
            best = min if less_is_better(name) else max
            known |= {"last": value, "best": best(known["best"], value)}
    main = next(iter(metrics), None)
    points = [[at, result[main]] for at, result in evaluations if main in result] if main else []
    every = -(-len(points) // POINTS)
    thin = points[:: every or 1]
    return {
        "done": done,
        "train_loss": train_loss if train_loss == train_loss else None,
        "totals": dict(totals),
        "metrics": metrics,
        "curve": thin if not points or thin[-1] == points[-1] else [*thin, points[-1]],
    }


KINDS: dict[str, type] = {
    **dict.fromkeys(("state", "host"), str),
    **dict.fromkeys(("pid", "done", "rounds"), int),
    **dict.fromkeys(("metrics", "totals"), dict),
    **dict.fromkeys(("curve", "said"), list),
}
"""What is said under some keys of ``status.json``."""


def status_of(folder: Path) -> dict[str, Any]:
    """Return where a run stands: what ``status.json`` has, or the same of the summary and the tables; at least its ``state``.

    That is "starting", "running", a summary's "finished", "stopped", "failed", "interrupted", or "killed": nothing is at work.
    """
    summary = summary_of(folder)
    if summary:
        return {"state": summary.get("status", "?"), "summary": summary, **_of_tables(folder, summary)}
    try:
        result = json_of(folder / STATUS, KINDS)
    except (OSError, ConfigError):
        return {"state": "killed" if (folder / "rounds.parquet").exists() else "starting"}
    return result if _at_work(result) else {**result, "state": "killed"}


def _of_tables(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    try:
        rows = parquet.read(folder / "rounds.parquet")
    except (OSError, ConfigError):
        return {}
    each: list[dict[Any, Any]] = rows.to_dict("records")
    result = [(r["round"] + 1, numbers({k: v for k, v in r.items() if k.startswith("eval/")})) for r in each]
    evaluations = [(at, metrics) for at, metrics in result if metrics]
    totals = {name: sum(r.get(name) or 0 for r in each) for name in COUNTS}
    loss = each[-1].get("train_loss") if each else None
    initial = numbers(summary.get("initial") or {})
    return {
        "seconds": summary.get("seconds"),
        **described(len(rows), loss, totals, [(0, initial), *evaluations]),
    }


def _at_work(result: Mapping[str, Any]) -> bool:
    """Say whether the process is there; of another machine's, nothing is known."""
    if result.get("host") != platform.node():
        return True
    try:
        os.kill(int(result["pid"]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, KeyError, TypeError, OverflowError):
        return True
    return True
