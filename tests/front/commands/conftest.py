"""Fixtures of the commands' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

TINY = {
    "rounds": 3, "population": {"clients": 20}, "task": {"name": "classification", "model": "logistic"},
    "cohort": {"size": 4}, "executor": {"kind": "local"},
}  # fmt: skip


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """Return what ``tiny`` writes; a file of tests may have its own."""
    return TINY


@pytest.fixture
def tiny(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    """Write a small configuration, and return its path."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config), encoding="utf-8")
    return path
