"""Checks of a command that refuses: one line with the key first, and exit status 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def line(found: tuple[int, str, str], key: str = "") -> str:
    """Check that a command ended so, and return what it said."""
    status, _, error = found
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith(f"error: {key}"), f"{error!r} does not begin with {key!r}"
    return error


def all_told(
    subtests: pytest.Subtests, call: Callable[[Any], tuple[int, str, str]], rows: Iterable[tuple[Any, str]]
) -> None:
    """Check it for each row of a table, (what the command is given, the key that the line begins with)."""
    for given, key in rows:
        with subtests.test(f"{given}"):
            line(call(given), key)
