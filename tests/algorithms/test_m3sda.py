"""M3SDA: the distance of moments by hand, and its rounds beside plain torch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from adaptation import build, records, same, world
from harness import World
from torch import Tensor, nn

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import BatchPlan
from fedfleet.tasks.moments import distance
from fedfleet.tasks.two_heads_nets import NETS

ONE = CohortOptions(size=1)
ROWS = torch.tensor([[0.0, 0], [1, 0], [1, 1], [3, 1], [0, 1], [2, 2]], dtype=torch.float64)
"""Two sources of two rows each, and a target of two, as the specification has them."""
OF = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1], [0, 0], [0, 0]]).bool()
TARGET = ~OF.any(1)


def of(features: Tensor, weights: list[float], domain: Tensor = OF, target: Tensor = TARGET) -> float:
    return float(distance(features, domain, target, torch.tensor(weights, dtype=torch.float64)))


def test_the_distance_by_hand():
    assert of(ROWS, [1, 1]) == pytest.approx(4.42264675, abs=5e-9)
    assert of(ROWS, [2, 0.5]) == pytest.approx(2 * of(ROWS, [1]) + 0.5 * of(ROWS, [0, 1]))


def test_padding_and_domains_that_are_away_count_for_nothing():
    padded = torch.cat([ROWS, torch.full((1, 2), torch.nan).double()])
    none = torch.zeros(1, 2).bool(), torch.zeros(1).bool()
    assert of(padded, [1, 1], torch.cat([OF, none[0]]), torch.cat([TARGET, none[1]])) == of(ROWS, [1, 1])
    third = torch.cat([OF, torch.zeros(6, 1).bool()], 1)
    assert of(ROWS, [1, 1], third) == of(ROWS, [1, 1])
    alone = OF & torch.tensor([True, False])  # one source: there is no pair
    m, t = ROWS[:2].mean(0), ROWS[4:].mean(0)
    assert of(ROWS, [1], alone) == pytest.approx(float((m - t).norm()))


def test_equal_domains_are_no_distance_apart_and_have_a_gradient():
    features = ROWS[:2].repeat(3, 1).requires_grad_()
    value = distance(features, OF, TARGET, torch.ones(3).double())
    assert float(value) == 0
    assert (torch.autograd.grad(value, features)[0] == 0).all()
    apart = ROWS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distance(x, OF, TARGET, torch.ones(3).double()), apart)


BATCH, LR = 9, 0.05


def centralised(sizes: tuple[int, ...] = (16, 9, 14)) -> World:
    """One client that holds two sources and a target, which is the first by number."""
    where = world((sum(sizes),), (), dtype=torch.float64, double_softmax=False)
    data = where.population.data
    domain = torch.arange(3).repeat_interleave(torch.tensor(sizes))[rng.permutation(rng.key(4), sum(sizes))]
    plain = InMemoryPopulation(
        {"x": data["x"] + 0.3 * domain[:, None, None, None], "y": data["y"]},
        torch.arange(sum(sizes)),
        torch.tensor([0, sum(sizes)]),
        torch.zeros(1, dtype=torch.int64),
    )
    return World(where.task, plain.withholding(domain == 0).telling(domain))


def test_rows_say_their_domain_and_lie_by_it():
    population = centralised().population
    assert population.by_domain.tolist() == [[9, 14, 16]]
    rows = population.indices
    assert population.data["domain"][rows].to(torch.int64).argmax(1).tolist() == [0] * 9 + [1] * 14 + [2] * 16
    assert population.data["target"][rows].tolist() == [False] * 23 + [True] * 16


def test_rounds_are_those_of_torch():
    where, moments, penalty = centralised(), 4, 0.2
    adam = {"name": "adam", "eps": 1e-3, "weight_decay": 0.01}
    options = {"batch_size": BATCH, "lr": LR, "generator_steps": 2, "epochs": 1, "optimizer": adam}
    algorithm = build(where.task, "m3sda", ONE, moments=moments, penalty=penalty, **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    first = algorithm.init(z, rng.fold(rng.key(0), "init"), problem(where.population))
    g, f = NETS["mlp"]((1, 8, 8), 10, (8,))
    heads = f.double(), copy.deepcopy(f)
    for part, net in zip(("x", "head", "second"), (g.double(), *heads), strict=True):
        net.load_state_dict(first[part])
    given = {"lr": LR, "eps": 1e-3, "weight_decay": 0.01}
    of_g = torch.optim.Adam(g.parameters(), **given)
    of_heads = torch.optim.Adam([p for h in heads for p in h.parameters()], **given)
    held = where.population.local_data(torch.tensor([0]))
    x, y = (where.population.data[k] for k in ("x", "y"))

    def entropies(parts: list[Tensor]) -> Tensor:
        return sum(nn.functional.cross_entropy(h(g(x[rows])), y[rows]) for rows in parts[:2] for h in heads)

    def apart(parts: list[Tensor]) -> Tensor:
        one, two = (h(g(x[parts[2]])).softmax(1) for h in heads)
        return (one - two).abs().mean()

    def md(parts: list[Tensor]) -> Tensor:
        features, total = [g(x[rows]) for rows in parts], 0.0
        for k in range(1, moments + 1):
            e = [(v if k == 1 else v - v.mean(0)).pow(k).mean(0) for v in features]
            total = total + sum((e[i] - e[2]).norm() for i in (0, 1)) / 2
            total = total + sum((a - b).norm() for a, b in itertools.combinations(e[:2], 2))
        return total

    def step(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        for o in (of_g, of_heads):
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()

    for r in records(algorithm, where, 2, z=z):
        key = rng.fold(rng.key(0), "client", r.index, 0)
        mine = rng.fold(rng.fold(key, torch.tensor([0]), torch.tensor([0])), "stage", 0)
        plan = BatchPlan(size=BATCH, epochs=1, stratified="domains")
        walk = schedule(plan, held.rows, held.counts, mine, by_domain=held.by_domain)
        for rows, weight in zip(walk.rows[0], walk.weight[0], strict=True):
            parts = list(rows[weight > 0].split(3))
            assert [len(p) for p in parts] == [3, 3, 3]
            step(entropies(parts) + penalty * md(parts), of_g, of_heads)
            step(entropies(parts) - apart(parts), of_heads)
            for _ in range(2):
                step(apart(parts), of_g)
        for part, net in zip(("x", "head", "second"), (g, *heads), strict=True):
            for name, v in net.state_dict().items():
                torch.testing.assert_close(r.state[part][name], v, rtol=1e-6, atol=1e-9)


def test_the_first_head_is_evaluated_alone():
    where = world(model="digits_small")
    algorithm = build(where.task, "m3sda", ONE)
    z = algorithm.init(where.task.init(0), rng.key(0), None)
    seen = algorithm.views["global"].params(z)
    assert same(seen["head"], z["head"])
    assert list(seen) == ["x", "head", "b"]
    assert set(seen["b"]) == set(where.task.init(0)["b"])
