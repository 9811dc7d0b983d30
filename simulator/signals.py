"""Interruptions that wait until what must not be torn apart is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def put_off() -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect after the block. Only the main thread is ever interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in INTERRUPTIONS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            handler = before[signal.Signals(number)]
            if callable(handler):  # where the signal is masked, as in a Ray worker, raising it would not reach it
                handler(number, None)
            else:
                signal.raise_signal(number)
