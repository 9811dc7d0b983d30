"""Advice on features that steps do not suit, and cases that get none."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.advice import advice
from tests.refusals import refused

CONFIG = {
    "rounds": 1, "task": {"model": "logistic"}, "algorithm": {"lr": 1e-9, "batch_size": 5}, "cohort": {"size": 2},
    "executor": {"kind": "local"},
}  # fmt: skip


def data(income: float) -> fedfleet.FederatedDataset:
    random = np.random.default_rng(0)
    df = pd.DataFrame({"age": random.normal(0, 1, 60), "income": random.normal(income, 1, 60), "y": [0, 1] * 30})
    found = fedfleet.data.from_dataframe(df.assign(home=np.arange(60) // 10), client="home")
    assert isinstance(found, fedfleet.FederatedDataset)
    return found


class Told(fedfleet.Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_feature_that_is_far_from_one_is_named(tmp_path: Path) -> None:
    line = "feature 'income' is about 5e+04 in size: nets and steps are made for features of about 1: scale them"
    with pytest.warns(UserWarning, match=f"^{line.replace('+', '.')}"):
        fedfleet.run(CONFIG, data=data(50_000), out=tmp_path / "far", progress=False)
    told = Told()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedfleet.run(CONFIG, data=data(50_000), out=tmp_path / "told", callbacks=told)
        fedfleet.run(CONFIG, data=data(20), out=tmp_path / "near")
    assert any(said.startswith(line) for said in told.lines)
    far, near = (dict(describe(fedfleet.Experiment(fedfleet.load(CONFIG), data=data(x)))) for x in (50_000, 20))
    assert far["advice"].startswith(line)
    assert "advice" not in near


@pytest.mark.parametrize(("after", "says"), [
    (lambda: [nn.Linear(2, 2), nn.Softmax(1)], ["the net's outputs are probabilities, of which cross-entropy"]),
    (lambda: [nn.Linear(2, 7)], ["the net has 7 outputs, and the data have 2 classes"]), (lambda: [nn.Linear(2, 2)], []),
    (lambda: [nn.Linear(2, 2), nn.Sigmoid()], []), (lambda: [nn.Linear(2, 2), nn.LogSoftmax(1)], []),
])  # fmt: skip
def test_outputs_that_cross_entropy_does_not_mean_are_told(after, says):
    task = fedfleet.tasks.from_module(lambda: nn.Sequential(*after()))
    found = fedfleet.Experiment(fedfleet.load(CONFIG, {"task": None}), data=data(0), task=task).advice()
    assert [line[: len(said)] for line, said in zip(found, says, strict=True)] == says


def test_a_loss_of_ones_own_is_all_that_is_measured_unless_metrics_are_given():
    def own(outputs, y):
        return 2 * nn.functional.cross_entropy(outputs, y, reduction="none")

    for given, says in (({"loss": own}, 1), ({"loss": own, "metrics": ["accuracy"]}, 0), ({}, 0)):
        task = fedfleet.tasks.from_module(lambda: nn.Sequential(nn.Linear(2, 2)), **given)
        made = fedfleet.Experiment(fedfleet.load(CONFIG, {"task": None}), data=data(0), task=task)
        assert len([line for line in made.advice() if "give metrics" in line]) == says, given


def test_of_what_nothing_is_said() -> None:
    task = fedfleet.tasks.from_module(lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(1)), loss="mse")
    y = np.eye(2)[np.arange(40) % 2]
    targets = fedfleet.data.from_arrays(np.zeros((40, 2)), target=y, client=np.arange(40) // 10)
    assert not fedfleet.Experiment(fedfleet.load(CONFIG, {"task": None}), data=targets, task=task).advice()
    far = torch.full((4, 3), 1e3)
    assert advice(far, (), 0)[0].startswith("feature number 0 is about 1e+03 in size, and 2 more are above 30")
    assert advice(far.long(), ("a", "b", "c"), 0)
    for x, features, words in (
        (far.long(), (), 0),  # words
        (far.long(), ("a",), 9),  # texts
        (torch.full((4, 3), 255, dtype=torch.uint8), (), 0),  # pixels
        (far[:, :, None], (), 0),  # images
        (torch.ones(4, 3), (), 0),
        (far[:0], (), 0),
        (far * torch.nan, (), 0),
    ):
        assert advice(x, features, words) == []


def test_all_are_asked_where_there_are_fewer_than_by_default():
    few = {"population": {"clients": 9}, "executor": {"kind": "local"}}
    made = fedfleet.Experiment(fedfleet.load(few))
    assert made.config.cohort.size == 9
    assert [line for line in made.advice() if line.startswith("cohort.size: 10 ")]
    given = {**few, "cohort": {"size": 10}}
    refused(lambda: fedfleet.Experiment(fedfleet.load(given)), "cohort.size=10")
    assert not fedfleet.Experiment(fedfleet.load({**few, "cohort": {"size": 9}})).advice()
