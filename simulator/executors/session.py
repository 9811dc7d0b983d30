"""The folder of a Ray that a run starts: its user's alone, short enough for Ray's sockets, and gone with the run."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from fedfleet.simulator.arithmetic import system

PREFIX, LOCK, INNER = "fedfleet-ray-", "lock", "r"
LONGEST = 36
"""Characters of the folder's path, at most: Ray's sockets are 66 further on, and no system takes more than 107 (macOS 103)."""
YOUNG_S = 3600.0  # how long a folder without a lock may be one that is being made
PATIENCE_S, PAUSE_S = 3.0, 0.05  # how long processes that were stopped may yet write there


class Session:
    """A new folder, locked for as long as this process lives. Folders that dead processes of this user left are removed first.

    Ray opens the one it is given to everybody, and so gets ``temporary``, which is within.
    """

    def __init__(self, base: Path | None = None):
        base = _base() if base is None else base
        sweep(base)
        while True:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # mode 0700
            self._lock = (self.folder / LOCK).open("x", encoding="utf-8")
            if _locked(self._lock, self.folder):  # else another process has just swept it
                return
            self._lock.close()

    @property
    def temporary(self) -> Path:
        """The folder for Ray, which makes it."""
        return self.folder / INNER

    def close(self) -> None:
        """Remove the folder, once Ray was stopped."""
        until = time.monotonic() + PATIENCE_S
        while _removed(self.folder) and time.monotonic() < until:
            time.sleep(PAUSE_S)
        self._lock.close()


def sweep(base: Path) -> None:
    """Remove the folders of this user's processes that are dead; those of others, and of any other name, are left alone."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            told = folder.lstat()
            if stat.S_ISDIR(told.st_mode) and told.st_uid == os.getuid():
                _sweep_one(folder, time.time() - told.st_mtime)


def _sweep_one(folder: Path, age_s: float) -> None:
    try:
        lock = (folder / LOCK).open("r+", encoding="utf-8")
    except FileNotFoundError:
        if age_s > YOUNG_S:
            _removed(folder)
        return
    with lock:
        if _locked(lock, folder):
            _removed(folder)


def _locked(lock: IO[str], folder: Path) -> bool:
    """Say whether the lock of a folder could be had, and the folder is still there."""
    try:
        system.lock(lock)
        return os.path.samestat((folder / LOCK).stat(), os.fstat(lock.fileno()))
    except OSError:
        return False


def _removed(folder: Path) -> bool:
    """Remove a folder, and say whether anything of it is left."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder.exists()


def _base() -> Path:
    """Return the folder for temporary files that Ray would take, /tmp where its path is too long."""
    wanted = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    room = LONGEST - len(f"/{PREFIX}12345678")
    return Path(wanted if len(wanted) <= room and os.access(wanted, os.W_OK | os.X_OK) else "/tmp")
