"""Files that are whole or not there: written beside, on the disk, then renamed. No link is followed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedfleet.simulator.arithmetic.system import NO_LINK

SCRATCH = ".tmp"


def _mode() -> int:
    """Return what the process gives to new files."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


MODE = _mode()


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[Path]:
    """Yield a new, empty file to write to, which takes the place of ``path`` at the end; it may be lost where power fails.

    ``beside`` names another folder's file. What is there under the scratch file's name is removed, not written through.
    """
    scratch = (beside or path).with_suffix(SCRATCH)
    scratch.unlink(missing_ok=True)
    os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666))
    try:
        yield scratch
        scratch.chmod(MODE)  # whatever the library that wrote it made of it
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def whole(path: Path, beside: Path | None = None) -> Iterator[Path]:
    """Yield the path to write to, which takes the place of ``path`` once it is on the disk; ``beside`` as of ``replacing``."""
    with replacing(path, beside) as scratch:
        yield scratch
        sync(scratch)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    with whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def own_folder(path: Path) -> Path:
    """Make a folder within a run folder, or take the one that is there. Raises OSError for a link, and for what is no folder."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} is a link: put a folder in its place")
    path.mkdir(exist_ok=True)
    return path


def own_copy(path: Path) -> None:
    """Replace a file that goes by another name, too, a hard link, by a copy, so that nothing is written there. Raises OSError."""
    try:
        told = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISREG(told.st_mode) and told.st_nlink > 1:
        with whole(path) as scratch:
            shutil.copyfile(path, scratch)


@contextmanager
def appending(path: Path) -> Iterator[IO[str]]:
    """Yield a text file to add to, made if need be. Raises OSError for a link, and for what is no regular file."""
    own_copy(path)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "a") as file:
        yield file


def opened(path: Path, flags: int, mode: str) -> IO[str]:
    """Open a regular file as text. Raises OSError for a link, and for what is no regular file."""
    descriptor = os.open(path, flags | NO_LINK, 0o666)
    try:
        check_regular(os.fstat(descriptor))
        return os.fdopen(descriptor, mode, encoding="utf-8")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(result: os.stat_result) -> None:
    """Refuse what is no regular file, such as a pipe, of which reading might never end. Raises OSError."""
    if stat.S_ISDIR(result.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(result.st_mode):
        raise OSError(errno.EINVAL, "no regular file")


def sync(path: Path) -> None:
    """Have a file, or a folder's list of files, on the disk; Windows opens no folders."""
    if os.name == "nt" and path.is_dir():
        return
    where = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(where)
    finally:
        os.close(where)
