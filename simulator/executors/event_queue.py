"""A queue of events: one thread learns of what Ray brings while it waits for other things too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from threading import Lock
from typing import Any


class EventQueue:
    """Functions to be called once something has come, on the thread that answers; it can be waited for like a connection."""

    def __init__(self) -> None:
        self._answers, self._rings = Pipe(duplex=False)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = Lock()

    def when(self, reference: Any, call: Callable[[Future[Any]], None]) -> None:
        """Have ``call`` called with what comes of a reference of Ray's, a result or an error."""
        reference.future().add_done_callback(lambda future: self.ring(partial(call, future)))

    def ring(self, call: Callable[[], None]) -> None:
        """Have ``call`` called; from any thread."""
        self._calls.put(call)
        with self._closing:
            if not self._rings.closed:
                self._rings.send_bytes(b"")

    def answer(self) -> None:
        """Call what has waited longest; wait until there is something."""
        self._answers.recv_bytes()
        self._calls.get()()

    def fileno(self) -> int:
        """Return what to wait for."""
        return self._answers.fileno()

    def close(self) -> None:
        """Answer no more."""
        with self._closing:
            self._answers.close()
            self._rings.close()
