"""Several runs from one configuration: every label of ``compare``, every point of ``vary``, every seed; then one report."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedfleet.config import Config, with_overrides
from fedfleet.experiment import Experiment, Run
from fedfleet.progress import Progress
from fedfleet.report import write_report
from fedfleet.runfolder import claim
from fedfleet.simulator.errors import FedfleetError


@dataclass(frozen=True)
class Trial:
    """One run of a campaign and its place below the campaign's folder."""

    config: Config
    place: str


def trials(config: Config) -> list[Trial]:
    """Return the runs a configuration asks for; a single run has the place "."."""
    if config.compare is None and config.vary is None and config.seeds is None:
        return [Trial(config, ".")]
    found = []
    varied = config.vary or {}
    for label, overrides in (config.compare or {config.label or "": {}}).items():
        for values in itertools.product(*varied.values()):
            point = dict(zip(varied, values, strict=True))
            name = " ".join(filter(None, [label, *(f"{k.split('.')[-1]}={v}" for k, v in point.items())]))
            for seed in config.seeds or [config.seed]:
                one = {
                    **overrides,
                    **point,
                    "label": name or None,
                    "seed": seed,
                    "seeds": None,
                    "compare": None,
                    "vary": None,
                }
                folder = _safe(name) if name else "."
                found.append(Trial(with_overrides(config, one), f"{folder}/seed-{seed}" if config.seeds else folder))
    return found


def run(config: Config, out: Path, progress: Progress, jobs: int = 1, *, report: bool = True) -> list[Run]:
    """Run every trial (``jobs`` at a time, each in a process of its own if more than one) and write the report.

    All trials are checked before the first one starts.
    """
    plan = trials(config)
    for trial in {t.config.label: t for t in plan}.values():
        Experiment(trial.config)
    if len(plan) == 1 and plan[0].place == ".":
        runs = [Experiment(plan[0].config).run(out, progress)]
    else:
        claim(out)
        runs = _in_processes(plan, out, progress, jobs) if jobs > 1 else _in_turn(plan, out, progress)
    if report:
        progress.say(f"report: {write_report([out], out)}")
    return runs


def _in_turn(plan: list[Trial], out: Path, progress: Progress) -> list[Run]:
    runs = []
    for i, trial in enumerate(plan):
        progress.say(f"run {i + 1}/{len(plan)}: {trial.place}")
        runs.append(Experiment(trial.config).run(out / trial.place, progress))
    return runs


def _in_processes(plan: list[Trial], out: Path, progress: Progress, jobs: int) -> list[Run]:
    def one(trial: Trial) -> Run:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "config.yaml"
            path.write_text(yaml.safe_dump(trial.config.model_dump()), encoding="utf-8")
            command = [
                sys.executable,
                "-m",
                "fedfleet",
                "run",
                str(path),
                "--out",
                str(out / trial.place),
                "--no-report",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        if done.returncode:
            raise FedfleetError(f"{trial.place}: {lines[-1]}")
        progress.say(f"{trial.place}: {lines[-1]}")
        return Run(out / trial.place, {})

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, plan))


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.+" else "-" for c in label) or "run"
