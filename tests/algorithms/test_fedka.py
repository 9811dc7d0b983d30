"""FedKA: its discrepancy and votes by hand, and its rounds beside plain torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from adaptation import population, records
from harness import World, build
from torch import Tensor, nn

from fedfleet.algorithms.fedka import FedKaOptions, majority, weight_at
from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.datasets.digits import load
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.work import Batch, BatchPlan
from fedfleet.tasks.kernels import mk_mmd
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

ROWS = torch.tensor([[0.0, 0], [1, 0], [0, 1], [2, 2]], dtype=torch.float64)
ONE = torch.tensor([True, True, False, False])
THREE = CohortOptions(size=3)


def test_the_discrepancy_by_hand():
    assert float(mk_mmd(ROWS, ONE, ~ONE)) == pytest.approx(3.14831466, abs=5e-9)
    assert float(mk_mmd(ROWS, ~ONE, ONE)) == pytest.approx(3.14831466, abs=5e-9)
    padded = torch.cat([ROWS, torch.full((1, 2), torch.nan).double()])
    none = torch.tensor([False])
    found = mk_mmd(padded, torch.cat([ONE, none]), torch.cat([~ONE, none]))
    assert float(found) == pytest.approx(3.14831466, abs=5e-9)


def test_equal_samples_are_no_distance_apart():
    twice = ROWS[:2].repeat(2, 1)
    assert float(mk_mmd(twice, ONE, ~ONE)) == pytest.approx(0, abs=1e-15)
    assert float(mk_mmd(twice * 0, ONE, ~ONE)) == pytest.approx(0, abs=1e-15)  # no width
    assert float(mk_mmd(ROWS, ONE, ~ONE & ONE)) == 0  # nobody to compare with


def test_the_width_of_kernels_is_no_part_of_the_gradient():
    """Scaling all features leaves the value, and so the derivative would be 0."""
    x = ROWS.clone().requires_grad_()
    (d,) = torch.autograd.grad(mk_mmd(x, ONE, ~ONE), x)
    assert float((d * ROWS).sum()) != pytest.approx(0, abs=1e-3)
    assert float(mk_mmd(3 * ROWS, ONE, ~ONE)) == pytest.approx(float(mk_mmd(ROWS, ONE, ~ONE)))


def test_the_majority_and_the_least_of_equal_ones():
    says = torch.eye(4)[torch.tensor([[3, 2], [1, 2], [3, 0], [1, 0]])]
    assert majority(says).tolist() == [1, 0]
    assert majority(says[:3]).tolist() == [3, 2]


def test_alpha_rises():
    like = torch.zeros((), dtype=torch.float64)
    assert float(weight_at(0, 32, 200, like, like)) == 0
    p = (5 + 32 * 100) / (32 * 200)
    assert float(weight_at(5, 32, 200, like + 100, like)) == pytest.approx(2 / (1 + math.exp(-5 * p)) - 1)


SIZES, TARGETS = (20, 14, 17, 16, 12), (3,)
STEPS, PAIRS, EVERY, VOTES, BATCH, LR, ROUNDS = 3, 4, 2, 3, 8, 0.01, 3


def world() -> World:
    """Four sources that hold the target's images, and the target."""
    data = load(None).train  # type: ignore[arg-type]
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    x = data.x[: len(owner)].double() + 0.2 * owner[:, None, None, None]
    entry = TASKS["domain_adaptation"]
    task = entry.build(entry.options(hidden=(6,)), DataShape((1, 8, 8), 10))
    return World(task, population(x, data.y, SIZES, TARGETS).sharing().telling(owner))


def made(where: World, **options: Any) -> Any:
    given = {"steps": STEPS, "pairs": PAIRS, "every": EVERY, "votes": VOTES, "batch_size": BATCH, "lr": LR}
    return build("fedka", where.task, THREE, **{**given, "rounds": ROUNDS, **options})


def test_sources_hold_the_targets_examples_too():
    held = world().population
    assert held.num_examples(torch.arange(5)).tolist() == [36, 30, 33, 16, 28]
    assert held.labelled.tolist() == [20, 14, 17, 0, 12]
    assert held.by_domain[0].tolist() == [20, 0, 0, 0, 16]
    local = held.local_data(torch.tensor([1]))
    assert held.data["target"][local.rows[0]].tolist() == [False] * 14 + [True] * 16


class Nets:
    """Extractor, head, adversary, and their optimiser."""

    def __init__(self, z: Any):
        self.names = {**{n: ("x", n) for n in z["x"]}, **{f"adversary.{n}": ("y", n) for n in z["y"]}}
        self.load(z)
        self.optimizer = torch.optim.Adam(self.p.values(), lr=LR)

    def load(self, z: Any) -> None:
        if not hasattr(self, "p"):
            self.p = {n: z[part][leaf].clone().requires_grad_() for n, (part, leaf) in self.names.items()}
        with torch.no_grad():
            for n, (part, leaf) in self.names.items():
                self.p[n].copy_(z[part][leaf])

    def tree(self) -> Any:
        found: dict[str, dict[str, Tensor]] = {"x": {}, "y": {}}
        for n, (part, leaf) in self.names.items():
            found[part][leaf] = self.p[n].detach().clone()
        return found

    def step(self, value: Tensor) -> None:
        for p in self.p.values():
            p.grad = torch.zeros_like(
                p
            )  # so that Adam moves all by their momentum, as it did when zeroed gradients were zeros
        value.backward()
        self.optimizer.step()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.alpha * grad[0], None


def features(task: Any, z: Any, x: Tensor) -> Tensor:
    return task.features(z, x)


def walks(where: World, t: int, exchange: int, client: int, stage: int, plan: BatchPlan) -> list[list[Tensor]]:
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    local = where.population.local_data(torch.tensor([client]))
    mine = rng.fold(rng.fold(key, torch.tensor([client]), torch.tensor([0])), "stage", stage)
    found = schedule(plan, local.rows, local.counts, mine, by_domain=local.by_domain)
    return [
        [b[w > 0] for b, w in zip(r.chunk(plan.per_step), v.chunk(plan.per_step), strict=True)]
        for r, v in zip(found.rows[0], found.weight[0], strict=True)
    ]


def alpha(i: int, n: int, t: int) -> float:
    return 2 / (1 + math.exp(-5 * (i + n * t) / (n * ROUNDS))) - 1


def kernel_distance(a: Tensor, b: Tensor) -> Tensor:
    rows = torch.cat([a, b])
    squares = torch.stack([((r - rows) ** 2).sum(1) for r in rows])
    width = squares.detach().sum() / (len(rows) ** 2 - len(rows)) / 4
    k = sum(torch.exp(-squares / (width * 2**i)) for i in range(5))
    n = len(a)
    return (k[:n, :n] + k[n:, n:] - k[:n, n:] - k[n:, :n]).mean()


@pytest.mark.parametrize("authors", [False, True])
def test_rounds_are_those_of_torch(authors):
    where = world()
    task, data = where.task, where.population.data
    algorithm = made(where, authors=authors)
    z = T.map(torch.Tensor.double, task.init(0))
    clients = {c: Nets(z) for c in range(5)}
    start, glob = z, z
    by_domain = {"size": BATCH, "stratified": "domains"}

    def scores(me: Nets, x: Tensor) -> tuple[Tensor, Tensor]:
        tree = {"x": {leaf: me.p[n] for n, (part, leaf) in me.names.items() if part == "x"}}
        found = task.features(tree, x)
        return found, task.logits(tree, found)

    def told(me: Nets, found: Tensor, a: float) -> Tensor:
        tree = {"x": {}, "y": {leaf: me.p[n] for n, (part, leaf) in me.names.items() if part == "y"}}
        return task.judged(tree, Reversed.apply(found, torch.tensor(a)), found)[:, 0]

    for r in records(algorithm, where, ROUNDS, z=z):
        heard = r.phases[0].clients.tolist()
        for c in heard:
            me = clients[c]
            me.load(start)
            plan = BatchPlan(steps=STEPS, **by_domain)
            for k, (rows,) in enumerate(walks(where, r.index, 0, c, 0, plan)):
                s, t = rows.split(BATCH // 2)
                assert not data["target"][s].any()
                assert data["target"][t].all()
                (of_s, said), (of_t, _) = scores(me, data["x"][s]), scores(me, data["x"][t])
                a = alpha(k, STEPS, r.index)
                domain = nn.functional.softplus(told(me, of_s, a)).mean()
                domain = domain + nn.functional.softplus(-told(me, of_t, a)).mean()
                me.step(nn.functional.cross_entropy(said, data["y"][s]) + domain)
            plan = BatchPlan(steps=PAIRS // EVERY, per_step=EVERY, **by_domain)
            for k, batches in enumerate(walks(where, r.index, 0, c, 1, plan)):
                value = torch.zeros(()).double()
                for i, rows in enumerate(batches):
                    s, t = rows.split(BATCH // 2)
                    other = task.features(glob, data["x"][t]).detach()
                    term = alpha(k * EVERY + i, PAIRS, r.index) * kernel_distance(scores(me, data["x"][s])[0], other)
                    value = term / EVERY if authors else value + term / EVERY
                me.step(value)
        mean = T.mean([clients[c].tree() for c in heard])
        cloud = clients[3]
        cloud.load(mean)
        for k, (rows,) in enumerate(walks(where, r.index, 1, 3, 0, BatchPlan(size=BATCH // 2, steps=VOTES))):
            says = [scores(clients[c], data["x"][rows])[1].argmax(1).tolist() for c in heard]
            winner = [min(set(v), key=lambda w: (-v.count(w), w)) for v in zip(*says, strict=True)]
            a = alpha(k, VOTES, r.index)
            cloud.step(a * nn.functional.cross_entropy(scores(cloud, data["x"][rows])[1], torch.tensor(winner)))
        glob = cloud.tree()
        start = mean if authors else copy.deepcopy(glob)
        for ours, theirs in ((r.state.z, start), (r.state.voted, glob)):
            for (name, a_), b in zip(T.named_leaves(ours), T.leaves(theirs), strict=True):
                torch.testing.assert_close(a_, b, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_messages():
    where = world()
    d = T.count(where.task.init(0))
    for authors, down in ((False, d), (True, 2 * d)):
        (r,) = records(made(where, authors=authors), where, 1, z=T.map(torch.Tensor.double, where.task.init(0)))
        counts = [(p.counts["floats_down"], p.counts["floats_up"]) for p in r.phases]
        assert counts == [(3 * down, 3 * d), (4 * d, d)]
    (r,) = records(made(where, votes=0), where, 1, z=T.map(torch.Tensor.double, where.task.init(0)))
    assert [p.phase for p in r.phases] == ["source"]
    assert r.state.z is r.state.voted


def test_the_adversary_descends_its_own_loss_and_the_extractor_climbs_it():
    task = world().task
    z = T.map(torch.Tensor.double, task.init(0))
    x = rng.normal(rng.key(2), (4, 1, 8, 8), torch.float64)
    data = {"x": x, "y": torch.tensor([1, 2, -1, -1]), "target": torch.tensor([False, False, True, True])}
    batch = Batch(data, torch.ones(4).double())
    zero, one = (
        task.objectives["reversed"].loss(z, batch, {"alpha": torch.tensor(a).double()}, rng.key(0))[0]
        for a in (0.0, 1.0)
    )
    assert float(zero["y"]) == float(one["y"])
    assert float(one["x"]) == pytest.approx(float(zero["x"]) - float(one["y"]))


def test_what_is_refused():
    where = world()
    plain = World(where.task, population(*(where.population.data[k] for k in ("x", "y")), SIZES, TARGETS))

    def begun(at: World, size: int = 3, **options: Any) -> None:
        algorithm = build("fedka", at.task, CohortOptions(size=size), **{"rounds": 3, **options})
        algorithm.init(at.task.init(0), rng.key(0), problem(at.population))

    begun(where)
    for at, given, says in (
        (plain, {}, "domains.share_target=false"),
        (where, {"size": 5}, "cohort.size=5"),
        (where, {"rounds": None}, "algorithm.rounds"),
        (where, {"targets": 2}, "algorithm.targets=2: there are 1 target"),
    ):
        with pytest.raises(ConfigError, match=says):
            begun(at, **given)
    with pytest.raises(ValueError, match="pairs=9 is no multiple of every=8"):
        FedKaOptions(pairs=9)
    assert FedKaOptions.model_validate({}, context={"rounds": 7}).rounds == 7
