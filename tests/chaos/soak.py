"""Runs while something is killed, stopped or damaged every few seconds; the result must be that of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

import fedfleet
from fedfleet.config.schema import with_overrides
from fedfleet.experiments.checkpoint import newest
from tests.algorithms.cases import CASES as ROWS
from tests.algorithms.cases import INVITE, MODEL, NEEDS

BASE: dict[str, Any] = {
    "rounds": 200,
    "population": {"clients": 60, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8}},
    "task": {"name": "classification", "model": "mlp", "hidden": [200]},
    "availability": {"kind": "bernoulli", "rate": 0.8},
    "devices": "lognormal",
    "executor": {"kind": "ray", "cpus_per_actor": 0.5, "block_size": 3},
    "evaluation": {"every": 10},
    "checkpoint": {"every_s": 1},
}
COHORT = {"cohort": {"size": 12, "wait_for": "siwer", "attempts": 50}}
LATE = {"cohort": {**COHORT["cohort"], "late": "keep"}, "selection": "oort"}


def _case(name: str) -> dict[str, Any]:
    """Return what an algorithm is soaked with: the options its other tests take, and late answers for some."""
    task, options = ROWS[name]
    rest = {} if "buffer" in options else LATE if name in ("fedavg", "fedprox") else COHORT
    if name in INVITE:
        rest = {"cohort": {**COHORT["cohort"], "size": INVITE[name]}}
    return {
        "task": {"name": task, **({"model": MODEL[name]} if name in MODEL else {"model": "mlp", "hidden": [200]})},
        "algorithm": {"name": name, **options},
        **rest,
        **NEEDS.get(name, {}),
    }


FIRST = ("fedavg", "cdma_ada", "scaffold", "fedbuff")  # of every kind one
CASES = {name: _case(name) for name in dict.fromkeys((*FIRST, *ROWS))}
TABLES = ("rounds", "phases", "outcomes", "domains")
MODELS = ("model", "best")
# What the outcome of a driver looks like; one that is through, and on its way out, catches nothing any more.
ENDED = (130, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
START_S = 120.0  # for a process to come up, on a machine with other work


class Report(NamedTuple):
    """What was done to a run, and what came of it."""

    case: str
    rounds: int
    faults: dict[str, int]
    seconds: float
    lost: list[str]
    """Files whose contents are not those of the undisturbed run."""


def say(found: Report) -> None:
    """Print what was done to a run, and what came of it."""
    what = ", ".join(f"{n} x {fault}" for fault, n in sorted(found.faults.items()))
    verdict = f"LOST: {', '.join(found.lost)}" if found.lost else "equal to the undisturbed run"
    print(f"{found.case}: {found.rounds} rounds in {found.seconds:.0f} s; {what}; {verdict}", flush=True)


def table(reports: Sequence[Report], faults: Iterable[str]) -> int:
    """Print of all runs how often each fault was put in and got over; return how many results were lost."""
    total = sum((Counter(r.faults) for r in reports), Counter[str]())
    lost = sum(len(r.lost) for r in reports)
    print(f"\n{'fault':45} injected recovered")
    for fault in faults:
        bad = sum(r.faults.get(fault, 0) for r in reports if r.lost)
        print(f"{fault:45} {total[fault]:8} {total[fault] - bad:9}")
    print(f"{sum(total.values())} faults in {len(reports)} runs, results lost: {lost}")
    return lost


def soak(
    case: str, folder: Path, draw: random.Random, *, rounds: int, faults: Sequence[str], every_s: tuple[float, float]
) -> Report:
    """Disturb a run by these faults, in random order, at moments ``every_s`` apart (least, most), and compare it with one in peace.

    Each time it goes on, it is with another number of actors.
    """
    started = time.monotonic()
    config = fedfleet.load(BASE, CASES[case] | {"rounds": rounds})
    peace = fedfleet.Experiment(with_overrides(config, {"executor.kind": "local"})).run(folder / "peace")
    path, out, done = folder / "config.yaml", folder / "run", Counter[str]()
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    plan = iter(draw.sample(faults, len(faults)))
    pause = 0.0
    while True:
        before = newest(out / "checkpoints")[0]
        if before is None:
            shutil.rmtree(out, ignore_errors=True)
        actors = f"executor.actors={draw.randint(1, 4)}"
        command = ["run", path, actors, "--out", out] if before is None else ["resume", out, actors]
        process = _start(command, folder / "log.txt")
        until = time.monotonic() + START_S
        while process.poll() is None and _rounds(out) <= (0 if before is None else before.rounds):
            if time.monotonic() > until:
                process.kill()
                raise AssertionError(f"no checkpoint within {START_S} s: see {folder / 'log.txt'}")
            time.sleep(0.05)
        while process.poll() is None:
            pause = pause or draw.uniform(*every_s)
            time.sleep(min(pause, 0.1))
            pause = max(0.0, pause - 0.1)
            if (
                pause == 0.0
                and (fault := next(plan, None)) is not None
                and process.poll() is None
                and FAULTS[fault](process, out)
            ):
                done[fault] += 1
        if process.returncode == 0:
            break
        if process.returncode not in ENDED:
            raise AssertionError(f"status {process.returncode}: {(folder / 'log.txt').read_text()[-2000:]}")
    lost = unlike(peace.folder, out)
    return Report(case, rounds, dict(done), time.monotonic() - started, lost)


def _start(command: list[Any], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        program = [sys.executable, "-m", "fedfleet", *map(str, command), "--no-report"]
        return subprocess.Popen(program, stdout=file, stderr=file)


def _rounds(out: Path) -> int:
    found = newest(out / "checkpoints")[0]
    return 0 if found is None else found.rounds


def _kill_worker(process: subprocess.Popen[bytes], out: Path) -> bool:
    """Kill an actor, which may be in the middle of a block."""
    actors = [pid for pid in _descendants(process.pid) if _name(pid).startswith("ray::ClientActor")]
    if not actors:
        return False
    os.kill(actors[0], signal.SIGKILL)
    return True


def _kill_driver(process: subprocess.Popen[bytes], out: Path) -> bool:
    """Kill the process that holds everything."""
    process.kill()
    return process.wait() == -signal.SIGKILL


def _terminate_driver(process: subprocess.Popen[bytes], out: Path) -> bool:
    """Ask it to end, as a cluster's scheduler does."""
    process.terminate()
    return process.wait() in ENDED


def _interrupt_driver(process: subprocess.Popen[bytes], out: Path) -> bool:
    """Press Ctrl-C."""
    process.send_signal(signal.SIGINT)
    return process.wait() in ENDED


def _damage(process: subprocess.Popen[bytes], out: Path) -> bool:
    """Kill the driver, and cut its newest checkpoint short."""
    if len(list((out / "checkpoints").glob("round-*.safetensors"))) < 2 or not _kill_driver(process, out):
        return False
    path = max((out / "checkpoints").glob("round-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    return True


FAULTS: dict[str, Callable[[subprocess.Popen[bytes], Path], bool]] = {
    "worker killed": _kill_worker,
    "driver killed": _kill_driver,
    "driver terminated": _terminate_driver,
    "driver interrupted": _interrupt_driver,
    "driver killed, newest checkpoint cut short": _damage,
}


def _descendants(pid: int) -> list[int]:
    """Return the processes below a process, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _name(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def unlike(a: Path, b: Path) -> list[str]:
    """Return the models and tables of two runs that are not the same, but for the seconds that things took."""
    return [name for name in (*MODELS, *TABLES) if not equal(a, b, name)]


def equal(a: Path, b: Path, name: str) -> bool:
    if name in MODELS:
        one, other = (f / f"{name}.safetensors" for f in (a, b))
        return one.read_bytes() == other.read_bytes()
    one, other = (f / f"{name}.parquet" for f in (a, b))
    if not (one.exists() or other.exists()):
        return True
    tables = [pd.read_parquet(path).drop(columns="seconds", errors="ignore") for path in (one, other)]
    return tables[0].equals(tables[1])


def events(out: Path) -> Counter[str]:
    """Return how often a run says what happened to it."""
    path = out / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return Counter(json.loads(line)["event"] for line in lines)
