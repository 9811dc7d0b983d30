"""Time to start: ``python -m benchmarks.start``: the help and a run's first round, in a new process each, in turns.

A callback of the run notes when its first round is done and, where the run starts Ray, when Ray is up.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import fedfleet
from benchmarks import command
from benchmarks.command import say

MARKS = "FEDFLEET_BENCHMARK_MARKS"  # the file that a run leaves its marks in
KIND = "FEDFLEET_BENCHMARK_KIND"  # where it runs
QUICK = ("configs/cdma/digits.yaml", "rounds=3", "callbacks=[benchmarks.start:Marks]")
KINDS = {"local": ("executor.kind=local",), "ray": ("executor.kind=ray", "executor.actors=2")}


class Marks(fedfleet.Callback):
    """Notes, in seconds since 1970, when Ray was up, if it is started, and when the first round was done."""

    def __init__(self) -> None:
        self._marks: dict[str, float] = {}
        if os.environ[KIND] == "ray":
            import ray

            init = ray.init

            def timed(*args: Any, **options: Any) -> Any:
                found = init(*args, **options)
                self._marks["ray_up"] = time.time()
                return found

            ray.init = timed

    def start(self, run: Any) -> None:
        """Note that the first model is measured, and rounds begin."""
        self._marks["start"] = time.time()

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> None:
        """Note the first."""
        if "round" not in self._marks:
            self._marks["round"] = time.time()
            Path(os.environ[MARKS]).write_text(json.dumps(self._marks), encoding="utf-8")


def helped() -> dict[str, float]:
    """Return seconds of ``fedfleet --help``: until it has ended, and what its process computed."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run([sys.executable, "-m", "fedfleet", "--help"], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.time() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"whole_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def ran(kind: str) -> dict[str, float]:
    """Return seconds of ``fedfleet run`` of three rounds: to Ray, to the first round and from Ray to it, to the end."""
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        asked = [sys.executable, "-m", "fedfleet", "run", *QUICK, *KINDS[kind], "--out", f"{folder}/run"]
        started = time.time()
        env = {**os.environ, MARKS: str(marks), KIND: kind}
        subprocess.run(asked, check=True, capture_output=True, env=env)
        whole, at = time.time() - started, json.loads(marks.read_text(encoding="utf-8"))
    found = {"first_round_s": at["round"] - started, "whole_s": whole}
    if "ray_up" in at:
        found |= {"ray_up_s": at["ray_up"] - started, "ray_to_round_s": at["round"] - at["ray_up"]}
    return found


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return medians, a row a thing that one waits for; they take turns, after one that only warms the disk's cache."""
    found: dict[str, list[dict[str, float]]] = {"--help": [], **{f"run, {kind}": [] for kind in KINDS}}
    for turn in range(repeats + 1):
        say(f"turn {turn} of {repeats}")
        rows = {"--help": helped(), **{f"run, {kind}": ran(kind) for kind in KINDS}}
        for name, row in rows.items() if turn else ():
            found[name].append(row)
    return [{"what": name, **{key: median(r[key] for r in rows) for key in rows[0]}} for name, rows in found.items()]


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.start", __doc__)
    ask.add_argument("--repeats", type=command.count, default=5)
    ask.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    args = ask.parse_args(argv)
    rows = measure(args.repeats)
    if args.json:
        print(json.dumps(rows))
        return
    columns = ("what", "whole_s", "cpu_s", "first_round_s", "ray_up_s", "ray_to_round_s")
    title = f"Seconds, medians of {args.repeats}: {QUICK[0]}, three rounds"
    command.show(title, columns, [[row.get(column, "") for column in columns] for row in rows])


if __name__ == "__main__":
    main()
