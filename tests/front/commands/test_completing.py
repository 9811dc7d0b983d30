"""Shell completion: every name that is written out, those of packages, and run folders; without PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedfleet.commands import completing, show_named


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedfleet"


def test_every_name_is_completed_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = show_named.kinds()
    assert completing.kinds("") == list(kinds)
    monkeypatch.setattr(show_named, "kinds", lambda: {})  # from here on the file tells
    for kind, of in kinds.items():
        assert completing.names(kind) == of.registry.known()
    (kept,) = cache.iterdir()
    kept.write_text("{", encoding="utf-8")
    assert completing.kinds("") == []


def test_names_are_those_of_the_kind_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(what: str, begun: str) -> list[str]:
        ctx: Any = SimpleNamespace(params={"what": what})
        return completing.named(ctx, begun)

    assert after("algorithm", "cdma_") == ["cdma_nc", "cdma_one", "cdma_ada"]
    assert after("trackers", "m") == ["mlflow"]
    assert after("data", "") == after("config", "") == []
    assert completing.shown("d") == ["data", "dataset", "domains", "devices"]
    entries = {"fedfleet.selections": [SimpleNamespace(name="coin")]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries.get(group, []))
    assert after("selection", "c") == ["coin"]
    assert after("availability", "coin") == []


def test_folders_of_runs_are_completed_two_levels_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("runs/a/A/seed-0", "runs/none", ".hidden/b", "alone"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("runs/a/campaign.yaml", "runs/a/A/seed-0/config.yaml", ".hidden/b/config.yaml", "alone/tune.yaml"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    assert completing.runs("") == ["alone", "runs/a"]
    assert completing.runs("r") == ["runs/a"]
    assert completing.runs("runs/") == ["runs/a", "runs/a/A/seed-0"]
    assert completing.runs("runs/n") == completing.runs("nowhere/") == []
    assert completing.runs(f"{tmp_path}/al") == [f"{tmp_path}/alone"]
