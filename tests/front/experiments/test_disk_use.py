"""Disk use of a run: what ``plan`` says before it is what the run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfleet.config.schema import load
from fedfleet.experiments.disk_use import estimated
from fedfleet.experiments.experiment import Experiment

SMALL: dict[str, Any] = {
    "rounds": 20, "population": {"clients": 60}, "task": {"name": "classification", "model": "mlp", "hidden": [64]},
    "cohort": {"size": 20}, "algorithm": {"steps": 1}, "executor": {"kind": "local"},
}  # fmt: skip
GIVEN: list[dict[str, Any]] = [
    {"algorithm.name": "fedavg"},
    {"algorithm.name": "scaffold"},
    {"algorithm.name": "fedavg", "transforms.up": [{"name": "top_k", "share": 0.1, "error_feedback": True}]},
    {"algorithm.name": "fedavg", "evaluation.per_client": True, "evaluation.every": 1},
    {"algorithm.name": "fedavg", "evaluation.outcomes": "counted"},
]


@pytest.mark.parametrize(
    "given", [GIVEN[0], GIVEN[1], *(pytest.param(one, marks=pytest.mark.slow) for one in GIVEN[2:])]
)
def test_it_is_what_a_run_leaves(tmp_path: Path, given: dict[str, Any]) -> None:
    x = Experiment(load(SMALL, given))
    told = estimated(x)
    x.run(tmp_path / "run")
    files = {path: path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert 0.7 < told.total / sum(files.values()) < 1.4
    models = [size for path, size in files.items() if path.name in ("model.safetensors", "best.safetensors")]
    assert told.models == pytest.approx(sum(models), rel=0.1)
    states = sum(size for path, size in files.items() if path.name == "states.bin")
    assert told.states == pytest.approx(states, rel=0.1)
    assert told.clients == (60 if states else 0)
