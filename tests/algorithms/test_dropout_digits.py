"""Dropout by class on digits: section 9 of the specification of dropout, logistic regression."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import World, build, play
from scripted import Drawn
from sklearn.datasets import load_digits

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Batch
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

pytestmark = pytest.mark.slow


def accuracy(seed: int, **options: Any) -> tuple[float, float]:
    """Return accuracy and that of the worst class after 300 rounds: 40 clients of 35 by label, online .1 to .9 of the time."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = torch.tensor(data.data[order] / 16 - 0.3, dtype=torch.float32), torch.tensor(data.target[order])
    test_x, test_y, x, y = x[:397], y[:397], x[397:], y[397:]
    by_label = y.argsort(stable=True)
    x, y = x[by_label], y[by_label]
    offsets, domain = torch.arange(0, 1401, 35), torch.zeros(40, dtype=torch.int64)
    entry = TASKS["classification"]
    task = entry.build(entry.options(model="logistic"), DataShape((64,), 10))
    where = World(task, InMemoryPopulation({"x": x, "y": y}, torch.arange(1400), offsets, domain))
    p = tuple((0.1 + 0.8 * y.view(40, 35).double().mean(1) / 9).tolist())
    made = build("fedavg", task, CohortOptions(invite=40), steps=5, lr=0.3, batch_size=35, weight="uniform", **options)
    given = {"federation": Federation(availability=Drawn(p)), "inner": "batched", "block_size": 40, "seed": seed}
    z = play(made, where, 300, z=T.zeros_like(task.init(0)), **given)[-1]
    hit = (task.functions["predict"](z, Batch({"x": test_x}, torch.ones(397))).argmax(-1) == test_y).double()
    return float(hit.mean()), min(float(hit[test_y == k].mean()) for k in range(10))


def test_dropout_by_class_costs_the_worst_class_most_and_memory_recovers_it():
    """Measured: FedAvg .935 and .724, FedVARP .9597 and .8780, whatever the seed."""
    lost = torch.tensor([accuracy(seed) for seed in (0, 1, 2)]).mean(0)
    found = torch.tensor(accuracy(0, correction="fedvarp"))
    assert found[0] - lost[0] > 0.015
    assert found[1] - lost[1] > 0.1
    assert found[0] > 0.95
