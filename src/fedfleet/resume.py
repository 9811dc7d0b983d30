"""Go on with a run that was interrupted, or that is to be longer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from fedfleet.checkpoint import newest
from fedfleet.config import Config, complete, load
from fedfleet.experiment import Experiment
from fedfleet.progress import Progress
from fedfleet.reading import override, show
from fedfleet.runfolder import CHECKPOINTS, SUMMARY, locked
from fedfleet.runner import Run
from fedfleet.simulator.errors import ConfigError

MAY_CHANGE = (
    *("rounds", "until", "max_seconds", "label", "checkpoint"),
    *(f"executor.{key}" for key in ("kind", "actors", "cpus_per_actor", "gpus_per_actor", "address")),
    "population.data_dir",
)
"""Keys, or sections, that may be another when a run goes on: none of them decides what a round computes."""
DECIDES = ("inner", "block_size", "threads_per_actor", "device")
"""Keys of ``executor`` that do."""


def resume(
    folder: Path, overrides: list[str] | Mapping[str, Any] | None = None, progress: Progress | None = None, **own: Any
) -> Run:
    """Go on with the run in ``folder`` from its last checkpoint, and return it finished.

    A run that is at its end is returned as it is.

    Args:
        folder: the run folder.
        overrides: ``dotted.key=value`` strings or a mapping, of keys in ``MAY_CHANGE`` only.
        progress: where to say how far it is.
        own: the task, algorithm or population in Python that the run began with, if any.

    Raises ConfigError where there is nothing to go on from, FedfleetError for a run that failed.

    """
    progress = progress or Progress.silent()
    config = changed(folder / "config.yaml", overrides)
    found, _ = newest(folder / CHECKPOINTS)
    if found is not None and config.rounds < found.rounds:
        raise ConfigError(f"rounds={config.rounds}: the run has done {found.rounds} already: give more")
    if (done := at_its_end(folder, config)) is not None:
        progress.say(f"{folder}: {_ended(done, config)}")
        return Run(folder, done)
    warm_start, config = config.warm_start, config.model_copy(update={"warm_start": None})
    experiment = Experiment(config, **own)
    experiment.config = experiment.config.model_copy(
        update={"warm_start": warm_start}
    )  # for the record: it has started
    return experiment.resume(folder, progress)


def run_or_go_on(x: Experiment, out: Path, progress: Progress | None = None, *, replace: bool = False) -> Run:
    """Go on from the last checkpoint of the same run in ``out``; where there is none, run it.

    Raises ConfigError where ``out`` has a checkpoint of another run, unless that is to be replaced, and where a process is at
    work in it.
    """
    found = newest(out / CHECKPOINTS)[0]
    if found is not None:
        path = out / "config.yaml"
        before = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
        if _fixed(before) == _fixed(complete(x.config)) and found.rounds <= x.config.rounds:
            return x.resume(out, progress)
        if not replace:
            raise ConfigError(f"{out}: a run of another configuration is there: choose another folder, or remove it")
    if out.exists():
        with closing(locked(out)):
            shutil.rmtree(out)
    return x.run(out, progress)


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved configuration that is the same as long as a run goes on."""
    population = {**config.get("population", {}), "data_dir": None}
    return {**deciding(config), "population": population, "rounds": None, "until": None, "label": None}


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved configuration that decides what a round computes, and how many there are."""
    executor = {k: v for k, v in config.get("executor", {}).items() if k in DECIDES}
    return {**config, "executor": executor, "max_seconds": None, "checkpoint": None}


def at_its_end(folder: Path, config: Config) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do under this configuration."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        before = load(folder / "config.yaml")
    except (OSError, ValueError):
        return None
    finished = summary.get("status") == "finished" and summary.get("rounds", 0) >= config.rounds
    same = all(getattr(before, key) == getattr(config, key) for key in ("rounds", "until", "max_seconds"))
    return summary if finished or (summary.get("status") == "stopped" and same) else None


def _ended(summary: Mapping[str, Any], config: Config) -> str:
    if summary["status"] == "finished":
        return f"finished, {summary['rounds']} rounds: give rounds=N to go on"
    why = [f"{key}={getattr(config, key)}" for key in ("until", "max_seconds") if getattr(config, key) is not None]
    return f"stopped after {summary['rounds']} rounds by {' or '.join(why)}: give another to go on"


def changed(path: Path, overrides: list[str] | Mapping[str, Any] | None) -> Config:
    """Return the configuration of a run, or of several, with what is to be changed. Raises ConfigError."""
    if not path.exists():
        raise ConfigError(f"{path.parent}: no {path.name} there: give the folder of a run")
    if isinstance(overrides, Mapping):
        given = dict(overrides)
    else:
        given = {key: value for text in overrides or [] for key, value in override(text).items()}
    for key, value in given.items():
        if not any(key == may or key.startswith(f"{may}.") for may in MAY_CHANGE):
            raise ConfigError(
                f"{key}={show(value)}: a run goes on as it began: start a new one (with --warm-start, if from this model); what "
                f"may change: {', '.join(MAY_CHANGE)}"
            )
    return load(path, given)
