"""Channel between the driver and an actor of its own machine: shared buffers for tensors, a line for all else.

A *line* is two pipes. A call by way of Ray takes a millisecond, and by the line a tenth of it. The actor opens both
pipes by way of ``/proc``. It serves the line within one call of Ray's, which ends as the actor does: so Ray alone tells
which actors died.
"""

from __future__ import annotations

import os
import struct
import time
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from fedfleet.simulator.arithmetic.spill import address
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.errors import FedfleetError, one_line, traced
from fedfleet.simulator.executors import shared_buffer
from fedfleet.simulator.executors.cluster import dumps, loads
from fedfleet.simulator.executors.shared_buffer import SharedBuffer

LINE_BYTES = 30_000  # of one call, with its head
PIPE_BYTES = 1 << 16  # for two calls, the most an actor has at hand, so that the driver never waits to write
FROZEN_S = 30.0  # how long an actor may be silent in the middle of an answer; about as long as Ray waits for a node
STOP = b""
HEAD = struct.Struct("!q")  # before each call: its number
ANSWER = struct.Struct("!qq")  # before each answer: the number of the call, and the bytes that follow


class Offer(NamedTuple):
    """Places of all of it for the actor: paths of two pipes, and (address, secret) of the shared buffers."""

    asks: str
    answers: str
    slabs: tuple[tuple[str, bytes], ...]


class LocalChannel:
    """The driver's side. Raises OSError where there are no pipes to be had, or only small ones.

    ``free`` are the shared buffers not in use; ``serving`` says whether the actor listens, or is to do so yet: after
    STOP it does not, but answers may still come. ``frozen_at`` is when to take it for frozen, while only a part of an
    answer has come; else None.
    """

    def __init__(self, slabs: list[SharedBuffer]):
        import fcntl  # which Windows has not

        self.free, self.serving = list(slabs), False
        self.frozen_at: float | None = None
        self._heard = bytearray()
        self._asked, self._asks = Pipe(duplex=False)
        self._answers, self._answered = Pipe(duplex=False)
        os.set_blocking(self._answers.fileno(), False)  # an actor may stop in the middle of an answer
        if (
            fcntl.fcntl(self._asks.fileno(), fcntl.F_GETPIPE_SZ) < PIPE_BYTES
        ):  # a user who has a thousand gets small ones
            raise OSError("pipes are too small")
        asks, answers = address(self._asked.fileno()), address(self._answered.fileno())
        self.offer = Offer(asks, answers, tuple((s.address, s.secret) for s in slabs))

    def taken(self) -> None:
        """Take note that the actor has opened its ends: ours would keep the line open after its death."""
        self._asked.close()
        self._answered.close()

    def call(self, order: int, of_all: bytes, task: Tree) -> bytes | None:
        """Return a call with a task, its tensors in the last free buffer; None where it is too long for the line."""
        result = HEAD.pack(order) + dumps((of_all, self.free[-1].pack(task), self.free[-1].address))
        return result if len(result) <= LINE_BYTES else None

    def send(self, call: bytes) -> None:
        """Send a call, or STOP. Where the actor is gone nothing happens: Ray will tell."""
        with suppress(OSError):
            self._asks.send_bytes(call)

    def hear(self) -> list[tuple[int, Future[Any]]]:
        """Take what has come, without waiting for more; return the answers that are whole now, each after the number of its call.

        Raises OSError or EOFError where the actor is gone, and all it has answered was heard.
        """
        came, gone = self._take()
        result = []
        while len(self._heard) >= ANSWER.size:
            order, size = ANSWER.unpack_from(self._heard)
            end = ANSWER.size + size
            if len(self._heard) < end:
                break
            result.append((order, _opened(bytes(self._heard[ANSWER.size : end]))))
            del self._heard[:end]
        if came:
            self.frozen_at = time.monotonic() + FROZEN_S if self._heard else None
        if gone and not result:
            raise EOFError
        return result

    def _take(self) -> tuple[bool, bool]:
        """Take what is in the pipe; return whether there was anything, and whether nothing will follow."""
        before = len(self._heard)
        with suppress(BlockingIOError):
            while came := os.read(self._answers.fileno(), PIPE_BYTES):
                self._heard += came
            return len(self._heard) > before, True
        return len(self._heard) > before, False

    def fileno(self) -> int:
        """Return what to wait for."""
        return self._answers.fileno()

    def close(self) -> None:
        """Hang up."""
        for end in (self._asked, self._asks, self._answers, self._answered):
            end.close()


def offered(slabs: int) -> LocalChannel | None:
    """Return a channel with so many buffers; None where the system has no such thing, as outside of Linux."""
    with suppress(OSError):
        result = shared_buffer.own(slabs)
        return LocalChannel(result) if result else None
    return None


class Line:
    """The actor's side."""

    def __init__(self, offer: Offer):
        self.slabs = {address: shared_buffer.joined(address) for address, _ in offer.slabs}
        if any(self.slabs[address].secret != secret for address, secret in offer.slabs):
            raise OSError("these are not the driver's slabs")
        self._asks = Connection(shared_buffer.opened(offer.asks, "pipe:", os.O_RDONLY), writable=False)
        self._answers = Connection(shared_buffer.opened(offer.answers, "pipe:", os.O_WRONLY), readable=False)

    def buffer(self, address: str) -> SharedBuffer:
        """Return a shared buffer of the driver's."""
        if address not in self.slabs:
            self.slabs[address] = shared_buffer.joined(address)
        return self.slabs[address]

    def listen(self) -> tuple[int, bytes] | None:
        """Return the next call, its number and the rest; None where the driver stops it, or is gone."""
        try:
            call = self._asks.recv_bytes()
        except EOFError:
            return None
        return None if call == STOP else (HEAD.unpack_from(call)[0], call[HEAD.size :])

    def answer(self, order: int, result: Any, error: Exception | None = None) -> None:
        """Send what has come of a call."""
        answer = dumps((result, None if error is None else _portable(error)))
        rest = memoryview(ANSWER.pack(order, len(answer)) + answer)
        while rest:
            rest = rest[os.write(self._answers.fileno(), rest) :]


def _opened(answer: bytes) -> Future[Any]:
    """Return what has come of a call: what an answer says, or why it cannot be read."""
    future: Future[Any] = Future()
    try:
        result, error = loads(answer)
    except Exception as e:
        result, error = None, e
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


def _portable(error: Exception) -> Exception:
    """Return an error that survives the journey, with the traceback of this process as a note."""
    trace = traced(error)
    try:
        result = loads(dumps(error))
    except Exception:
        result = FedfleetError(one_line(f"{type(error).__name__}: {error}"))
    result.add_note(f"On the worker:\n{trace}")
    return result
