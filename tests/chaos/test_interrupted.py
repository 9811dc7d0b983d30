"""Ctrl-C at four moments of a run: one line, no crash, and nothing left of Ray. ``python -m tests.chaos.interrupted`` has more."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.interrupted import PARTS, Run, interrupt, written

pytestmark = [
    pytest.mark.ray,
    pytest.mark.own_ray,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked for in /proc"),
]


@pytest.mark.parametrize("part", ["imports, loads", "starts Ray", "starts actors", "rounds"])
def test_an_interruption_is_one_line_and_leaves_nothing(tmp_path: Path, part: str):
    found = interrupt(written(tmp_path), tmp_path / "run", part, 0.0)
    assert found.wrong == []
    assert PARTS.index(found.about) >= PARTS.index(part)


def test_what_is_left_of_a_run_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("tests.chaos.interrupted.LEFT_S", 0.0)
    run, until = Run("list", "tasks"), time.monotonic() + 10
    while run.process.pid not in run.processes() and time.monotonic() < until:  # it has only been forked
        time.sleep(0.01)
    assert list(run.processes().values()) == [run.processes()[run.process.pid]]
    assert len(run.left()) == 1
    assert run.ended() == -signal.SIGKILL
    assert run.left() == []
