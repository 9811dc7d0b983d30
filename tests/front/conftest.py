"""Fixtures of the front's tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedfleet
from fedfleet.commands import cli
from tests.front.experiments.resuming import config


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., object]]:
    """Run the command line in this process: (exit status, standard output, standard error)."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.delenv("COLUMNS", raising=False)  # which tests that run side by side have

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedfleet", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a run of a case that never stopped."""
    folder, done = tmp_path_factory.mktemp("undisturbed"), {}

    def run(case: str) -> Path:
        if case not in done:
            done[case] = fedfleet.Experiment(config(case)).run(folder / case).folder
        return done[case]

    return run
