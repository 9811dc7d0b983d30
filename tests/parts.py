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

    Slow tests run where ``-m`` names them, a third of them at a commit, or where their file is named.
    """
    if item.get_closest_marker("slow") is None or any(".py" in word for word in config.args):
        return True
    if "slow" not in str(config.getoption("markexpr")):
        return False
    return bool(config.getoption("all")) or third(item.nodeid.partition("[")[0]) == third(commit(str(config.rootpath)))


def third(name: str) -> int:
    """Return the third that a test, or a commit, falls into."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % THIRDS


@functools.cache
def commit(root: str) -> str:
    """Return the digest of the commit that is checked out; nothing where there is none."""
    found = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
