"""What a refusal says besides its key: a number, a row, a name that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from fedfleet.simulator.errors import ConfigError
from tests.refusals import refused


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
