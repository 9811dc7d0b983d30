"""Shared buffers: memory that two processes of one machine map, to hand tensors from one to the other.

Ray would take several milliseconds, with the call as well as through its object store. Here the tensors of a tree lie
in a shared buffer, and only where they lie goes with the call. A buffer is an anonymous file of the driver's, which its
workers open by way of ``/proc``. It has no name that could be left behind, and is gone with the last process that maps
it. Pages once written stay until then.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.spill import address
from fedfleet.simulator.arithmetic.tree import Tree

BUFFER_BYTES = 64 << 20  # room, not memory: a page is only taken once it is written
SECRET_BYTES = 16
NAME = "fedfleet"


@dataclass(frozen=True)
class Place:
    """Place of a tensor in a buffer: its first byte, shape, strides and type."""

    start: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor, whose memory is the buffer's."""
        count = self.shape.numel() * self.dtype.itemsize
        return memory[self.start : self.start + count].view(self.dtype).as_strided(self.shape, self.strides)


class SharedBuffer:
    """Memory that processes of one machine share; ``address`` is how they find it.

    One writes a tree, another reads it, and nobody writes again before that: whoever hands buffers out sees to it.
    """

    def __init__(self, descriptor: int, address: str):
        self.address = address
        self._memory = torch.frombuffer(mmap.mmap(descriptor, BUFFER_BYTES), dtype=torch.uint8)

    def pack(self, tree: Tree) -> Tree:
        """Write the tensors of a tree and return it with their places. Where there is no room, they stay as they are.

        One tensor in several places of the tree is still one, and strides are kept where no two elements share memory or leave a
        gap: both may decide how something is computed, hence about its last bits.
        """
        end = SECRET_BYTES
        places: dict[int, Place] = {}

        def put(leaf: object) -> object:
            nonlocal end
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in places:
                return places[id(leaf)]
            start = -(-end // T.ALIGNED) * T.ALIGNED
            if start + leaf.nbytes > BUFFER_BYTES:
                return leaf
            end = start + leaf.nbytes
            strides = leaf.stride() if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
            place = places[id(leaf)] = Place(start, leaf.shape, strides, leaf.dtype)
            place.of(self._memory).copy_(leaf.detach())
            return place

        return T.map(put, tree)

    def unpack(self, tree: Tree) -> Tree:
        """Return a tree with a copy of what was packed."""
        result: dict[int, Tensor] = {}

        def take(leaf: object) -> object:
            if not isinstance(leaf, Place):
                return leaf
            if id(leaf) not in result:
                result[id(leaf)] = leaf.of(self._memory).clone()
            return result[id(leaf)]

        return T.map(take, tree)

    @property
    def secret(self) -> bytes:
        """The first bytes, drawn by who made it: another file under the same address has others."""
        return bytes(self._memory[:SECRET_BYTES].tolist())


class OwnedBuffer(SharedBuffer):
    """A buffer of this process. Raises OSError or AttributeError where the system has no such thing."""

    def __init__(self) -> None:
        descriptor = os.memfd_create(NAME)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, BUFFER_BYTES)
        super().__init__(descriptor, address(descriptor))
        self._memory[:SECRET_BYTES] = torch.frombuffer(bytearray(os.urandom(SECRET_BYTES)), dtype=torch.uint8)


def opened(address: str, kind: str, flags: int) -> int:
    """Open a file of another process, whose name begins with ``kind``. Raises OSError where that is not what is there."""
    if not str(Path(address).readlink()).startswith(kind):  # as on another machine, or in another container
        raise OSError(f"{address} is no {kind}")
    return os.open(address, flags)


def own(count: int) -> list[SharedBuffer]:
    """Return so many buffers of this process; none where the system has no such thing, as outside of Linux."""
    with suppress(OSError, AttributeError):
        return [OwnedBuffer() for _ in range(count)]
    return []


def joined(address: str) -> SharedBuffer:
    """Return a buffer of another process. Raises OSError or ValueError where it cannot be had."""
    descriptor = opened(address, f"/memfd:{NAME}", os.O_RDWR)
    try:
        return SharedBuffer(descriptor, address)
    finally:
        os.close(descriptor)
