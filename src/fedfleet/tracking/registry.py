"""Every tracker by the name used in configurations: a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from fedfleet.simulator.errors import ConfigError
from fedfleet.tracking.base import Tracker, TrackerOptions
from fedfleet.tracking.csv import Csv, CsvOptions
from fedfleet.tracking.mlflow import Mlflow, MlflowOptions
from fedfleet.tracking.tensorboard import TensorBoard, TensorBoardOptions
from fedfleet.tracking.wandb import Wandb, WandbOptions


class Entry(NamedTuple):
    """What a name stands for: its options, the tracker, one line for ``fedfleet list``; what it needs, and what installs that."""

    options: type[TrackerOptions]
    build: Callable[[Any], Tracker]
    about: str
    needs: str | None = None
    install: str = ""


TRACKERS: dict[str, Entry] = {
    "csv": Entry(CsvOptions, Csv, "metrics.csv, a line a round"),
    "tensorboard": Entry(TensorBoardOptions, TensorBoard, "event files for TensorBoard", "tensorboard", "tensorboard"),
    "mlflow": Entry(MlflowOptions, Mlflow, "MLflow, a server or a local store", "mlflow", "'fedfleet[mlflow]'"),
    "wandb": Entry(WandbOptions, Wandb, "Weights & Biases, online or offline", "wandb", "'fedfleet[wandb]'"),
}


def check_installed(track: Iterable[Mapping[str, Any]]) -> None:
    """Refuse trackers whose packages are not there, before any work. Raises ConfigError."""
    for name in (given["name"] for given in track):
        entry = TRACKERS[name]
        if entry.needs is not None and not _installed(entry.needs):
            raise ConfigError(
                f"track={name}: {entry.needs} is not installed: pip install {entry.install}, or leave it out"
            )


def built(track: Iterable[Mapping[str, Any]]) -> list[tuple[str, Tracker]]:
    """Return the trackers of a checked configuration, by name."""
    found = []
    for given in track:
        entry = TRACKERS[given["name"]]
        found.append((given["name"], entry.build(entry.options(**{k: v for k, v in given.items() if k != "name"}))))
    return found


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a folder wandb/ in the working directory is no package
