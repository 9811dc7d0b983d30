"""FACT is for something: on digits under shifts it beats averaging of the pair. And its data, and its configurations."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

import fedfleet
from fedfleet.datasets.digits_shifted import SOURCES, load
from fedfleet.simulator.errors import ConfigError

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "fact"
SHORT = {
    "rounds": 25,
    "algorithm.lr": 0.3,
    "algorithm.batch_size": 120,
    "evaluation.every": 25,
    "compare": None,
    "seeds": None,
}


def accuracy(folder: Path, **changes) -> float:
    config = fedfleet.load(CONFIGS / "shifted_digits.yaml", {**SHORT, **changes})
    return fedfleet.Experiment(config).run(folder).summary["final"]["eval/target_accuracy"]


def test_fact_beats_averaging_of_the_pair(tmp_path):
    """In short, on one target with a large rate: `configs/fact/shifted_digits_table.yaml` is the calibrated experiment."""
    gains = []
    for seed in range(4):
        ours = accuracy(tmp_path / f"fact{seed}", seed=seed, **{"algorithm.target_lr": 0.9})
        average = {"algorithm.idd": False, "algorithm.fine_tune": False}
        gains.append(ours - accuracy(tmp_path / f"average{seed}", seed=seed, **average))
    assert statistics.fmean(gains) > 0.005


@pytest.mark.parametrize("target", SOURCES)
def test_shifted_digits(target):
    data = load(Path(), target=target)
    assert data.domains == (*SOURCES[target], "target")
    assert data.train.domain.bincount().tolist() == [360, 360, 359, 359]
    assert data.test.domain.bincount().tolist() == [359] * 4
    assert data.train.x.shape == (1438, 1, 8, 8)
    assert torch.equal(data.test.y[:359], data.test.y[-359:])
    again = load(Path(), target=target)
    assert torch.equal(data.train.x, again.train.x)


def test_shifts_by_hand():
    data, plain = load(Path(), target="bright"), load(Path(), target="id")
    by_shift = {name: data.test.x[data.test.domain == d] for d, name in enumerate(data.domains)}
    image = plain.test.x[plain.test.domain == 3]
    assert torch.equal(by_shift["id"], image)
    torch.testing.assert_close(by_shift["contrast"], 0.5 * image + 0.3)
    torch.testing.assert_close(by_shift["target"], (image + 0.6).clamp(0, 1.6))
    noise = by_shift["noise"] - image
    assert float(noise.std()) == pytest.approx(0.25, abs=0.01)
    assert abs(float(noise.mean())) < 0.01
    turned = load(Path(), target="rot25").test
    rot50 = turned.x[turned.domain == 1]
    assert float(rot50.sum()) == pytest.approx(float(image.sum()), rel=0.2)  # corners are lost
    assert (rot50 - image).abs().mean() > 0.1
    blur = plain.test.x[plain.test.domain == 2]
    assert float(blur.sum()) == pytest.approx(float(image.sum()), rel=0.01)
    assert float(blur.var()) < float(image.var())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("shifted_digits.yaml", {}),
        ("digits.yaml", {}),
        ("digit_five.yaml", {}),
    ],
)
def test_configurations_can_be_read(name, changes):
    config = fedfleet.load(CONFIGS / name, changes)
    assert config.cohort.size == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"task": {"name": "classification", "model": "mlp"}},
            "it needs a task with a head part, .* set task.name=two_heads",
        ),
        (
            {"domains.target": []},
            "it is for domains with labels and others without, and no domain is a target: set domains.target",
        ),
        ({"cohort.size": 3}, "cohort.size=3: fact asks two source clients a round"),
        ({"algorithm.rounds": 20}, "algorithm.rounds=20: the run has rounds=25: make them the same"),
        ({"cohort.resample": False}, "cohort.resample=false: fact draws the cohort of each of its phases by itself"),
        ({"cohort.late": "keep"}, "cohort.late='keep': clients of fact keep a state"),
        ({"algorithm.targets": 5}, "algorithm.targets=5: there are 1 target clients"),
        ({"domains.target": ["target", "id", "rot30"]}, "a round takes two source clients, and there is 1"),
        ({"task.model": "digit_five", "task.hidden": [9]}, "hidden"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes, says):
    with pytest.raises(ConfigError, match=says) as e:
        fedfleet.Experiment(fedfleet.load(CONFIGS / "shifted_digits.yaml", {**SHORT, **changes}))
    assert "\n" not in str(e.value)


def test_averaging_over_all_sources_is_fedavg(tmp_path):
    """The task is for FedAvg too, on sources alone."""
    given = {"algorithm": {"name": "fedavg", "epochs": 1, "batch_size": 60, "lr": 0.3}, "cohort.size": 3}
    run = fedfleet.Experiment(fedfleet.load(CONFIGS / "shifted_digits.yaml", {**SHORT, **given})).run(tmp_path / "run")
    assert run.summary["final"]["eval/source_accuracy"] > 0.5
    assert set(run.table("phases")["invited"]) == {3}


def test_mcd_on_one_client(tmp_path):
    given = {"algorithm": {"name": "mcd", "epochs": 1, "batch_size": 60, "lr": 0.3}, "cohort.size": 1}
    given |= {"population.dataset": "digits_to_id", "population.clients": 1, "population.partition": "iid"}
    run = fedfleet.Experiment(fedfleet.load(CONFIGS / "shifted_digits.yaml", {**SHORT, **given})).run(tmp_path / "run")
    assert run.summary["final"]["eval/target_accuracy"] > 0.5


def test_a_run_that_goes_on_is_one_that_never_stopped(tmp_path):
    """Clients' clocks, momentum and the model that was selected are in the checkpoint."""
    given = {**SHORT, "rounds": 8, "algorithm.momentum": 0.9, "algorithm.select": "idd", "algorithm.lr": 0.02}
    x = fedfleet.Experiment(fedfleet.load(CONFIGS / "shifted_digits.yaml", given))
    run = x.run(tmp_path / "whole")
    fedfleet.Experiment(fedfleet.load(CONFIGS / "shifted_digits.yaml", {**given, "rounds": 4})).run(tmp_path / "parted")
    longer = fedfleet.resume(tmp_path / "parted", {"rounds": 8})
    same = [(r.folder / "model.safetensors").read_bytes() for r in (run, longer)]
    assert same[0] == same[1]
    assert run.rounds["algorithm/idd"].notna().all()
    assert run.rounds["algorithm/idd"].tolist() == longer.rounds["algorithm/idd"].tolist()


@pytest.mark.ray
def test_the_bytes_do_not_depend_on_the_workers(tmp_path):
    """Spec 7.12: in this process, and on two actors."""
    given = {**SHORT, "rounds": 3, "algorithm.momentum": 0.9, "executor.block_size": 1}
    models, pairs = [], []
    for place in (
        {"executor.kind": "local"},
        {"executor.kind": "ray", "executor.actors": 2, "executor.cpus_per_actor": 0.5},
    ):
        x = fedfleet.Experiment(fedfleet.load(CONFIGS / "shifted_digits.yaml", {**given, **place}))
        run = x.run(tmp_path / x.config.executor.kind)
        models.append((run.folder / "model.safetensors").read_bytes())
        pairs.append(run.table("outcomes")["client"].tolist())
    assert models[0] == models[1]
    assert pairs[0] == pairs[1]
