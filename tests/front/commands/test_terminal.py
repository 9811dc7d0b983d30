"""Tables on a terminal: words and numbers are whole, however narrow it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedfleet.commands import terminal

HEAD = ["folder", "availability.rate", "eval/accuracy", "n"]
ROWS = [["a b/seed-1", "0.6", "0.864789", "12 of 30"], ["a b/seed-2", "0.6", "0.825352", "12 of 31"]]


def shown(monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    told = Console(width=width, file=io.StringIO())
    monkeypatch.setattr(terminal, "wide", lambda: told)
    told.print(terminal.results(HEAD, ROWS, whole=1), soft_wrap=True)
    assert isinstance(told.file, io.StringIO)
    return told.file.getvalue()


@pytest.mark.parametrize(("width", "says"), [
    (80, "┃ folder     ┃ availability.rate ┃ eval/accuracy ┃ n        ┃"),
    (50, "│ a b/seed-1 │ 0.6           │ 0.864789 │ 12 of  │"),
    (40, "in all 2 rows: availability.rate 0.6"),
    (28, "availability.rate  0.6"),
])  # fmt: skip
def test_words_and_numbers_are_whole(monkeypatch: pytest.MonkeyPatch, width: int, says: str):
    told = shown(monkeypatch, width)
    assert says in told
    assert max(map(len, told.splitlines())) <= max(
        width, 37
    )  # a list, and what is said below, are broken by the terminal
    for word in ("a b/seed-1", "a b/seed-2", "0.864789", "0.825352", "accuracy", "0.6", "30", "31"):
        assert word in told
