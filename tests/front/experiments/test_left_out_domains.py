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
FEDERATED = ("FedAvg", "FedGA", "FedSAM", "FedIIR", "FedSR", "StableFDG")
FEDERATED += ("FedOMG", "FedIIR + OMG", "FedSAM + OMG", "FedSR + OMG")
CENTRALISED = ("ERM", "Fish", "Fishr", "CORAL", "MMD")
"""Of Table 2, and of Tables 6 to 8 with two of DomainBed's beside them."""


def made(root: Path, name: str, each: int) -> Path:
    """Images of one grey a class, which fades downwards, `each` of every class in all domains."""
    fading = Image.merge("RGB", [Image.linear_gradient("L").resize((9, 8))] * 3)
    for domain in SETS[name].domains:
        for label in range(SETS[name].classes):
            folder = root / name / domain / f"class{label:02}"
            folder.mkdir(parents=True)
            for i in range(each):
                grey = 255 * label // SETS[name].classes
                plain = Image.new("RGB", (9, 8), (grey, grey, 40 * i))
                Image.blend(plain, fading, 0.5).save(folder / f"{i}.png")
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
    assert {*FEDERATED, *CENTRALISED} == set(plan)
    lines = dict(describe(Experiment(plan["FedOMG"].config)))
    assert lines["run"] == f"FedOMG: omg on classification, {name}"
    of_one = classes * each - round(0.1 * classes * each)
    assert lines["clients"] == f"3 with {of_one} examples each"
    assert "without labels; 3 of 4 clients take part" in lines["targets"]
    assert f"x {11_176_512 + 513 * classes:,}" in lines["model"]


def test_the_row_of_an_algorithm_has_its_options(tmp_path: Path):
    of = {label: trial.config.algorithm for label, trial in rows("pacs", tmp_path).items()}
    assert (of["FedIIR"].penalty, of["FedIIR"].client_optimizer.momentum) == (0.0001, 0.9)
    assert of["FedSAM + OMG"].of.name == "fedsam"
    for label in ("FedOMG", "FedSAM + OMG", "FedIIR + OMG", "FedSR + OMG"):
        assert (of[label].of.lr_schedule.every, of[label].of.lr) == (80, 0.001)
    assert (of["FedGA"].lr_schedule.every, of["FedGA"].gap, of["StableFDG"].lr_schedule.kind) == (
        80,
        "accuracy",
        "cosine",
    )
    for label in CENTRALISED:
        assert (of[label].steps, of[label].batch_size) == (1, 32)
    assert {of[label].server_optimizer.lr for label in CENTRALISED if label != "Fish"} == {5e-5}
    tasks = {label: trial.config.task for label, trial in rows("pacs", tmp_path).items()}
    assert {(tasks[label].model, tasks[label].weights) for label in tasks} == {("resnet18", "random")}
    assert [tasks[label].name for label in ("FedAvg", "FedSR", "StableFDG")] == [
        "classification",
        "stochastic",
        "attentive",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["FedOMG", "FedGA", "FedSR + OMG", "StableFDG", "Fish", "Fishr", "MMD"])
def test_a_round_on_a_small_copy(tmp_path: Path, label: str):
    of = rows("pacs", made(tmp_path, "pacs", 3), **{"domains.target": "sketch"})
    few = {"rounds": 1} | ({"algorithm.batch_size": 8} if label in CENTRALISED else {})
    run = Experiment(schema.with_overrides(of[label].config, few)).run(tmp_path / "run")
    final = run.summary["final"]
    assert {"eval/target_accuracy", "eval/source_accuracy", "eval/validation_source_accuracy"} <= final.keys()
    assert 0 <= final["eval/target_accuracy"] <= 1
