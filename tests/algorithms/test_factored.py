"""The factored executor is exact: in double precision every algorithm gives what serial gives, to rounding."""

import pytest
import torch
from cases import CASES
from harness import World, build, flat, records

from fedfleet.algorithms.options import CohortOptions
from fedfleet.datasets.digits import load
from fedfleet.datasets.partition_config import PARTITIONS
from fedfleet.simulator import layers
from fedfleet.simulator import tree as T
from fedfleet.simulator.availability import Siwer
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

INVITE = CohortOptions(invite=8)


def world(task: str, model: str) -> World:
    """Clients of very different sizes, in double precision; LeNet needs images of 16 x 16."""
    data = load(None)  # type: ignore[arg-type]
    x = data.train.x.double()
    x = x.repeat_interleave(2, -1).repeat_interleave(2, -2) if model == "lenet" else x
    split = PARTITIONS["quantity_skew"](alpha=1.0, min_size=2).split(data.train.y, None, 30, 0)
    population = InMemoryPopulation(
        {"x": x, "y": data.train.y}, split.indices, split.offsets, torch.zeros(30, dtype=torch.int64)
    )
    entry = TASKS[task]
    return World(entry.build(entry.options(model=model, hidden=(12, 9)), DataShape(tuple(x.shape[1:]), 10)), population)


def models(name: str, model: str, inner: str, rounds: int = 2):
    task, options = CASES[name]
    where = world(task, model)
    algorithm = build(name, where.task, INVITE, **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    view = algorithm.views["global"].params
    run = records(algorithm, where, rounds, z=z, inner=inner, policy=Siwer())
    return [flat(z), *(flat(view(r.state)) for r in run)]


@pytest.mark.parametrize("fold_at", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("model", ["logistic", "mlp", "lenet"])
@pytest.mark.parametrize("name", CASES)
def test_factored_equals_serial(name, model, fold_at, monkeypatch):
    monkeypatch.setattr(layers, "FOLD_AT", fold_at)
    start, *one = models(name, model, "serial")
    _, *many = models(name, model, "factored")
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert (one[-1] - start).abs().max() > 1e-3
