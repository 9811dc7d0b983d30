"""MCD beside a version of its own in plain torch, and as an algorithm of the engine."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from adaptation import PAIR, build, population, records, same, world
from harness import World, flat
from torch import nn

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.work import Batch, BatchPlan, StepInfo
from fedfleet.tasks.stateful import Dropout
from fedfleet.tasks.two_heads_nets import NETS
from tests.parts import slow_but

ONE = CohortOptions(size=1)
BATCH, LR, EPOCHS = 12, 0.05, 2
RULES = {
    "sgd": ({"momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adam": ({"name": "adam", "eps": 1e-3}, torch.optim.Adam, {"eps": 1e-3}),
}


def mixed(sizes: tuple[int, ...], **task) -> World:
    """Clients a third of whose examples have no labels."""
    where = world(sizes, (), dtype=torch.float64, **task)
    data = {k: v for k, v in where.population.data.items() if k != "target"}
    hidden = torch.arange(sum(sizes)) % 3 == 0
    plain = replace(population(data["x"], data["y"], sizes, ()), data=data, labelled=None)
    for layer in where.task._nets.head.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    return World(where.task, plain.withholding(hidden))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "task", slow_but([{"double_softmax": False}, {"model": "digits_small"}], {"model": "digits_small"})
)
def test_rounds_are_those_of_torch(rule, task):
    where = mixed((40,), **task)
    ours, make, theirs = RULES[rule]
    algorithm = build(where.task, "mcd", ONE, epochs=EPOCHS, batch_size=BATCH, lr=LR, generator_steps=3, optimizer=ours)
    z = T.map(torch.Tensor.double, where.task.init(0))
    first = algorithm.init(z, rng.fold(rng.key(0), "init"), None)
    assert not same(first["head"], first["second"])
    g, f = NETS[task.get("model", "mlp")]((1, 8, 8), 10, (8,))
    for layer in f:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    heads = f.double(), copy.deepcopy(f)
    nets = dict(zip(("x", "head", "second"), (g.double(), *heads), strict=True))
    for part, net in nets.items():
        net.load_state_dict(first[part], strict=False)
    of_g = make(g.parameters(), lr=LR, **theirs)
    of_heads = make([p for h in heads for p in h.parameters()], lr=LR, **theirs)
    held = where.population.local_data(torch.tensor([0]))
    x, y, target = (where.population.data[k] for k in ("x", "y", "target"))
    double = task.get("double_softmax", True)

    def entropies(rows):
        features = g(x[rows])
        scores = [h(features) for h in heads]
        return sum(nn.functional.cross_entropy(s.softmax(1) if double else s, y[rows]) for s in scores)

    def apart(rows):
        features = g(x[rows])
        one, two = (h(features).softmax(1) for h in heads)
        if double:
            one, two = one.softmax(1), two.softmax(1)
        return (one - two).abs().mean()

    def step(loss, *optimizers):
        for o in (of_g, of_heads):
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()

    for r in records(algorithm, where, 2, z=z):
        key = rng.fold(rng.key(0), "client", r.index, 0)
        mine = rng.fold(rng.fold(key, torch.tensor([0]), torch.tensor([0])), "stage", 0)
        plan = BatchPlan(size=BATCH, epochs=EPOCHS, stratified="proportional")
        walk = schedule(plan, held.rows, held.counts, mine, labelled=held.labelled)
        for rows, weight in zip(walk.rows[0], walk.weight[0], strict=True):
            batch = rows[weight > 0]
            labelled, others = batch[~target[batch]], batch[target[batch]]
            assert len(labelled) > len(others) > 0
            step(entropies(labelled), of_g, of_heads)
            step(entropies(labelled) - apart(others), of_heads)
            for _ in range(3):
                step(apart(others), of_g)
        for part, net in nets.items():
            found = dict(r.state[part])
            seen = {n.removeprefix(f"{part}."): v for n, v in r.state.get("b", {}).items() if n.startswith(f"{part}.")}
            for name, v in {**found, **seen}.items():
                torch.testing.assert_close(v, net.state_dict()[name], rtol=1e-6, atol=1e-9, msg=f"{part}.{name}")


@pytest.mark.parametrize("inner", ["batched", "factored"])
def test_many_at_once_are_one_at_a_time(inner):
    where = mixed((30, 17, 24, 9))
    given = {"steps": 3, "optimizer": {"momentum": 0.9}}
    algorithm = build(where.task, "mcd", CohortOptions(size=3), **given)
    z = T.map(torch.Tensor.double, where.task.init(0))
    one, many = ([r.state for r in records(algorithm, where, 3, z=z, inner=i)] for i in ("serial", inner))
    torch.testing.assert_close(flat(one[-1]), flat(many[-1]), rtol=1e-7, atol=1e-9)


def test_a_client_without_one_kind_moves_by_the_other():
    """Sources alone train, and targets alone bring heads together; a mean of both is no crash."""
    where = world(dtype=torch.float64)
    algorithm = build(where.task, "mcd", PAIR, steps=2)
    z = T.map(torch.Tensor.double, where.task.init(0))
    states = [r.state for r in records(algorithm, where, 4, z=z)]
    assert all(leaf.isfinite().all() for leaf in T.leaves(states[-1]))


def test_second_heads_are_of_the_seed():
    where = world()
    algorithm = build(where.task, "mcd", ONE)
    a, b, c = (algorithm.init(where.task.init(0), rng.key(k), None) for k in (1, 1, 2))
    assert same(a, b)
    assert same(a["head"], c["head"])
    assert not same(a["second"], c["second"])
    assert list(world(model="digits_small").task.init(0)) == ["x", "head", "b"]


def test_each_turn_draws_its_own():
    """Dropout of the three steps, and of each time that the last is taken, has another mask."""
    made, keys = build(world().task, "mcd", ONE, generator_steps=3), []

    class Noting:
        def grad(self, name, z, batch, key, *, wrt, ctx=None):
            keys.append((name, int(key)))
            return {part: {} for part in wrt}, {}

        def step(self, name, z, lr, direction):
            return z

    z = {"x": {}, "head": {}, "second": {}}
    work = made.phases[0].work
    local = work.client_init({"z": z}, None, None, rng.key(1))
    at = StepInfo(0, torch.tensor(0), torch.tensor(False), torch.tensor(5))
    work.loops[0].step(Noting(), {"lr": 0.1}, local, Batch({}, torch.ones(2)), at, rng.key(2))
    assert [name for name, _ in keys] == ["train", "discord", "idd", "idd", "idd"]
    assert len({key for _, key in keys}) == 5


def test_what_it_is():
    made = build(world().task, "mcd", ONE, generator_steps=1)
    assert (made.roles, made.buffers, made.minimises, made.requires) == (True, True, True, ("x", "head"))
    assert ALGORITHMS["mcd"].options().generator_steps == 4
