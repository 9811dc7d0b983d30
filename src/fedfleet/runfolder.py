"""The run folder: configuration, environment, tables, model and summary, written atomically."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedfleet.simulator import tree as T
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.responses import Fate
from fedfleet.simulator.simulate import RoundRecord
from fedfleet.simulator.tree import Tree

COUNTS = (
    *("invited", "heard", "late", "failed", "offline", "stale", "merged_stale", "client_steps"),
    *("floats_up", "floats_down", "bytes_up", "bytes_down"),
)
WHOLE = dict.fromkeys(COUNTS, "int64")
FATES = np.array([f.name.lower() for f in sorted(Fate)])
FLUSH_EVERY_S = 30.0


def check_free(folder: Path) -> None:
    """Refuse a run folder that is taken or cannot be made. Raises ConfigError; makes nothing."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--out {folder}: it exists and is not empty: choose another folder, or remove it first")
        above = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {folder}: {above} is not a folder you may write to: choose another folder")
    except (OSError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"--out {folder}: cannot be used ({one_line(e)}): choose another folder") from None


def claim(folder: Path) -> Path:
    """Make a run folder and return it. Raises ConfigError where one is there already."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {folder}: cannot be made ({e.strerror}): choose another folder") from None
    return folder


class RunFolder:
    """Collects rows and writes them: every half minute, and at the end.

    ``metrics`` are the columns ``eval/<metric>``; set them before the first round.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.folder = folder
        self.metrics: tuple[str, ...] = ()
        self.events = 0
        self._rounds: list[dict[str, Any]] = []
        self._phases: list[dict[str, Any]] = []
        self._fates: list[pd.DataFrame] = []
        self._clients: list[pd.DataFrame] = []
        self._flushed = time.monotonic()
        _write_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        _write_text(folder / "environment.json", json.dumps(environment(), indent=2))

    def add(self, record: RoundRecord, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Add a round and its evaluation; return its row of ``rounds.parquet``."""
        phases = []
        for p in record.phases:
            self.log([{"round": record.index, "phase": p.phase, "attempt": p.attempt, **event} for event in p.events])
            row = {"round": record.index, "phase": p.phase, "attempt": p.attempt}
            row |= {k: p.counts[k] for k in COUNTS} | {"virtual_s": p.responses.duration_s, "train_loss": p.train_loss}
            phases.append(row)
            fate = p.responses.fate.numpy()
            self._fates.append(
                pd.DataFrame(
                    {
                        "round": record.index,
                        "phase": p.phase,
                        "attempt": p.attempt,
                        "client": p.clients.numpy(),
                        "fate": FATES[fate],
                        "virtual_s": p.started_s + p.responses.seconds.numpy(),
                    }
                )
            )
        losses = [p["train_loss"] for p in phases if p["train_loss"] is not None]
        row = {"round": record.index, "seconds": record.seconds}
        row |= {k: sum(p[k] for p in phases) for k in COUNTS}
        row |= {"virtual_s": record.virtual_s - record.started_s, "train_loss": losses[-1] if losses else None}
        row |= {f"algorithm/{k}": v for k, v in record.metrics.items()} | {k: metrics.get(k) for k in self.metrics}
        self._rounds.append(row)
        self._phases += phases
        if time.monotonic() - self._flushed > FLUSH_EVERY_S:
            self.flush()
        return row

    def log(self, events: list[dict[str, Any]]) -> None:
        """Append to ``events.jsonl``. What happens to workers changes no bit, and other events say so where they do not."""
        exact = (event["event"].startswith("worker_") or event.get("bit_exact", False) for event in events)
        self.events += sum(not e for e in exact)
        if events:
            with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(event) + "\n" for event in events)

    def add_clients(self, index: int, clients: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> None:
        """Add the clients' own metrics after round ``index``."""
        columns = {k: v.numpy() for k, v in metrics.items()}
        self._clients.append(pd.DataFrame({"round": index, "client": clients.numpy(), **columns}))

    def rounds(self) -> pd.DataFrame:
        """Return ``rounds.parquet`` so far."""
        extra = sorted({k for row in self._rounds for k in row if k.startswith("algorithm/")})
        floats = ("virtual_s", "train_loss", *extra, *self.metrics)
        return _frame(self._rounds, {"round": "int64", "seconds": "float64"} | WHOLE | dict.fromkeys(floats, "float64"))

    def flush(self) -> None:
        """Write the tables."""
        self._flushed = time.monotonic()
        self._table("rounds", self.rounds())
        place = {"round": "int64", "phase": "str", "attempt": "int64"}
        floats = {"virtual_s": "float64", "train_loss": "float64"}
        self._table("phases", _frame(self._phases, place | WHOLE | floats))
        empty = _frame([], place | {"client": "int64", "fate": "str", "virtual_s": "float64"})
        self._fates = [pd.concat(self._fates, ignore_index=True) if self._fates else empty]
        self._table("fates", self._fates[0])
        if self._clients:
            self._table("clients", pd.concat(self._clients, ignore_index=True))

    def _table(self, name: str, frame: pd.DataFrame) -> None:
        path = self.folder / f"{name}.parquet"
        frame.to_parquet(path.with_suffix(".tmp"), index=False)
        path.with_suffix(".tmp").replace(path)

    def finish(self, z: Tree, summary: Mapping[str, Any]) -> None:
        """Write the tables, the model and the summary."""
        self.flush()
        save_model(self.folder / "model.safetensors", z)
        _write_text(self.folder / "summary.json", json.dumps(_finite(dict(summary)), indent=2))


def save_model(path: Path, z: Tree) -> None:
    """Write a tree as safetensors, leaves named by their dotted paths."""
    save_file({name: leaf.contiguous().clone() for name, leaf in T.named_leaves(z)}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_model(path: Path, like: Tree) -> Tree:
    """Read a tree of the structure of ``like``. Raises ConfigError naming the file and what does not fit."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as e:
        raise ConfigError(
            f"warm_start={path}: not a readable safetensors file ({one_line(e)}): give a model.safetensors of an earlier run"
        ) from None
    wanted = dict(T.named_leaves(like))
    wrong = [n for n in wanted if n not in found or found[n].shape != wanted[n].shape] + [
        n for n in found if n not in wanted
    ]
    if wrong:
        raise ConfigError(
            f"warm_start={path}: it does not fit this task's model at {wrong[0]!r}: use the same task and model"
        )
    return T.unflatten(like, [found[n].to(leaf.dtype) for n, leaf in wanted.items()])


def environment() -> dict[str, Any]:
    """Return what the numbers may depend on: versions and machine."""
    packages = {}
    for name in (
        "fedfleet",
        "ray",
        "torch",
        "torchvision",
        "numpy",
        "pandas",
        "pyarrow",
        "safetensors",
        "scikit-learn",
    ):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": packages,
    }


def _frame(rows: list[dict[str, Any]], types: Mapping[str, str]) -> pd.DataFrame:
    """Return a table of these columns, with their types even where there is no row or no value."""
    return pd.DataFrame(rows, columns=list(types)).astype(dict(types))


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for, NaN and infinities, by None."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_text(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    path.with_suffix(".tmp").replace(path)
