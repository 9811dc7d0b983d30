"""FedOMG's toy: the larger the radius, the nearer the model to the boundary that holds for all users."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, build, records

from fedfleet.algorithms.options import CohortOptions
from fedfleet.datasets import rect4
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

DATA = rect4.load(Path())
LOCAL = {"name": "fedavg", "epochs": 5, "batch_size": 16, "lr": 0.005, "weight": "uniform"}
"""In two logits, whose difference is the model of the specification with twice the rate."""


def found(kappa: float, rounds: int = 10) -> tuple[float, float]:
    """The worst user's accuracy, and how far from the origin the model's boundary is."""
    entry = TASKS["classification"]
    task = entry.build(entry.options(model="logistic", init="zero"), DataShape((2,), 2))
    rows = torch.arange(2000)
    clients = InMemoryPopulation({"x": DATA.train.x, "y": DATA.train.y}, rows, torch.arange(5) * 500, torch.arange(4))
    algorithm = build("omg", task, CohortOptions(size=4), of=LOCAL, kappa=kappa, rescale="one_plus_kappa")
    run = records(algorithm, World(task, clients), rounds, inner="batched")
    state: Any = list(run)[-1].state
    weight, bias = (state.z["x"][n].diff(dim=0)[0] for n in ("1.weight", "1.bias"))
    right = ((DATA.test.x @ weight + bias > 0).long() == DATA.test.y).view(4, -1).double().mean(1)
    return float(right.min()), float(bias.abs() / weight.norm())


@pytest.mark.slow
def test_a_larger_radius_serves_the_worst_user_better():
    (worst, off), (worst_half, off_half), (worst_most, off_most) = map(found, (0.0, 0.5, 0.9))
    assert worst + 0.01 < min(worst_half, worst_most)
    assert off > off_half + 0.03 > off_most + 0.1


def test_the_points():
    x, y, user = DATA.test.x, DATA.test.y, DATA.test.domain
    assert user is not None
    assert DATA.domains == ("user1", "user2", "user3", "user4")
    assert torch.equal(x[:, 1] > 0, y == 1)  # there is no noise in these
    for j, (c, a, b, s) in enumerate(zip(rect4.CENTRE, rect4.WIDTH, rect4.HEIGHT, rect4.SIDE, strict=True)):
        mine, label = x[user == j], 2 * y[user == j] - 1
        away = (mine[:, 0] - c) * s * label
        assert 0.2 <= float(away.min()) < 0.25
        assert a - 0.05 < float(away.max()) <= a
        assert 0.2 <= float(mine[:, 1].abs().min()) < 0.25
        assert b - 0.05 < float(mine[:, 1].abs().max()) <= b
        assert abs(float(label.double().mean())) < 0.1
    noisy = (DATA.train.x[:, 1] > 0) != (DATA.train.y == 1)
    assert 0.12 < float(noisy.double().mean()) < 0.18
