"""KD3A: its votes and weights by hand, its rounds beside plain torch, and who takes part."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from adaptation import build, records, same, world
from harness import World, flat
from scipy.special import betaincinv
from torch import Tensor, nn

from fedfleet.algorithms.fact_work import net
from fedfleet.algorithms.kd3a import Kd3aOptions, weights
from fedfleet.algorithms.knowledge_vote import MOST, coalitions, shapley, values, vote
from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.work import Batch, BatchPlan
from fedfleet.tasks.stateful import Dropout
from fedfleet.tasks.two_heads_nets import NETS
from tests.parts import slow_but

ROWS = (
    ((0.95, 0.03, 0.02), (0.92, 0.05, 0.03), (0.10, 0.85, 0.05)),
    ((0.4, 0.35, 0.25), (0.2, 0.5, 0.3), (0.3, 0.3, 0.4)),
)
"""Probabilities of three sources for two examples, as the specification has them."""
SAYS = torch.tensor(ROWS, dtype=torch.float64).transpose(0, 1)
BOTH = torch.tensor([True, True])
NAN = torch.tensor(math.nan, dtype=torch.float64)
THREE = CohortOptions(size=3)


def focus(says: Tensor, gate: float) -> Tensor:
    members = coalitions(len(says), says.device)
    return shapley(values(vote(says, gate, members), BOTH), members)


def test_a_vote_by_hand():
    found = T.index(vote(SAYS, 0.9, coalitions(3, SAYS.device)), -1)
    assert found.confidence.tolist() == pytest.approx([1.87, 0.5], abs=1e-12)
    assert found.winner.tolist() == [0, 1]
    assert found.gated.tolist() == [True, False]


def test_the_value_of_each_coalition_and_the_focus_by_hand():
    members = coalitions(3, SAYS.device)
    worth = values(vote(SAYS, 0.9, members), BOTH)
    of = {tuple((m.nonzero().flatten() + 1).tolist()): float(v) for m, v in zip(members, worth, strict=True)}
    wanted = {(): 0, (1,): 0.95, (2,): 0.92, (3,): 0, (1, 2): 1.87, (1, 3): 0.95, (2, 3): 0.92, (1, 2, 3): 1.87}
    assert of == pytest.approx(wanted, abs=1e-12)
    assert focus(SAYS, 0.9).tolist() == pytest.approx([0.95, 0.92, 0], abs=1e-12)
    assert float(values(vote(SAYS, 0.9, members), torch.tensor([False, True]))[-1]) == 0  # padding


def test_the_weights_by_hand():
    mine, target = weights(focus(SAYS, 0.9), torch.tensor([1.0, 2.0]).double(), NAN.expand(3), NAN, 0.9)
    assert float(target) == 0.125
    assert mine.tolist() == pytest.approx([0.44451872, 0.43048128, 0], abs=5e-9)
    old = torch.tensor([0.2, math.nan, 0.6], dtype=torch.float64)  # the second was not heard before
    later, of_target = weights(
        focus(SAYS, 0.9), torch.tensor([1.0, 2.0]).double(), old, torch.tensor(0.2).double(), 0.9
    )
    assert later.tolist() == pytest.approx([0.18 + 0.044451872, 0.43048128, 0.54], abs=5e-9)
    assert float(of_target) == pytest.approx(0.18 + 0.0125)


def test_nobody_is_sure_enough():
    """Then nothing is used, the target weighs nothing, and the sources count the same."""
    found = vote(SAYS, 1.0, coalitions(3, SAYS.device))
    assert not found.gated.any()
    assert found.winner[-1].tolist() == [0, 1]  # all count
    assert found.confidence[-1].tolist() == pytest.approx([1.87, 0.5])
    assert focus(SAYS, 1.0).tolist() == [0, 0, 0]
    mine, target = weights(focus(SAYS, 1.0), torch.tensor([0.0, 2.0]).double(), NAN.expand(3), NAN, 0.9)
    assert float(target) == 0
    assert mine.tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_focus_is_that_of_all_orders_and_goes_with_its_source(n):
    says = rng.normal(rng.key(n), (n, 2, 4), torch.float64).mul(3).softmax(-1)
    found = focus(says, 0.6)
    members = coalitions(n, says.device)
    worth = {tuple(m.nonzero().flatten().tolist()): float(v) for m, v in
             zip(members, values(vote(says, 0.6, members), BOTH), strict=True)}  # fmt: skip
    wanted = [0.0] * n
    for order in itertools.permutations(range(n)):
        for place, i in enumerate(order):
            before = tuple(sorted(order[:place]))
            wanted[i] += (worth[tuple(sorted((*before, i)))] - worth[before]) / math.factorial(n)
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    assert float(found.sum()) == pytest.approx(worth[tuple(range(n))], abs=1e-12)
    assert focus(says.flip(0), 0.6).tolist() == pytest.approx(found.flip(0).tolist(), abs=1e-12)


def test_partners_are_a_permutation_of_the_real_rows():
    real = torch.tensor([True, False, True, True, False, True])
    seen = set()
    for seed in range(40):
        other = rng.partners(rng.key(seed), real)[real].tolist()
        assert sorted(other) == [0, 2, 3, 5]
        seen.add(tuple(other))
    assert len(seen) > 12  # of 24


# Rounds beside plain torch: nets and optimisers that are made once.

BATCH, LR, DECAY = 6, 0.3, 0.01
GIVEN: dict[str, Any] = {"batch_size": BATCH, "lr": LR, "gate": 0.3, "gate_end": 0.5, "rounds": 5}
SGD = {"optimizer": {"momentum": 0.9, "weight_decay": DECAY}}


class Client:
    """An extractor, a head and their optimiser."""

    def __init__(self, model: str, z: Any, head: Any):
        self.g, self.f = NETS[model]((1, 8, 8), 10, (8,))
        for layer in self.f:
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        self.g.double().load_state_dict({**z["x"], **net(z, "x")["b"]}, strict=False)
        self.f.double().load_state_dict({**head["w"], **head["b"]}, strict=False)
        self.fresh()

    def fresh(self) -> None:
        both = [*self.g.parameters(), *self.f.parameters()]
        self.optimizer = torch.optim.SGD(both, lr=LR, momentum=0.9, weight_decay=DECAY)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def says(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.g.eval()
            self.f.eval()
            found = self.f(self.g(x)).softmax(1)
        self.g.train()
        self.f.train()
        return found


def walk(where: World, t: int, exchange: int, client: int) -> Any:
    """The minibatches that the engine draws for a client."""
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    local = where.population.local_data(torch.tensor([client]))
    mine = rng.fold(rng.fold(key, torch.tensor([client]), torch.tensor([0])), "stage", 0)
    found = schedule(BatchPlan(size=BATCH, epochs=1), local.rows, local.counts, mine)
    return zip(found.rows[0], found.weight[0] > 0, found.key[0], strict=True)


def ballot(says: list[list[float]], gate: float) -> tuple[int, float, bool]:
    """Class, confidence and whether somebody is sure, of one example; ``says`` of each source."""
    sure = any(max(p) > gate for p in says)
    votes = dict.fromkeys(range(10), 0.0)
    for p in says:
        if not sure or max(p) > gate:
            votes[p.index(max(p))] += max(p)
    winner = max(votes, key=lambda c: votes[c])
    return winner, votes[winner], sure


class Run:
    """KD3A's rounds, an example and a coalition at a time."""

    def __init__(self, where: World, state: Any, task: dict[str, Any], options: dict[str, Any]):
        self.where, self.model, self.options = where, task.get("model", "mlp"), options
        self.double = task.get("double_softmax", True)
        self.clients: dict[int, Client] = {}
        self.weight: dict[int | str, float] = {}
        self.state, self.g = state, None
        self.target = self.client(4, net(state.z, "head"))

    def client(self, c: int, head: Any = None) -> Client:
        if c not in self.clients:
            seed = int(rng.bits(rng.fold(self.state.key, c))) % 2**31
            head = T.map(torch.Tensor.double, net(self.where.task.init(seed), "head")) if head is None else head
            self.clients[c] = Client(self.model, self.state.z, head)
        return self.clients[c]

    def scores(self, net: Client, x: Tensor) -> Tensor:
        scores = net.f(net.g(x))
        return scores.softmax(1) if self.double else scores

    def start(self, c: int) -> Client:
        me = self.client(c)
        if self.g is not None:
            me.g.load_state_dict(self.g)
        if self.options.get("optimizer_state") == "reset":
            me.fresh()
        return me

    def round(self, t: int, heard: list[int]) -> None:
        x, y = (self.where.population.data[k] for k in ("x", "y"))
        for c in heard:
            me = self.start(c)
            for rows, real, _ in walk(self.where, t, 0, c):
                me.step(nn.functional.cross_entropy(self.scores(me, x[rows[real]]), y[rows[real]]))
        first, last = (self.options[k] for k in ("gate", "gate_end"))
        gate, me = first + (last - first) * t / 5, self.start(4)
        value = {s: 0.0 for k in range(len(heard) + 1) for s in itertools.combinations(heard, k)}
        used = count = 0
        for rows, real, key in walk(self.where, t, 1, 4):
            batch = x[rows]
            says = {c: self.clients[c].says(batch).tolist() for c in heard}
            soft, q = torch.zeros(len(rows), 10).double(), torch.zeros(len(rows)).double()
            for i in real.nonzero().flatten().tolist():
                winner, _, sure = ballot([says[c][i] for c in heard], gate)
                soft[i, winner], q[i] = 1, sure
                for s in value:
                    if s:
                        _, confidence, sure = ballot([says[c][i] for c in s], gate)
                        value[s] += confidence * sure
            used, count = used + int(q.sum()), count + int(real.sum())
            mix = rng.fold(key, "mix")
            share = betaincinv(2, 2, float(rng.uniform(rng.fold(mix, "share"), (), torch.float64)))
            other = rng.partners(rng.fold(mix, "partner"), real)
            share = share if self.options.get("mixup", True) else 1.0
            mixed, classes = (share * v + (1 - share) * v[other] for v in (batch, soft))
            logs = self.scores(me, mixed[real]).log_softmax(1)
            me.step((q[real] * -(classes[real] * logs).sum(1)).sum() / int(real.sum()))
        self.average(heard, value, used / count)

    def average(self, heard: list[int], value: dict[tuple[int, ...], float], used: float) -> None:
        n = len(heard)
        focus = dict.fromkeys(heard, 0.0)
        for order in itertools.permutations(heard):
            for place, c in enumerate(order):
                before = tuple(h for h in heard if h in order[:place])
                focus[c] += (value[tuple(h for h in heard if h in (*before, c))] - value[before]) / math.factorial(n)
        target, total = used / (n + 1), sum(focus.values())
        new: dict[int | str, float] = {c: (1 - target) * (f / total if total else 1 / n) for c, f in focus.items()}
        new["target"] = target
        for who, w in new.items():
            self.weight[who] = 0.9 * self.weight[who] + 0.1 * w if who in self.weight else w
        shares = {4 if who == "target" else who: self.weight[who] for who in new}
        states = {c: copy.deepcopy(self.clients[int(c)].g.state_dict()) for c in shares}
        self.g = {
            k: sum(w * states[c][k] for c, w in shares.items()) / sum(shares.values())
            for k in next(iter(states.values()))
        }


def plainly(where: World) -> World:
    for layer in where.task._nets.head.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    return where


@pytest.mark.parametrize(
    ("options", "task"),
    [
        ({}, {"double_softmax": False}),
        ({"mixup": False, "optimizer_state": "reset"}, {}),
        ({"gate": 0.99, "gate_end": 0.999}, {"model": "digits_small", "double_softmax": False}),
    ],
    ids=["default", "reset, no mixup", "statistics"],
)
def test_rounds_are_those_of_torch(options, task):
    """Three of four sources a round, so that one is new later on, and weights of those away stay."""
    where = plainly(world(dtype=torch.float64, **task))
    options = {**GIVEN, **SGD, **options}
    algorithm = build(where.task, "kd3a", THREE, **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    first = algorithm.init(z, rng.fold(rng.key(0), "init"), problem(where.population))
    run, used, seen = Run(where, first, task, options), set(), []
    for r in records(algorithm, where, 5, z=z):
        heard = r.phases[0].clients.tolist()
        seen.append(set(heard))
        run.round(r.index, heard)
        found = net(r.state.z, "x")
        for name, v in {**found["w"], **found["b"]}.items():
            torch.testing.assert_close(v, run.g[name], rtol=1e-6, atol=1e-9, msg=f"round {r.index}, {name}")
        head = net(r.state.z, "head")
        for name, v in {**head["w"], **head["b"]}.items():
            torch.testing.assert_close(v, run.target.f.state_dict()[name], rtol=1e-6, atol=1e-9, msg=name)
        for c in range(4):
            assert float(r.state.weight[c]) == pytest.approx(run.weight.get(c, math.nan), rel=1e-9, nan_ok=True)
        assert float(r.state.of_target) == pytest.approx(run.weight["target"])
        used.add(r.metrics["used"])
    assert seen[0] != set.union(*seen) == {0, 1, 2, 3}
    assert any(0 < u < 1 for u in used), used


def test_messages():
    """An extractor down and a model up of a source; of a target the sources' models, and what it answers with."""
    where = world(model="digits_small")
    z = where.task.init(0)
    d, h, n = T.count(net(z, "x")), T.count(net(z, "head")), 3
    algorithm = build(where.task, "kd3a", THREE, gate_end=0.9)
    for r in records(algorithm, where, 4):
        counts = [(p.counts["floats_down"], p.counts["floats_up"]) for p in r.phases]
        source, target = counts
        assert source[1] == n * (d + h)
        assert source[0] in (n * d, n * (d + h))  # with an initial head where somebody has none
        assert (source[0] == n * (d + h)) == (r.index == 0) or r.index > 0
        assert target == ((n + 1) * (d + h), d + h + n + 2)
    assert source[0] == n * d


def test_heads_of_sources_begin_apart_and_stay_their_own():
    where = world(dtype=torch.float64)
    z = T.map(torch.Tensor.double, where.task.init(0))
    algorithm = build(where.task, "kd3a", THREE, lr=1e-12, gate_end=0.9, optimizer={})
    heads = {}
    for r in records(algorithm, where, 3, z=z):
        assert same(T.map(lambda v: v.round(decimals=9), r.state.z), T.map(lambda v: v.round(decimals=9), z))
        heads[r.index] = r.state
    assert not torch.equal(*(where.task.init(s)["head"]["0.weight"] for s in (1, 2)))


def test_a_gate_of_1_leaves_the_target_alone():
    """The sources average as equals, and the target's head does not move."""
    where = world(dtype=torch.float64)
    z = T.map(torch.Tensor.double, where.task.init(0))
    algorithm = build(where.task, "kd3a", CohortOptions(size=4), gate=1.0, gate_end=1.0, optimizer={"momentum": 0.9})
    for r in records(algorithm, where, 2, z=z):
        assert r.metrics == {"used": 0.0, "target_weight": 0.0}
        assert r.state.weight[:4].tolist() == pytest.approx([0.25] * 4)
        assert same(net(r.state.z, "head"), net(z, "head"))
        assert not same(net(r.state.z, "x"), net(z, "x"))


def test_the_gate_rises_over_the_rounds_of_the_run():
    options = Kd3aOptions.model_validate({}, context={"rounds": 20})
    assert options.rounds == 20
    assert [options.gate_at(t) for t in (0, 10, 20)] == pytest.approx([0.9, 0.925, 0.95])
    with pytest.raises(ValueError, match=r"gate_end=0\.5 is below gate=0\.9"):
        Kd3aOptions(gate_end=0.5)


@pytest.mark.parametrize(
    ("options", "size", "targets", "says"),
    [
        ({}, MOST + 1, (4,), f"cohort.size={MOST + 1}: kd3a weighs every coalition"),
        ({}, 5, (4,), "cohort.size=5: there are 4 source clients"),
        ({}, 3, (), "algorithm.name='kd3a': there is no target client"),
        ({"targets": 2}, 3, (4,), "algorithm.targets=2: there are 1 target clients"),
        ({"gate_end": 0.95}, 3, (4,), "algorithm.gate_end=0.95: the gate rises"),
    ],
)
def test_what_is_refused(options, size, targets, says):
    where = world(targets=targets)

    def begun() -> None:
        made = build(where.task, "kd3a", CohortOptions(size=size), **{"gate_end": 0.9, **options})
        made.init(where.task.init(0), rng.key(0), problem(where.population))

    with pytest.raises(ConfigError, match=says):
        begun()


def test_rounds_with_clients_away():
    """Sources that are not heard have no vote; rounds without a target are begun anew."""
    where = world(targets=(3, 4))
    federation = Federation(availability=Bernoulli(rate=0.6))
    algorithm = build(where.task, "kd3a", THREE, gate=0.2, gate_end=0.2)
    sizes = set()
    for r in records(algorithm, where, 12, federation=federation, attempts=200):
        assert all(leaf.isfinite().all() for leaf in T.leaves(r.state.z))
        sizes.add(next(p for p in reversed(r.phases) if p.phase == "source").counts["completed"])
        assert 0 <= r.metrics["target_weight"] < 1
    assert sizes == {1, 2, 3}


@pytest.mark.parametrize("inner", slow_but(["batched", "factored"], "batched"))
def test_many_at_once_are_one_at_a_time(inner):
    """Clients of very different sizes, and two targets."""
    where = world((30, 17, 24, 4, 21), (1, 4), dtype=torch.float64)
    algorithm = build(where.task, "kd3a", THREE, **GIVEN, epochs=2)
    z = T.map(torch.Tensor.double, where.task.init(0))
    one, many = ([r.state for r in records(algorithm, where, 3, z=z, inner=i)] for i in ("serial", inner))
    torch.testing.assert_close(flat(one[-1].z), flat(many[-1].z), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(one[-1].weight, many[-1].weight, rtol=1e-7, atol=0, equal_nan=True)


def test_the_loss_of_the_target_by_hand():
    """Rows that nobody is sure of count in the number of rows alone."""
    task = world(double_softmax=False).task
    z = task.init(0)
    x = rng.normal(rng.key(1), (3, 1, 8, 8))
    soft = torch.tensor([[0.75, 0.25], [0.0, 1.0], [1.0, 0.0]])
    soft = torch.cat([soft, torch.zeros(3, 8)], 1)
    batch = Batch({"x": x}, torch.tensor([1.0, 1.0, 0.0]))
    ctx = {"soft": soft, "used": torch.tensor([1.0, 0.0, 1.0])}
    value, _ = task.objectives["distil"].loss(z, batch, ctx, rng.key(0))
    logs = task.functions["predict"](z, batch).log_softmax(1)[0]
    assert float(value) == pytest.approx(float(-(0.75 * logs[0] + 0.25 * logs[1]) / 2), rel=1e-6)
