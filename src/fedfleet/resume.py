"""Go on with a run that was interrupted, or that is to be longer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfleet.checkpoint import newest
from fedfleet.config import Config, load
from fedfleet.experiment import Experiment
from fedfleet.progress import Progress
from fedfleet.reading import override, show
from fedfleet.runfolder import CHECKPOINTS, SUMMARY
from fedfleet.runner import Run
from fedfleet.simulator.errors import ConfigError

MAY_CHANGE = (
    *("rounds", "until", "max_seconds", "label", "checkpoint"),
    *(f"executor.{key}" for key in ("kind", "actors", "cpus_per_actor", "gpus_per_actor", "address")),
    "population.data_dir",
)
"""Keys, or sections, that may be another when a run goes on: none of them decides what a round computes."""


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
    config = _config(folder, overrides)
    if (done := at_its_end(folder, config)) is not None:
        progress.say(f"{folder}: {_ended(done, config)}")
        return Run(folder, done)
    warm_start, config = config.warm_start, config.model_copy(update={"warm_start": None})
    experiment = Experiment(config, **own)
    experiment.config = experiment.config.model_copy(
        update={"warm_start": warm_start}
    )  # for the record: it has started
    return experiment.resume(folder, progress)


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


def _config(folder: Path, overrides: list[str] | Mapping[str, Any] | None) -> Config:
    """Return the configuration of a run with what is to be changed. Raises ConfigError."""
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder}: no config.yaml there: give the folder of a run")
    given = (
        overrides if isinstance(overrides, Mapping) else {k: v for o in overrides or [] for k, v in override(o).items()}
    )
    for key, value in given.items():
        if not any(key == may or key.startswith(f"{may}.") for may in MAY_CHANGE):
            raise ConfigError(
                f"{key}={show(value)}: a run goes on as it began: start a new one (with --warm-start, if from this model); what "
                f"may change: {', '.join(MAY_CHANGE)}"
            )
    config = load(path, given)
    found, _ = newest(folder / CHECKPOINTS)
    if found is not None and config.rounds < found.rounds:
        raise ConfigError(f"rounds={config.rounds}: the run has done {found.rounds} already: give more")
    return config
