"""Interruptions that wait until what must not be torn apart is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def put_off(*, insist: bool = False) -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect after the block. Only the main thread is ever interrupted.

    With ``insist`` the second of them takes effect at once, for a block that may never end and may be torn apart.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        if not (insist and came):
            came.append(number)
            return
        came.clear()
        _deliver(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, take) for number in INTERRUPTIONS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            _deliver(number, before[signal.Signals(number)])


def _deliver(number: int, handler: Any) -> None:
    if callable(handler):  # where the signal is masked, as in a Ray worker, raising it would not reach it
        handler(number, None)
    else:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.raise_signal(number)
