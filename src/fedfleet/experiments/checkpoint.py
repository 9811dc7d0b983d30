"""Checkpoints: everything a run goes on from, one safetensors file each, whole or not there at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedfleet.files.writing import SCRATCH, check_regular, own_copy, own_folder, whole
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.driver.codec import CodecError, decode, encode
from fedfleet.simulator.driver.memory import Remembered
from fedfleet.simulator.driver.simulate import Position
from fedfleet.simulator.driver.state import Slots
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line

FORMAT = "fedfleet checkpoint 4"
STATES = "states.bin"


class Damaged(FedfleetError):
    """A checkpoint that is not what was written."""


class Checkpoint(NamedTuple):
    """A position between two rounds (see ``Position``), and what the run says of itself, as plain data."""

    rounds: int
    clock_s: float
    state: Any
    remembered: Remembered
    account: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, the newest ``keep`` of them, and the file of client states that they refer to."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self._keep = folder, keep
        for scratch in folder.glob(f"*{SCRATCH}"):  # of a process that was killed
            scratch.unlink()
        own_copy(self.states)
        self._kept: dict[Path, Slots] = {}

    @property
    def states(self) -> Path:
        """The file of client states."""
        return self.folder / STATES

    def write(self, at: Position, account: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are too many; return its path."""
        own_folder(self.folder)
        remembered = at.memory.remembered()
        result = Checkpoint(at.index, at.clock_s, at.state, remembered, dict(account))
        path = self.folder / f"round-{at.index:08}.safetensors"
        save(path, result)
        self._kept[path] = remembered.states
        self._settle(at)
        return path

    def restore(self, result: Checkpoint, at: Position) -> None:
        """Bring a position to a checkpoint; newer checkpoints are removed. Raises StateError."""
        at.memory.restore(result.remembered)
        at.index, at.clock_s, at.state = result.rounds, result.clock_s, result.state
        for path in _newest_first(self.folder):
            try:
                one = load(path)
            except Damaged:
                path.unlink()
                continue
            if one.rounds > result.rounds:
                path.unlink()
            else:
                self._kept[path] = one.remembered.states
        self._settle(at)

    def _settle(self, at: Position) -> None:
        for path in sorted(self._kept, reverse=True)[self._keep :]:
            path.unlink(missing_ok=True)
            del self._kept[path]
        at.memory.store.keep(self._kept.values())


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, None if there is none, and what is wrong with newer ones."""
    faults = []
    for path in _newest_first(folder):
        try:
            return load(path), faults
        except Damaged as e:
            faults.append(str(e))
    return None, faults


def save(path: Path, result: Checkpoint) -> None:
    """Write a checkpoint: its tensors, and as metadata its other parts in JSON and a digest of everything."""
    plain, tensors = encode(tuple(result))
    body = json.dumps(plain)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "body": body, "sha256": digest(body, tensors)}
    with whole(path) as scratch:
        save_file(tensors, scratch, metadata)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises Damaged."""
    try:
        check_regular(path.stat())
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = T.as_new({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as e:
        raise Damaged(f"{path}: not a readable checkpoint ({one_line(e)})") from None
    if metadata.get("format") != FORMAT:
        raise Damaged(f"{path}: not a checkpoint of this version (format {metadata.get('format')!r})")
    if metadata.get("sha256") != digest(metadata.get("body", ""), tensors):
        raise Damaged(f"{path}: damaged: its digest is not that of its contents")
    try:
        rounds, clock_s, state, remembered, account = decode(json.loads(metadata["body"]), tensors)
    except CodecError as e:
        raise ConfigError(f"{path}: {e}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise Damaged(f"{path}: not what a checkpoint holds ({type(e).__name__})") from None
    return Checkpoint(rounds, clock_s, state, remembered, account)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"), reverse=True)
