"""Tensors in a file instead of in memory, written by any process of this machine and read a part at a time.

A *spill file* has no name: nothing is left behind, however its owner ends. Other processes of the machine open it by
way of ``/proc`` and write to it themselves, so that what they have made never passes through the owner's memory. It is
written and read, never mapped, since what is mapped counts as memory.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.system import read_at, write_at
from fedfleet.simulator.arithmetic.tree import Tree

SPILLED_BYTES = 1 << 20
"""A tree of so many bytes goes to the file; a smaller one is not worth the calls."""
SECRET_BYTES = 16


def nameless() -> BinaryIO:
    """Return a new file that is gone when it is closed, in the folder that the environment names for such, ``TMPDIR``."""
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="fedfleet-", buffering=0))


def address(descriptor: int) -> str:
    """Return where other processes find an open file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


class SpillFile:
    """A file of this process, or, where a message has brought it to another one, what finds that file.

    ``least`` is how many bytes a tree has at the least that goes there; ``address`` is where other processes find it.
    """

    def __init__(self, least: int = SPILLED_BYTES):
        self.least, self._secret = least, os.urandom(SECRET_BYTES)
        self._file: BinaryIO | None = nameless()
        write_at(self._file.fileno(), self._secret, 0)
        self.address = address(self._file.fileno())
        _OWN[self._secret] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as an address; the process that made the file finds itself again."""
        return _spill, (self.address, self._secret, self.least)

    def keep(self, tree: Tree) -> Tree:
        """Write the tensors of a tree, if they are large, and return it with ``Spilled`` in their places.

        What was written before stays, and so does everything where the file cannot be reached, as from another machine. Raises
        OSError where the disk is full.
        """
        size = sum(leaf.nbytes for leaf in T.leaves(tree) if isinstance(leaf, Tensor))
        if not size or size < self.least:
            return tree
        with self._opened() as descriptor:
            return tree if descriptor is None else self._written(tree, descriptor, _reserved(descriptor, size))

    def _written(self, tree: Tree, descriptor: int, start: int) -> Tree:
        def put(leaf: Any) -> Any:
            nonlocal start
            if not isinstance(leaf, Tensor):
                return leaf
            place, start = start, start + leaf.nbytes
            write_at(descriptor, _bytes(leaf.detach()), place)
            return Spilled(self, place, leaf.shape, leaf.dtype)

        return T.map(put, tree)

    def read(self, into: Tensor, starts: Sequence[int]) -> None:
        """Fill a contiguous tensor with what stands in the file, as many equal parts as there are first bytes. Raises OSError."""
        view = _bytes(into)
        size = len(view) // len(starts)
        with self._opened() as descriptor:
            for i, start in enumerate(starts):
                part = view[i * size : (i + 1) * size]
                while len(part):
                    done = 0 if descriptor is None else os.preadv(descriptor, [part], start)
                    if not done:
                        raise OSError(f"{self.address}: no {len(part)} bytes from {start} on")
                    part, start = part[done:], start + done

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Give the open file; None where it cannot be reached."""
        if self._file is not None:
            yield self._file.fileno()
            return
        descriptor = None
        with suppress(OSError):
            descriptor = _found(self.address, self._secret)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)


_OWN: WeakValueDictionary[bytes, SpillFile] = WeakValueDictionary()
"""The spools of this process, by secret."""


def _spill(where: str, secret: bytes, least: int) -> SpillFile:
    if secret in _OWN:
        return _OWN[secret]
    result = SpillFile.__new__(SpillFile)
    result.least, result._secret, result._file, result.address = least, secret, None, where
    return result


def _found(where: str, secret: bytes) -> int | None:
    """Open another process's file; None where something else is there, as on another machine. Raises OSError."""
    if not stat.S_ISREG(Path(where).stat().st_mode):
        return None
    descriptor = os.open(where, os.O_RDWR)
    if read_at(descriptor, SECRET_BYTES, 0) == secret:
        return descriptor
    os.close(descriptor)
    return None


def _reserved(descriptor: int, size: int) -> int:
    """Make the file so much longer, and return where that begins. One process at a time does; to write, none waits for another."""
    import fcntl  # which Windows has not

    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        end = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, end + size)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return end


@dataclass(frozen=True)
class Spilled:
    """A tensor that lies in a spill file: its first byte, shape and type."""

    spill: SpillFile
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, into: Tensor, first: int) -> None:
        """Fill ``into`` (rows, n), which is contiguous, with the numbers of each row from ``first`` on."""
        row, size = self.shape[1:].numel(), self.dtype.itemsize
        self.spill.read(into, [self.start + (i * row + first) * size for i in range(len(into))])

    def tensor(self) -> Tensor:
        """Return the tensor, in memory."""
        result = torch.empty(self.shape, dtype=self.dtype)
        self.spill.read(result, [self.start])
        return result


def whole(leaf: Tensor | Spilled) -> Tensor:
    """Return a leaf as a tensor in memory."""
    return leaf.tensor() if isinstance(leaf, Spilled) else leaf
