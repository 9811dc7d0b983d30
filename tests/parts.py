"""The two parts of the suite: what holds the product, run at every landing, and what is slow and rarely breaks."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
THIRDS = 3
SLOW = ("benchmarks", "chaos", "cluster", "recipes")
"""Folders of which every test is in the slow part."""


def slow_but(rows: Iterable[Any], *ordinary: Any) -> list[Any]:
    """Return the rows of a table for ``parametrize``, of which all but some are slow."""
    return [row if row in ordinary else pytest.param(*_cells(row), marks=pytest.mark.slow) for row in rows]


def _cells(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)


def is_slow(item: pytest.Item) -> bool:
    """Say whether a test is slow for its folder or for its own Ray."""
    return item.path.relative_to(TESTS).parts[0] in SLOW or item.get_closest_marker("own_ray") is not None


def in_part(config: pytest.Config, item: pytest.Item) -> bool:
    """Say whether a test is in the part asked for.

    Slow tests run where ``-m`` names them, a third of them at a commit, or where their file or folder is named.
    """
    if item.get_closest_marker("slow") is None or _named(config):
        return True
    if not slow_asked(config):
        return False
    return bool(config.getoption("all")) or third(item.nodeid.partition("[")[0]) == third(commit(str(config.rootpath)))


def slow_asked(config: pytest.Config) -> bool:
    """Say whether slow tests are among those asked for: by ``-m``, or by the path of a file or of their folder."""
    return "slow" in str(config.getoption("markexpr")) or _named(config)


def may_be_quick(path: Path) -> bool:
    """Say whether a folder or file may hold quick tests: a file that does not write the marker holds none."""
    return path.is_dir() or "mark.quick" in path.read_text(encoding="utf-8")


def _named(config: pytest.Config) -> bool:
    return any(".py" in path or Path(path).name in SLOW for path in config.args)


def third(name: str) -> int:
    """Return the third that a test, or a commit, falls into."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % THIRDS


@functools.cache
def commit(root: str) -> str:
    """Return the digest of the commit that is checked out; nothing where there is none."""
    found = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
