"""Client states between rounds, keyed by client, in a file, so that memory does not grow with the clients seen.

The file has slots of one state each. A state that changes goes to a free slot, and the slot it leaves is free once no
checkpoint needs it. So a checkpoint is the list of its slots, and nothing it refers to is written over while it is
kept. A commit that fails half way, on a full disk, changes nothing.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.spill import nameless
from fedfleet.simulator.arithmetic.system import NO_LINK, read_at, write_at
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.errors import FedfleetError


class StateError(FedfleetError):
    """The file of client states does not hold what was written to it."""


class Slots(NamedTuple):
    """Where states are: clients (M,) int64, their slots (M,) int64, checksums (M,) int64, and a tree of one state's shape."""

    clients: Tensor
    slots: Tensor
    checksums: Tensor
    like: Tree


class ClientStore:
    """Client states, made the first time a client is heard; writes of a round are staged and committed together.

    ``path`` is the file, made anew unless it is there; without one a temporary file is used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._like: Tree = None
        self._at: dict[int, tuple[int, int]] = {}  # client -> slot, checksum
        self._staged: dict[int, Tensor] = {}  # client -> (bytes a state,) uint8
        self._kept: set[int] = set()  # slots of checkpoints
        self._free: list[int] = []
        self._size = 0  # slots in the file

    def get(self, clients: Tensor, fresh: Callable[[], Tree]) -> Tree:
        """Return the states of clients (C,), stacked; staged writes of this round are visible. Raises StateError."""
        made: Tensor | None = None
        rows: list[Tensor] = []
        for c in clients.tolist():
            if c in self._staged:
                rows.append(self._staged[c])
            elif c in self._at:
                rows.append(self._read(c))
            else:
                if made is None:
                    first = fresh()
                    self._like = first if self._like is None else self._like
                    made = _rows(T.map(lambda leaf: leaf[None], first))[0]
                rows.append(made)
        return _states(torch.stack(rows), self._like)

    def stage(self, clients: Tensor, states: Tree) -> None:
        """Stage the stacked states of clients (C,)."""
        if self._like is None:
            self._like = T.index(states, 0)
        self._staged |= zip(clients.tolist(), _rows(states), strict=True)

    def commit(self) -> None:
        """Accept the round."""
        placed: dict[int, tuple[int, int]] = {}
        for client, row in self._staged.items():
            slot = self._free.pop() if self._free else self._size
            self._size = max(self._size, slot + 1)
            data = row.numpy().data
            write_at(self._opened().fileno(), data, slot * len(data))
            placed[client] = slot, zlib.crc32(data)
        left = (self._at[client][0] for client in placed if client in self._at)
        self._free += [slot for slot in left if slot not in self._kept]
        self._at |= placed
        self._staged = {}

    def discard(self) -> None:
        """Forget the round."""
        self._staged = {}

    def slots(self) -> Slots:
        """Return where the committed states are, all of them on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        clients = torch.tensor(list(self._at), dtype=torch.int64)
        where = torch.tensor(list(self._at.values()), dtype=torch.int64).reshape(-1, 2)
        return Slots(clients, where[:, 0].clone(), where[:, 1].clone(), self._like)

    def restore(self, slots: Slots) -> None:
        """Go back to the states of a checkpoint. Raises StateError where the file is too short for them."""
        rows = zip(slots.slots.tolist(), slots.checksums.tolist(), strict=True)
        self._at = dict(zip(slots.clients.tolist(), rows, strict=True))
        self._like, self._staged, self._free = slots.like, {}, []
        if not self._at:
            self._size = 0
            return
        try:
            result = os.fstat(self._opened().fileno()).st_size // self._width()
        except OSError as e:
            raise StateError(
                f"{self._path}: cannot be opened ({e.strerror or e}): bring back the file of the run"
            ) from None
        self._size = max(result, int(slots.slots.max()) + 1)
        if self._size > result:
            raise StateError(f"{self._path}: cut short: {result} states, and the checkpoint needs {self._size}")

    def keep(self, checkpoints: Iterable[Slots]) -> None:
        """Write over no slot that these checkpoints need; all others not in use may be written again."""
        self._kept = {slot for c in checkpoints for slot in c.slots.tolist()}
        taken = self._kept.union(slot for slot, _ in self._at.values())
        self._free = [slot for slot in range(self._size - 1, -1, -1) if slot not in taken]

    def __len__(self) -> int:
        return len(self._at)

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            file.close()

    def _width(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in T.leaves(self._like))

    def _opened(self) -> BinaryIO:
        if self._file is None:
            if self._path is None:
                self._file = nameless()
            else:
                there = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
                self._file = os.fdopen(there, "r+b", buffering=0)
        return self._file

    def _read(self, client: int) -> Tensor:
        slot, checksum = self._at[client]
        width = self._width()
        data = read_at(self._opened().fileno(), width, slot * width)
        if zlib.crc32(data) != checksum:
            raise StateError(
                f"{self._path}: the state of client {client} is damaged: resume from an earlier copy of the run"
            )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _rows(states: Tree) -> Tensor:
    """Return stacked states (C, ...) as bytes (C, bytes a state)."""
    leaves = T.leaves(states)
    return torch.cat([leaf.detach().cpu().reshape(len(leaf), -1).contiguous().view(torch.uint8) for leaf in leaves], 1)


def _states(rows: Tensor, like: Tree) -> Tree:
    """Return bytes (C, bytes a state) as stacked states."""
    leaves, start = [], 0
    for leaf in T.leaves(like):
        size = leaf.numel() * leaf.element_size()
        part = rows[:, start : start + size].clone(memory_format=torch.contiguous_format)  # numbers begin anywhere
        leaves.append(part.view(leaf.dtype).reshape(len(rows), *leaf.shape))
        start += size
    return T.unflatten(like, leaves)
