"""What the driver shares with an actor of its own machine: slabs for tensors, and a line, two pipes, for all else.

A call by way of Ray takes a millisecond, by the line a tenth of it. The actor opens both by way of ``/proc``, and serves the
line within one call of Ray's, which ends as the actor does: what dies is told by Ray alone.
"""

from __future__ import annotations

import os
import struct
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.errors import FedfleetError, one_line, traced
from fedfleet.simulator.executors import slab
from fedfleet.simulator.executors.cluster import dumps, loads
from fedfleet.simulator.executors.slab import Slab

LINE_BYTES = 30_000  # of one call, with its head
PIPE_BYTES = 1 << 16  # for two calls, the most an actor has at hand, so that the driver never waits to write
STOP = b""
HEAD = struct.Struct("!q")  # before each call and each answer: the number of the call


class Offer(NamedTuple):
    """Where the actor finds all of it: paths of two pipes, and (address, secret) of the slabs."""

    asks: str
    answers: str
    slabs: tuple[tuple[str, bytes], ...]


class Near:
    """The driver's side. Raises OSError where there are no pipes to be had, or only small ones.

    ``free`` are the slabs not in use; ``serving`` says whether the actor listens, or is to do so yet: after STOP it does not, but
    answers may still come.
    """

    def __init__(self, slabs: list[Slab]):
        import fcntl  # which Windows has not

        self.free, self.serving = list(slabs), False
        self._asked, self._asks = Pipe(duplex=False)
        self._answers, self._answered = Pipe(duplex=False)
        if (
            fcntl.fcntl(self._asks.fileno(), fcntl.F_GETPIPE_SZ) < PIPE_BYTES
        ):  # a user who has a thousand gets small ones
            raise OSError("pipes are too small")
        asks, answers = slab.address(self._asked.fileno()), slab.address(self._answered.fileno())
        self.offer = Offer(asks, answers, tuple((s.address, s.secret) for s in slabs))

    def taken(self) -> None:
        """Take note that the actor has opened its ends: ours would keep the line open after its death."""
        self._asked.close()
        self._answered.close()

    def call(self, order: int, of_all: bytes, task: Tree) -> bytes | None:
        """Return a call with a task, whose tensors are written to the last free slab; None where it is too long for the line."""
        found = HEAD.pack(order) + dumps((of_all, self.free[-1].pack(task), self.free[-1].address))
        return found if len(found) <= LINE_BYTES else None

    def send(self, call: bytes) -> None:
        """Send a call, or STOP. Where the actor is gone nothing happens: Ray will tell."""
        with suppress(OSError):
            self._asks.send_bytes(call)

    def answer(self) -> tuple[int, Future[Any]]:
        """Return the answer that has come, and which call it belongs to. Raises OSError or EOFError where the actor is gone."""
        answer = self._answers.recv_bytes()
        future: Future[Any] = Future()
        try:
            found, error = loads(answer[HEAD.size :])
        except Exception as e:
            found, error = None, e
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)
        return HEAD.unpack_from(answer)[0], future

    @property
    def answered(self) -> bool:
        """Whether an answer has come, or the end of the line."""
        return self._answers.poll()

    def fileno(self) -> int:
        """Return what to wait for."""
        return self._answers.fileno()

    def close(self) -> None:
        """Hang up."""
        for end in (self._asked, self._asks, self._answers, self._answered):
            end.close()


def offered(slabs: int) -> Near | None:
    """Return a line and so many slabs; None where the system has no such thing, as outside of Linux."""
    with suppress(OSError):
        found = slab.own(slabs)
        return Near(found) if found else None
    return None


class Line:
    """The actor's side."""

    def __init__(self, offer: Offer):
        self.slabs = {address: slab.joined(address) for address, _ in offer.slabs}
        if any(self.slabs[address].secret != secret for address, secret in offer.slabs):
            raise OSError("these are not the driver's slabs")
        self._asks = Connection(slab.opened(offer.asks, "pipe:", os.O_RDONLY), writable=False)
        self._answers = Connection(slab.opened(offer.answers, "pipe:", os.O_WRONLY), readable=False)

    def slab(self, address: str) -> Slab:
        """Return a slab of the driver's."""
        if address not in self.slabs:
            self.slabs[address] = slab.joined(address)
        return self.slabs[address]

    def listen(self) -> tuple[int, bytes] | None:
        """Return the next call, its number and the rest; None where the driver stops it, or is gone."""
        try:
            call = self._asks.recv_bytes()
        except EOFError:
            return None
        return None if call == STOP else (HEAD.unpack_from(call)[0], call[HEAD.size :])

    def answer(self, order: int, found: Any, error: Exception | None = None) -> None:
        """Send what has come of a call."""
        self._answers.send_bytes(HEAD.pack(order) + dumps((found, None if error is None else _portable(error))))


def _portable(error: Exception) -> Exception:
    """Return an error that survives the journey, with the traceback of this process as a note."""
    trace = traced(error)
    try:
        found = loads(dumps(error))
    except Exception:
        found = FedfleetError(one_line(f"{type(error).__name__}: {error}"))
    found.add_note(f"On the worker:\n{trace}")
    return found
