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
    before: dict[int, Any] = {n: h for n in INTERRUPTIONS if callable(h := signal.getsignal(n)) or h is signal.SIG_DFL}
    came: list[int] = []
    over = False

    def take(number: int, frame: FrameType | None) -> None:
        if over:  # an interruption came while handlers were put back, and this one was left
            _deliver(number, before[number])
        elif insist and came:
            came.clear()
            _deliver(number, before[number])
        else:
            came.append(number)

    try:
        for number in before:
            signal.signal(number, take)
        yield
    finally:
        over = True
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            _deliver(number, before[number])


def _deliver(number: int, handler: Any) -> None:
    if callable(handler):  # where the signal is masked, as in a Ray worker, raising it would not reach it
        handler(number, None)
    else:
        signal.signal(number, handler)
        signal.raise_signal(number)
