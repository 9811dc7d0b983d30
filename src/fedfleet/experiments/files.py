"""Files that are whole or not there: written beside, on the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRATCH = ".tmp"


def _mode() -> int:
    """Return what the process gives to new files."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


MODE = _mode()


@contextmanager
def whole(path: Path, beside: Path | None = None) -> Iterator[Path]:
    """Yield the path to write to, which takes the place of ``path`` once it is written; ``beside`` names another folder's file."""
    scratch = (beside or path).with_suffix(SCRATCH)
    try:
        yield scratch
        scratch.chmod(MODE)  # whatever the library that wrote it made of it
        sync(scratch)
        path.parent.mkdir(exist_ok=True)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Have a file, or a folder's list of files, on the disk."""
    where = os.open(path, os.O_RDONLY)
    try:
        os.fsync(where)
    finally:
        os.close(where)
