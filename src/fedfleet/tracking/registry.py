"""Every tracker by the name used in configurations: a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.registry import Entry, Registry
from fedfleet.tracking.base import Tracker
from fedfleet.tracking.csv import Csv, CsvOptions
from fedfleet.tracking.mlflow import Mlflow, MlflowOptions
from fedfleet.tracking.tensorboard import TensorBoard, TensorBoardOptions
from fedfleet.tracking.wandb import Wandb, WandbOptions

ROWS: dict[str, Entry[Callable[[Any], Tracker]]] = {
    "csv": Entry(CsvOptions, Csv, "metrics.csv, a line a round"),
    "tensorboard": Entry(TensorBoardOptions, TensorBoard, "event files for TensorBoard"),
    "mlflow": Entry(MlflowOptions, Mlflow, "MLflow, a server or a local store"),
    "wandb": Entry(WandbOptions, Wandb, "Weights & Biases, online or offline"),
}
TRACKERS = Registry("tracker", ROWS, key="name")
NEEDED = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "'fedfleet[mlflow]'"),
    "wandb": ("wandb", "'fedfleet[wandb]'"),
}
"""Packages that trackers need, and what installs them."""


def check_installed(track: Iterable[Any]) -> None:
    """Refuse trackers whose packages are not there, before any work. Raises ConfigError."""
    for name in (given.name for given in track if given.name in NEEDED):
        needs, install = NEEDED[name]
        if not _installed(needs):
            raise ConfigError(f"track={name}: {needs} is not installed: pip install {install}, or leave it out")


def _installed(package: str) -> bool:
    result = find_spec(package)
    return result is not None and result.origin is not None  # a folder wandb/ in the working directory is no package
