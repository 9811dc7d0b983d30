"""What a shell completes: every name that is written out, those of packages, and run folders; without PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedfleet.commands import completing, show_named

COMPUTED = ("digits_to_", "emnist_", "rotated_", "coloured_")
"""What names of data sets begin with that are computed."""


def test_every_name_that_is_written_out_is_completed() -> None:
    kinds = show_named.nameable()
    assert completing.kinds("") == list(completing.REGISTRIES)
    assert set(completing.REGISTRIES) == set(kinds)
    for kind, of in kinds.items():
        mine = completing.names(kind)
        assert set(mine) >= {name for name in of.options if kind != "dataset" or not name.startswith(COMPUTED)}
        assert not {name for name in mine if name not in of.options and name not in dict(show_named.names(kind))}


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
