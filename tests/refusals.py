"""Refusals: one line that begins with the key or the file, and says more than that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from fedfleet.simulator.errors import ConfigError, FedfleetError


def refused(call: Callable[[], Any], key: str, kind: type[FedfleetError] = ConfigError) -> str:
    """Check that a call is refused in one line that begins with a key, and return the line.

    Args:
        call: what is to be refused.
        key: what the line begins with: a dotted key, with its value if that matters, or a file.
        kind: the class of the error.

    """
    with pytest.raises(kind) as e:
        call()
    line = str(e.value)
    assert line.startswith(key), f"{line!r} does not begin with {key!r}"
    assert "\n" not in line, line
    assert line.removeprefix(key).strip(" :'=").strip(), f"{line!r} says nothing but the key"
    return line


def all_refused(
    subtests: pytest.Subtests,
    call: Callable[[Any], Any],
    rows: Iterable[tuple[Any, str]],
    kind: type[FedfleetError] = ConfigError,
) -> None:
    """Check that a call is refused for each row of a table, (what it is given, the key that the line begins with)."""
    for given, key in rows:
        with subtests.test(f"{given}"):
            refused(lambda given=given: call(given), key, kind)


def tells(call: Callable[[], Any], text: str, kind: Any = ConfigError) -> None:
    """Check that a call is refused in one line with a text, or its parts by " … "; after "^" the line begins with the first."""
    parts, line = text.removeprefix("^").split(" … "), refused(call, "", kind)
    assert [part for part in parts if part not in line] == [], line
    assert line.isprintable(), line
    assert line.startswith(parts[0]) or not text.startswith("^"), line


def all_say(
    subtests: pytest.Subtests, call: Callable[[Any], Any], rows: Iterable[tuple[Any, str]], kind: Any = ConfigError
) -> None:
    """Check that a call is refused for each row of a table, (what it is given, what its one line says)."""
    for given, text in rows:
        with subtests.test(text):
            tells(lambda given=given: call(given), text, kind)


PROGRESS = re.compile(r"^(starting|clients|tested on|initial model|going on|round \d+)\b.*\n", re.M)


def without_progress(said: str) -> str:
    """Return what was said on standard error without the lines that show how a run goes."""
    return PROGRESS.sub("", said)
