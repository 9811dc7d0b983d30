"""Memory that a process uses, and its peak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

ROLLUP = Path("/proc/self/smaps_rollup")


def own_bytes() -> int | None:
    """Return the unique set size (USS) of this process: what would be freed if it ended. None where it cannot be told."""
    return _rollup("Private_Clean:", "Private_Dirty:", else_="uss")


def resident_bytes() -> int | None:
    """Return the resident set size of this process, with what it shares with others. None where it cannot be told."""
    return _rollup("Rss:", else_="rss")


def give_back() -> None:
    """Return what has been freed to the system, so that growth shows from here on; elsewhere than on glibc nothing happens."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _rollup(*kinds: str, else_: str) -> int | None:
    try:
        lines = ROLLUP.read_text().splitlines()
    except OSError:
        return _psutil(else_)
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(kinds))


def _psutil(kind: str) -> int | None:
    try:
        import psutil  # pyright: ignore[reportMissingModuleSource, reportMissingImports]
    except ImportError:
        return None
    return getattr(psutil.Process().memory_full_info(), kind)


class Peak:
    """Watches the memory of this process while its ``with`` block runs: ``peak.bytes`` is the most that was seen."""

    def __init__(self, every_s: float = 0.2, look: Callable[[], int | None] = own_bytes):
        self.bytes: int | None = None
        self._memory = look
        self._every_s = every_s
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._look()
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()
        self._look()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        now = self._memory()
        if now is not None:
            self.bytes = max(now, self.bytes or 0)
