"""FedOMG's full-scale configurations of domains left out: what is planned, what is said where data or weights are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fedfleet.commands.plan import describe
from fedfleet.config import schema
from fedfleet.datasets.folders import SETS
from fedfleet.experiments import sweep
from fedfleet.experiments.experiment import Experiment

CONFIGS = Path(__file__).parents[3] / "configs" / "fedomg"
NAMES = ["pacs", "vlcs", "office_home"]


def made(root: Path, name: str, each: int) -> Path:
    """Images of one grey a class, `each` of every class in all domains."""
    for domain in SETS[name].domains:
        for label in range(SETS[name].classes):
            folder = root / name / domain / f"class{label:02}"
            folder.mkdir(parents=True)
            for i in range(each):
                grey = 255 * label // SETS[name].classes
                Image.new("RGB", (9, 8), (grey, grey, 40 * i)).save(folder / f"{i}.png")
    return root


def rows(name: str, data: Path, **given: object) -> dict[str, sweep.Trial]:
    small = {"population.data_dir": str(data), "population.dataset.side": 32, "task.weights": "random", **given}
    return {trial.label: trial for trial in sweep.planned(schema.load(CONFIGS / f"{name}.yaml", small))}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_says_which_data_are_missing(command, tmp_path: Path, name: str):
    status, _, error = command("plan", CONFIGS / f"{name}.yaml", f"population.data_dir={tmp_path}")
    assert status == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert f"{tmp_path / name / SETS[name].domains[0]} is not there: fetch it from https://" in error


@pytest.mark.parametrize(("name", "each"), [("pacs", 3), ("vlcs", 4), ("office_home", 1)])
@pytest.mark.slow
def test_what_is_planned(tmp_path: Path, name: str, each: int):
    classes = SETS[name].classes
    plan = rows(name, made(tmp_path, name, each))
    assert {"FedAvg", "FedSAM", "FedIIR", "FedOMG", "FedIIR + OMG", "FedSAM + OMG"} == set(plan)
    lines = dict(describe(Experiment(plan["FedOMG"].config)))
    assert lines["run"] == f"FedOMG: omg on classification, {name}"
    of_one = classes * each - round(0.1 * classes * each)
    assert lines["clients"] == f"3 with {of_one} to {of_one} examples each"
    assert "without labels; 3 of 4 clients take part" in lines["targets"]
    assert f"x {11_176_512 + 513 * classes:,}" in lines["model"]


def test_the_row_of_an_algorithm_has_its_options(tmp_path: Path):
    of = {label: trial.config.algorithm for label, trial in rows("pacs", tmp_path).items()}
    assert (of["FedIIR"].penalty, of["FedIIR"].client_optimizer.momentum) == (0.0001, 0.9)
    assert of["FedSAM + OMG"].of.name == "fedsam"
    for label in ("FedOMG", "FedSAM + OMG", "FedIIR + OMG"):
        assert (of[label].of.lr_schedule.every, of[label].of.lr) == (80, 0.001)


@pytest.mark.slow
def test_a_round_on_a_small_copy(tmp_path: Path):
    of = rows("pacs", made(tmp_path, "pacs", 3), rounds=1, **{"domains.target": "sketch"})
    run = Experiment(of["FedOMG"].config).run(tmp_path / "run")
    final = run.summary["final"]
    assert {"eval/target_accuracy", "eval/source_accuracy", "eval/validation_source_accuracy"} <= final.keys()
    assert 0 <= final["eval/target_accuracy"] <= 1
