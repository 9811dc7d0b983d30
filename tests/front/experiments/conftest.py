"""Fixtures of the tests of runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedfleet.simulator import named


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for modules beside the one that is run in, of which nothing was loaded yet."""
    for name in ("elsewhere", "beside"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(named, "_mine", {})
    return tmp_path / "beside"
