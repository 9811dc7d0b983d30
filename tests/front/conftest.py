"""What tests of the front share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from fedfleet import cli


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., object]]:
    """Run the command line in this process: (exit status, standard output, standard error)."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedfleet", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    yield call
    signal.signal(signal.SIGTERM, before)
