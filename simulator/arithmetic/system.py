"""Calls to the operating system that Windows has under another name, or not at all."""

from __future__ import annotations

import os
from typing import IO, Any

AT_ONCE = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""Flags to open a file with, and nothing that would be waited for, such as a pipe."""
NO_LINK = AT_ONCE | getattr(os, "O_NOFOLLOW", 0)
"""The same, and not through a link."""


def lock(file: IO[Any]) -> None:
    """Lock a file until it is closed. Raises OSError where another process has locked it."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """Write all of ``data``, a buffer of bytes, at a place of a file. Raises OSError."""
    view = memoryview(data)
    while len(view):
        if hasattr(os, "pwrite"):
            done = os.pwrite(descriptor, view, offset)
        else:
            os.lseek(descriptor, offset, os.SEEK_SET)
            done = os.write(descriptor, view)
        view, offset = view[done:], offset + done


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes at a place of a file, fewer at its end. Raises OSError."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)
