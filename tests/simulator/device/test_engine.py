"""The engine on a device: draws, reductions, uploads that are kept, populations."""

import pytest
import torch

from fedfleet.datasets import synthetic
from fedfleet.simulator.arithmetic import optim, rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import Combination
from fedfleet.simulator.arithmetic.factored import Ledger, Notes
from fedfleet.simulator.arithmetic.reduction import ByDomainMean, CollectUploads, Mean, Rows, Total
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation, gather
from tests.simulator.conftest import make_population
from tests.simulator.device.nominal import DEVICE, on_device, placed

KEY = rng.key(3)
DRAWS = {
    "of many": lambda k: rng.sample(k, 1000, 40),
    "most": lambda k: rng.sample(k, 30, 20),
    "drawn again": lambda k: rng.sample(k, 9, 40, replace=True),
    "again where many are equal": lambda k: torch.stack([rng.sample(rng.fold(k, i), 17, 4) for i in range(20)]),
    "permutation": lambda k: rng.permutation(k, 12),
    "normal": lambda k: rng.normal(rng.fold(k, "x", 3), (4, 5)),
    "uniform at": lambda k: rng.uniform_at(k, torch.arange(3, 9, device=k.device)),
    "bernoulli": lambda k: rng.bernoulli(rng.fold(k, torch.arange(5, device=k.device)), 0.4, 6),
}


@pytest.mark.parametrize("what", DRAWS)
def test_draws_are_the_same_on_every_device(what):
    with placed():
        there = DRAWS[what](KEY.to(DEVICE))
        assert on_device(there)
        there = there.cpu()
    torch.testing.assert_close(there, DRAWS[what](KEY))  # whole numbers are equal; of others a device rounds as it does


def same(there, here):
    T.map(lambda a, b: torch.testing.assert_close(a.cpu(), b), there, here)


def uploads(device):
    """Two blocks of uploads, (3, ...) and (4, ...)."""
    draw = lambda *shape: rng.normal(rng.fold(KEY, *shape), shape).to(device)  # noqa: E731
    return [{"w": draw(n, 4, 3), "b": draw(n, 5)} for n in (3, 4)]


def rows(n, device):
    weight = torch.arange(1.0, n + 1, dtype=torch.float64)
    return Rows(weight.to(device), (torch.arange(n) % 2).to(device), torch.ones_like(weight).to(device))


REDUCTIONS = {
    "mean": (Mean(), lambda v: v),
    "unweighted": (Mean(weighted=False), lambda v: v),
    "total": (Total(), lambda v: v),
    "by domain": (ByDomainMean(), lambda v: v),
    "gram": (CollectUploads(), lambda s: s.gram()),
    "gram of differences": (CollectUploads(), lambda s: s.gram(ORIGIN)),
    "combine": (CollectUploads(), lambda s: s.combine(torch.linspace(-1, 1, 7, dtype=torch.float64))),
    "combined differences": (
        CollectUploads(),
        lambda s: s.combine(torch.linspace(-1, 1, 7, dtype=torch.float64), ORIGIN),
    ),
    "mean of what is kept": (CollectUploads(), lambda s: s.mean()),
    "median": (CollectUploads(), lambda s: s.median()),
    "trimmed mean": (CollectUploads(), lambda s: s.trimmed_mean(0.2)),
    "krum": (CollectUploads(), lambda s: s.krum(2, keep=2)),
}
ORIGIN = {"w": torch.full((4, 3), 0.5), "b": torch.arange(5.0)}


def reduced(reduction, end, device):
    """As a block on the device, the driver beside it and, of uploads that are kept, the device again."""
    blocks = [T.map(lambda t: t.to("cpu"), reduction.block(u, rows(len(u["b"]), device))) for u in uploads(device)]
    final = reduction.final(reduction.merge(*blocks))
    if isinstance(final, UploadMatrix):
        final = final._replace(device=torch.device(device))
    return end(final)


@pytest.mark.parametrize("what", REDUCTIONS)
def test_reductions(what):
    with placed() as watch:
        there = reduced(*REDUCTIONS[what], DEVICE)
        assert watch.seen
        assert not any(map(on_device, T.leaves(there)))
    same(there, reduced(*REDUCTIONS[what], "cpu"))


def combined(device):
    """Three clients' linear leaf of every kind of term, with numbers of each client's own, as client code makes one."""
    draw = lambda *shape: rng.normal(rng.fold(KEY, *shape), shape).to(device)  # noqa: E731
    ledger, weight = Ledger(3, Notes()), draw(4, 5)
    pairs = [ledger.outer("w", draw(3, r, 5), draw(3, r, 4), None) for r in (2, 3)]
    own = draw(3)
    terms = [(ledger.shared(weight), 0.5), (pairs[0], own), (pairs[1], 2.0)]
    made = Combination(3, weight, terms)
    return made.dense(), made.weighted_sum(own.double())


def test_combinations():
    with placed():
        there = combined(DEVICE)
        assert all(map(on_device, there))
    same(there, combined("cpu"))


@pytest.mark.parametrize(
    "rule", [optim.adam(), optim.adaptive("yogi"), optim.adagrad(), optim.sgd(momentum=0.9, clip_norm=1.0)]
)
def test_optimisers(rule):
    def moved(device):
        z = {"x": {"w": torch.linspace(-1, 1, 4).to(device)}}
        state = rule.init(z)
        for _ in range(2):
            d, state = rule.update(state, z, z)
            z = T.axpy(-0.1, d, z)
        return z["x"]["w"]

    with placed():
        there = moved(DEVICE)
        assert on_device(there)
    same(there, moved("cpu"))


def in_memory() -> InMemoryPopulation:
    return make_population((5, 9, 2, 7))


FEW = {"features": 3, "classes": 4, "test_examples": 2}
POPULATIONS = {
    "in memory": in_memory,
    "without some labels": lambda: in_memory().withholding(torch.arange(23) % 3 == 0),
    "held out": lambda: HeldOut(in_memory(), 0.3, 1),
    "synthetic": lambda: synthetic.load(synthetic.SyntheticOptions(examples=[3, 8], domains=2, **FEW), 4, 0).population,
    "grouped": lambda: synthetic.load(synthetic.SyntheticOptions(**FEW), 4, 0).population.grouped(torch.arange(4)),
}


@pytest.mark.parametrize("what", POPULATIONS)
def test_populations(what):
    def held(device):
        population, clients = POPULATIONS[what]().to(torch.device(device)), torch.tensor([3, 1]).to(device)
        local = population.local_data(clients)
        return gather(local.data, local.rows), *local[1:], population.num_examples(clients)

    with placed():
        there = held(DEVICE)
        assert all(map(on_device, T.leaves(there)))
    same(there, held("cpu"))
