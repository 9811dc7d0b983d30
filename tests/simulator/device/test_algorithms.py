"""Every algorithm runs where its clients' tensors are on another device than the server's, and comes to what it does on the CPU."""

import pytest
import torch

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.purity import Held
from tests.algorithms.cases import CASES, INVITE, MODEL
from tests.algorithms.harness import NET, build, digits, flat, records
from tests.simulator.device.nominal import DEVICE, on_device, placed

SERIAL = ("fedavg", "fedbn", "fedpac", "fact", "cdma_ada", "fedmm")
CAPTURED = [("scaffold", "batched"), ("cdma_nc", "batched"), ("fedsr", "batched"), ("fedavg", "factored")]


def models(name, inner, device, rounds=2, alike=False, **given):
    """The model and the training losses after each round; clients differ in the number of their examples, unless all are alike."""
    task, options = CASES[name]
    few = {"batch_size": 12, "steps": min(2, options.get("steps", 2))}
    net = {"model": MODEL[name]} if name in MODEL else NET
    skewed = {"partition": "quantity_skew", "alpha": 5.0, "min_size": 2}
    world = digits(task, clients=90, net=net, **({"partition": "iid"} if alike else skewed))
    algorithm = build(
        name,
        world.task,
        CohortOptions(invite=INVITE.get(name, 2)),
        **{**options, **{k: v for k, v in few.items() if k in options}},
    )
    view, found = algorithm.views["global"].params, []
    for record in records(algorithm, world, rounds, inner=inner, device=str(device), held=Tried(), **given):
        assert not any(on_device(t) for t in T.leaves(record.state) if isinstance(t, torch.Tensor))
        found.append((flat(view(record.state)), [p.train_loss for p in record.phases]))
    return found


class Tried(Held):
    """Says that everything was tried: to try client code takes longer than to run it, and whole runs do (``test_runs.py``)."""

    def first(self, what):
        return False


RUNS = [(name, inner) for inner in ("batched", "factored") for name in CASES] + [(name, "serial") for name in SERIAL]


@pytest.mark.parametrize(("name", "inner"), RUNS)
def test_an_algorithm_runs_on_a_device(name, inner):
    with placed() as watch:
        there = models(name, inner, DEVICE)
    assert watch.seen > 100
    for (z, losses), (same, as_before) in zip(there, models(name, inner, "cpu"), strict=True):
        torch.testing.assert_close(z, same, rtol=2e-5, atol=2e-6)
        assert losses == pytest.approx(as_before, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("name", "inner"), CAPTURED)
def test_a_captured_block_is_replayed_on_a_device(name, inner):
    captures = Captures(after=0)
    with placed():
        there = models(name, inner, DEVICE, rounds=4, alike=True, captures=captures)
        assert captures.ready > 0
        ordinary = models(name, inner, DEVICE, rounds=4, alike=True, captures=Captures(after=None))
    for (z, losses), (same, as_ever) in zip(there, ordinary, strict=True):
        assert torch.equal(z, same)
        assert losses == as_ever
