"""The run folder: configuration, environment, tables, model and summary, written atomically."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pandas as pd
import torch
from safetensors import SafetensorError

from fedfleet.config.reading import check_free
from fedfleet.config.trust import dumped
from fedfleet.experiments.checkpoint import Checkpoints
from fedfleet.experiments.tables import Tables, named
from fedfleet.files import parquet, tensors
from fedfleet.files.documents import json_lines, json_of
from fedfleet.files.summary import SUMMARY, write_summary
from fedfleet.files.writing import appending, opened, own_folder, write_text
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.system import lock
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.executors.fingerprint import packages
from fedfleet.simulator.signals import put_off

FLUSH_EVERY_S = 30.0
CHECKPOINTS, LOCK, BEST = "checkpoints", ".lock", "best.safetensors"
EVENTS, ENVIRONMENT = "events.jsonl", "environment.json"


def claim(folder: Path) -> Path:
    """Make a run folder and return it. Raises ConfigError where one is there already."""
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{folder}: cannot be made ({e.strerror}): choose another folder") from None
    return folder


@contextmanager
def claimed(folder: Path) -> Iterator[IO[str]]:
    """Make a run folder and have it alone from its first moment on; give its lock, and leave nothing where nothing came of it.

    Raises ConfigError where one is there already, or another process is about to begin one.
    """
    lock = locked(claim(folder))
    try:
        if any(path.name != LOCK for path in folder.iterdir()):  # of a run that began and ended since this one looked
            check_free(folder)
        yield lock
    finally:
        lock.close()
        if folder.is_dir() and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()


class RunFolder:
    """A run's files: tables and events as the run goes on, model and summary at the end. One process at a time has it.

    Files ``beside`` the configuration, their texts by name, are written with it; models say what is to be known ``about`` them.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        lock: IO[str] | None = None,
        beside: Mapping[str, str] | None = None,
        about: Mapping[str, str] | None = None,
    ):
        self.folder = folder
        self._about = about
        self.bit_exact = True
        self._environment = environment()
        self._summary: Mapping[str, Any] | None = None
        self._flushed = time.monotonic()
        self._best, self._best_before = folder / BEST, folder / CHECKPOINTS / BEST
        with put_off():  # or there were a folder with which nothing can be done
            self._lock = lock or locked(folder)
            self._told = self._environment_before()
            with self.writing():
                (folder / SUMMARY).unlink(missing_ok=True)  # it is not what it says any more
                own_folder(folder / CHECKPOINTS)
                write_text(folder / "config.yaml", dumped(config))
                for name, text in (beside or {}).items():
                    write_text(folder / name, text)
                if self._told is None:
                    write_text(folder / ENVIRONMENT, json.dumps(self._environment, indent=2))
        try:
            self.tables = Tables(folder, counted=config["evaluation"]["outcomes"] == "counted")
        except (OSError, ValueError) as e:
            raise FedfleetError(f"{folder}: its tables cannot be read ({one_line(e)}): start the run anew") from e
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, config["checkpoint"]["keep"])

    def _environment_before(self) -> dict[str, Any] | None:
        """Return the environment that the run began in, None where it begins. Raises ConfigError where it cannot be read."""
        try:
            return json_of(self.folder / ENVIRONMENT)
        except FileNotFoundError:
            return None
        except ConfigError as e:
            raise ConfigError(f"{e}: bring back the file of the run, or remove it") from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say where it is that nothing can be written. Raises FedfleetError, also where the folder was taken away.

        What is written into a new folder of that name would be a part of the run alone.
        """
        self._check_there()
        try:
            yield
        except (OSError, SafetensorError) as e:
            raise FedfleetError(
                f"{self.folder}: cannot be written ({one_line(getattr(e, 'strerror', None) or e)}): mend that, then go on with "
                f"`fedfleet resume {self.folder}` from the last checkpoint"
            ) from e

    def _check_there(self) -> None:
        """See that the folder is still the one that was locked."""
        try:
            there = os.path.samestat((self.folder / LOCK).stat(), os.fstat(self._lock.fileno()))
        except OSError:
            there = False
        if not there:
            raise FedfleetError(
                f"{self.folder}: it was removed, moved or replaced while the run was at work in it: start anew, in a folder "
                f"that is left alone"
            )

    def restore(self, rounds: int, account: Mapping[str, Any], *, every: int, evaluated: bool) -> None:
        """Go back to what was there after so many rounds, as a checkpoint's ``account`` says, of which the property is a part.

        Raises FedfleetError where the tables cannot be read.
        """
        try:
            before = {"counts": account.get("rows"), "participation": account.get("participation")}
            self.tables.restore(rounds, every=every, evaluated=evaluated, **before)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise FedfleetError(f"{self.folder}: its tables cannot be read ({one_line(e)}): start the run anew") from e
        self.bit_exact &= account.get("bit_exact", True)
        path = self.folder / EVENTS
        try:
            result = list(json_lines(path))
        except OSError as e:
            raise FedfleetError(
                f"{path}: cannot be read ({one_line(e)}): bring back the file of the run, or remove it"
            ) from e
        kept = [event for event in result if event is not None and _round(event) < rounds]
        with self.writing():
            if len(kept) < len(result):
                write_text(path, "".join(json.dumps(event) + "\n" for event in kept))
            self._count(kept)
            self.log([{"round": rounds, "event": "resumed"}])
            now, told = self._environment, self._told or self._environment
            changed = {k for was in (told, account.get("environment", told)) for k in differing(was, now)}
            if changed := sorted(changed):
                self.log([{"round": rounds, "event": "environment_changed", "of": changed, "bit_exact": False}])

    @property
    def account(self) -> dict[str, Any]:
        """What a checkpoint is to know of the folder, so that a file of it that is lost or changed is seen."""
        best = self._best.exists()
        rows = {"rows": self.tables.counts, "participation": self.tables.participation}
        return rows | {"bit_exact": self.bit_exact, "environment": self._environment, "best": best}

    def add(self, record: RoundRecord, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Add a round and its evaluation; return its row of ``rounds.parquet``."""
        with self.writing():
            for p in record.phases:
                self.log(
                    [{"round": record.index, "phase": p.phase, "attempt": p.attempt, **event} for event in p.events]
                )
            row = self.tables.add(record, metrics)
            if time.monotonic() - self._flushed > FLUSH_EVERY_S:
                self.tables.flush(beside=True)
                self._flushed = time.monotonic()
        return row

    def log(self, events: list[dict[str, Any]]) -> None:
        """Append to ``events.jsonl``. An event after which the bits may be others than on another machine says so."""
        self._count(events)
        if events:
            with appending(self.folder / EVENTS) as file:
                file.write("".join(json.dumps(event) + "\n" for event in events))
            self._seal()

    def _count(self, events: list[dict[str, Any]]) -> None:
        self.bit_exact &= all(event.get("bit_exact", True) for event in events)

    def keep_best(self, z: Tree, rounds: int, *, provisional: bool) -> None:
        """Write the best model so far; after a ``provisional`` one, which a longer run has not, ``restore_best`` goes back."""
        with self.writing():
            if provisional and self._best.exists():
                self._best.replace(self._best_before)
            self._save_model(self._best, z, rounds)

    def _save_model(self, path: Path, z: Tree, rounds: int) -> None:
        """Write a model after so many rounds, leaves named by their dotted paths."""
        tensors.write(path, dict(T.named_leaves(z)), {**(self._about or {}), "rounds": str(rounds)})

    def _without_later_best(self, rounds: int) -> None:
        """Remove the best model of a process that was killed in a later round than the run has."""
        try:
            later = int(tensors.about(self._best).get("rounds", 0)) > rounds
        except tensors.UNREADABLE:
            return
        if later:
            self._best.unlink()
            self.log([{"round": rounds, "event": "best_model_removed"}])

    def check_best(self, account: Mapping[str, Any]) -> None:
        """Refuse a best model that is not there any more, or is damaged. Raises ConfigError."""
        try:
            tensors.read(self._best)
        except tensors.UNREADABLE as e:
            if account.get("best") or not isinstance(e, FileNotFoundError):
                raise ConfigError(
                    f"{self._best}: cannot be read ({one_line(e)}): bring back the file that the run wrote, or go on "
                    f"without one: checkpoint.best=null"
                ) from None

    def restore_best(self) -> None:
        """Go back to the best model before the provisional one, if the last one was."""
        with self.writing():
            if self._best_before.exists():
                self._best_before.replace(self._best)

    def finish(self, z: Tree, rounds: int, summary: Mapping[str, Any]) -> None:
        """Write the tables, the model after so many rounds and the summary."""
        with self.writing():
            self.tables.finish()
            self._save_model(self.folder / "model.safetensors", z, rounds)
            self._without_later_best(rounds)
            self._summary = summary
            self._seal()

    def _seal(self) -> None:
        """Write the summary, once there is one, of the files as they are now."""
        if self._summary is not None:
            write_summary(self.folder, self._summary)

    def keep_images(self, images: torch.Tensor) -> None:
        """Write images (n, c, h, w) in [-1, 1] that the model generates."""
        with self.writing():
            pixels = ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            tensors.write(self.folder / "samples.safetensors", {"images": pixels})
        self._seal()

    def keep_classes(
        self,
        rounds: int,
        classes: Mapping[str, torch.Tensor],
        called: Sequence[str] = (),
        domains: Sequence[str] = (),
    ) -> None:
        """Write what the model after so many rounds says of the test examples of each class; names beside numbers, where known."""
        columns: dict[str, Any] = {"rounds": rounds, **{name: column.numpy() for name, column in classes.items()}}
        for column, names in (("domain", domains), ("label", called), ("predicted", called)):
            if column in classes and names:
                columns[f"{column}_name"] = named(classes[column].tolist(), names)
        frame = pd.DataFrame(columns)
        with self.writing():
            parquet.write(frame, self.folder / "classes.parquet")

    def keep_decision_boundary(self, decision_boundary: Mapping[str, torch.Tensor]) -> None:
        """Write points, and what the model says of the plane around them."""
        with self.writing():
            tensors.write(self.folder / "decision_boundary.safetensors", decision_boundary)
        self._seal()

    def close(self) -> None:
        """Let another process have it."""
        self._lock.close()


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the keys at which two mappings differ."""
    return {k for k in was.keys() | now.keys() if was.get(k) != now.get(k)}


def _round(event: Mapping[str, Any]) -> float:
    """Return the round of an event; of one that does not say, that it is of none to come."""
    result = event.get("round")
    return result if isinstance(result, int) else -1


def locked(folder: Path) -> IO[str]:
    """Lock a run folder for as long as the process lives. Raises ConfigError where another one has it."""
    try:
        file = opened(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "a")
    except OSError as e:
        raise ConfigError(
            f"{folder}: cannot be written ({LOCK}: {e.strerror}): give a folder you may write to"
        ) from None
    try:
        lock(file)
    except OSError:
        file.close()
        raise ConfigError(f"{folder}: another process is at work in it: wait for it, or stop it") from None
    return file


def environment() -> dict[str, Any]:
    """Return what the numbers may depend on: versions and machine."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": packages("torchmetrics"),
    }
