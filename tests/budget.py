"""Budgets of each folder of tests, and what they took: a warning at the end of every run, never a failure.

The table is the one in CONTRIBUTING.md, in seconds of one process on two idle cores.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
ROW = re.compile(r"^\| `tests/(\S*)` \| (\d+) \| (\d+) \|$", re.MULTILINE)
SLOWEST = 10


def allowed(text: str) -> dict[str, tuple[int, int]]:
    """Return the seconds each folder may take, of the ordinary and of the slow part, as a table says it."""
    return {folder: (int(ordinary), int(slow)) for folder, ordinary, slow in ROW.findall(text)}


def folder(nodeid: str, folders: dict[str, tuple[int, int]]) -> str:
    """Return the row of the table that a test belongs to: the longest path that leads to it."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    above = ["/".join(path.split("/")[:n]) for n in range(path.count("/"), 0, -1)]
    return next((place for place in above if place in folders), "")


class Budget:
    """Adds up what tests take."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._seconds = defaultdict[str, float](float)
        self._slow = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test, its set-up or what follows it took."""
        self._seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the folders that took more than they may, or all of them, and the slowest tests."""
        table = allowed(CONTRIBUTING.read_text(encoding="utf-8"))
        spent = Counter[tuple[str, bool]]()
        for nodeid, seconds in self._seconds.items():
            place = folder(nodeid, table)
            spent[place, nodeid in self._slow] += seconds  # pyright: ignore[reportArgumentType]
        lines = [
            (place, slow, spent[place, slow], limits[slow])
            for place, limits in table.items()
            for slow in (False, True)
            if spent[place, slow] > limits[slow] or (self._whole and spent[place, slow])
        ]
        if not lines and not self._whole:
            return
        terminalreporter.section("seconds by folder, as CONTRIBUTING.md allows them" if self._whole else "above budget")
        for place, slow, seconds, limit in lines:
            over = "  above" if seconds > limit else ""
            terminalreporter.line(f"tests/{place}{' (slow)' * slow:8} {seconds:8.1f} of {limit} s{over}")
        for nodeid, seconds in sorted(self._seconds.items(), key=lambda row: -row[1])[:SLOWEST]:
            terminalreporter.line(f"{seconds:8.1f} s {nodeid}")
