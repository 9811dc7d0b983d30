"""Interruptions that wait until what must not be torn apart is done, and what others' code raises that looks like one."""

from __future__ import annotations

import importlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fedfleet.simulator.errors import one_line

IMPORTS = "importlib._bootstrap"  # in the names of the files of Python's own code for imports
IMPORT_S, AGAIN_S = 10.0, 0.05  # how long an interruption waits for an import, and between two looks at it
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)
_delivered = 0  # interruptions that have taken effect in this process, as far as they were put off before
_deaf = False


class EndsProgram(Exception):
    """Code of others raised what ends a program, a thread or a task: it passes by whoever catches an ``Exception``."""


def deaf() -> None:
    """Take note that nobody interrupts this process, as none of Ray's workers is: each interruption is then somebody's code."""
    global _deaf
    _deaf = True


@contextmanager
def contained() -> Iterator[None]:
    """Raise EndsProgram where the block, which runs code of others, raises what ends a program and no signal has come."""
    before = _delivered
    try:
        yield
    except Exception:
        raise
    except BaseException as e:
        if _delivered != before or _by_signal(e):
            raise
        raise EndsProgram(f"it raised {type(e).__name__}({one_line(e)}), which would end the program") from e


def _by_signal(error: BaseException) -> bool:
    """Say whether an error was raised by the handler of a signal."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {handler.__code__ for handler in handlers if hasattr(handler, "__code__")}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    python = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # which is no function with a frame
    return isinstance(error, KeyboardInterrupt) and python and not _deaf


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


def imported(module: str) -> Any:
    """Import a module, whole, before an interruption takes effect: code in C that is torn apart leaves errors, or an abort."""
    with put_off():
        return importlib.import_module(module)


def _signal_main_thread(number: int) -> None:
    if hasattr(signal, "pthread_kill"):  # which ends what it sleeps for
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def after_imports(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    """Return a handler of a signal that lets an import under way come to its end before ``handler`` does its work.

    An import of code in C that is torn apart leaves errors, or an abort. One that takes longer than ``IMPORT_S`` is torn apart.
    """
    until: list[float] = []
    waiting = threading.Event()  # several signals in one import are one interruption

    def again(number: int) -> None:
        waiting.clear()
        _signal_main_thread(number)

    def after(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if any(IMPORTS in each.f_code.co_filename for each, _ in traceback.walk_stack(frame)):
            until[:] = until or [now + IMPORT_S]
            if now < until[0]:
                if not waiting.is_set():
                    waiting.set()
                    timer = threading.Timer(AGAIN_S, again, [number])
                    timer.daemon = True
                    timer.start()
                return
        until.clear()
        handler(number, frame)

    return after


def _deliver(number: int, handler: Any) -> None:
    global _delivered
    _delivered += 1
    if callable(handler):  # where the signal is masked, as in a Ray worker, raising it would not reach it
        handler(number, None)
    else:
        signal.signal(number, handler)
        signal.raise_signal(number)
