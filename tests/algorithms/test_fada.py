"""FADA: gap statistics, attention and both losses by hand, its rounds beside plain torch, and who takes part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adaptation import build, population, records
from harness import World, flat
from torch import Tensor, nn

from fedfleet.algorithms.fada import FadaOptions
from fedfleet.algorithms.gap_statistics import attention, clustered_gap, gap
from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.datasets.digits import load
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.work import Batch, BatchPlan
from fedfleet.tasks.adversaries import of_pair
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS
from tests.parts import slow_but

POINTS = torch.tensor([[0.0, 0], [0, 1], [4, 4], [4, 6]], dtype=torch.float64)
"""Features of two clusters, as the specification has them."""
TWO = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool()
THREE = CohortOptions(size=3)


def test_gap_statistics_by_hand():
    assert float(gap(POINTS, TWO)) == pytest.approx(1.5)
    assert float(gap(3 * POINTS, TWO)) == pytest.approx(4.5)
    together = torch.ones(1, 4).bool()
    pairs = [math.dist(a, b) for a in POINTS.tolist() for b in POINTS.tolist()]
    assert float(gap(POINTS, together)) == pytest.approx(sum(pairs) / 8)
    assert float(gap(POINTS, torch.cat([TWO, ~together]))) == pytest.approx(1.5)  # one that is empty


def test_features_are_clustered_where_they_are():
    """Any seeds find these two clusters, rows that do not count make none, and moving a cluster changes nothing."""
    real = torch.tensor([True, True, True, True, False])
    for seed in range(5):
        for garbage in (100.0, -3.0):
            rows = torch.cat([POINTS, torch.full((1, 2), garbage).double()])
            assert float(clustered_gap(rng.key(seed), rows, real, 2)) == pytest.approx(1.5)
            rows[2:4] += 50
            assert float(clustered_gap(rng.key(seed), rows, real, 2)) == pytest.approx(1.5)
    assert float(clustered_gap(rng.key(0), POINTS, real[:4], 4)) == 0
    assert float(clustered_gap(rng.key(0), POINTS, ~real[:4], 2)) == 0


def test_attention_by_hand():
    gain = torch.tensor([0.2, -0.1, 0.05], dtype=torch.float64)
    assert attention(gain).tolist() == pytest.approx([0.38438975, 0.28476293, 0.33084732], abs=5e-9)
    assert attention(0 * gain).tolist() == pytest.approx([1 / 3] * 3)
    assert attention(gain[:1]).tolist() == [1]


def loss(source: list[float], target: list[float], *, confused: bool) -> float:
    """The loss of one minibatch, of probabilities of being the source's."""
    of_target = [-torch.tensor(p, dtype=torch.float64).logit()[:, None] for p in (source, target)]
    batches = [Batch({}, torch.ones(len(p)).double()) for p in (source, target)]
    return float(of_pair(of_target[0], batches[0], of_target[1], batches[1], confused=confused))


def test_both_losses_by_hand():
    assert loss([0.7, 0.6], [0.2, 0.4], confused=False) == pytest.approx(0.80073487, abs=5e-9)
    assert loss([0.7, 0.6], [0.2, 0.4], confused=True) == pytest.approx(1.69661461, abs=5e-9)
    for confused in (False, True):
        assert loss([0.5], [0.5, 0.5], confused=confused) == pytest.approx(2 * math.log(2))
    assert loss([0.7, 0.7, 0.6, 0.6], [0.2, 0.4], confused=True) == pytest.approx(1.69661461, abs=5e-9)  # means


SIZES, TARGETS = (20, 14, 17, 16, 12), (3,)
BATCH, LR, DUAL, STEPS, CLUSTERS = 6, 0.05, 0.2, 2, 3
GIVEN: dict[str, Any] = {
    "batch_size": BATCH, "lr": LR, "dual_lr": DUAL, "steps": STEPS, "clusters": CLUSTERS, "optimizer": {"momentum": 0.9},
}  # fmt: skip


def world(sizes: tuple[int, ...] = SIZES, targets: tuple[int, ...] = TARGETS, dtype: Any = torch.float64) -> World:
    """Digits, each client's with an offset of its own."""
    data = load(None).train  # type: ignore[arg-type]
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = data.x[: len(owner)].to(dtype) + 0.2 * owner[:, None, None, None]
    entry = TASKS["domain_adaptation"]
    task = entry.build(entry.options(hidden=(6,)), DataShape((1, 8, 8), 10))
    return World(task, population(x, data.y, sizes, targets))


def begun(where: World) -> Any:
    return T.map(torch.Tensor.double, where.task.init(0))


def walk(where: World, t: int, exchange: int, client: int, size: int) -> tuple[Tensor, Tensor]:
    """The rows of the minibatch that the engine draws for a client in an exchange, and its key."""
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    local = where.population.local_data(torch.tensor([client]))
    mine = rng.fold(rng.fold(key, torch.tensor([client]), torch.tensor([0])), "stage", 0)
    found = schedule(BatchPlan(size=size, steps=1), local.rows, local.counts, mine)
    return found.rows[0, 0][found.weight[0, 0] > 0], found.key[0, 0]


class Nets:
    """Extractor with head, identifier, and the optimisers that a client keeps."""

    def __init__(self, z: Any, momentum: float = 0.9):
        self.x = {n: v.clone().requires_grad_() for n, v in z["x"].items()}
        self.y = {n: v.clone().requires_grad_() for n, v in z["y"].items()}
        self.by = {
            name: torch.optim.SGD(of.values(), lr=lr, momentum=momentum)
            for name, of, lr in (("labels", self.x, LR), ("confuse", self.x, LR), ("identify", self.y, DUAL))
        }

    def load(self, x: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for n, v in x.items():
                self.x[n].copy_(v)

    def found(self) -> dict[str, Tensor]:
        return {n: v.detach().clone() for n, v in self.x.items()}

    def features(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        return (h @ self.x["features.1.weight"].T + self.x["features.1.bias"]).relu()

    def scores(self, x: Tensor) -> Tensor:
        return self.features(x) @ self.x["head.0.weight"].T + self.x["head.0.bias"]

    def of_source(self, features: Tensor) -> Tensor:
        """Probability of being the source's."""
        h = (features @ self.y["0.weight"].T + self.y["0.bias"]).relu()
        return 1 - (h @ self.y["2.weight"].T + self.y["2.bias"]).sigmoid()[:, 0]

    def step(self, name: str, value: Tensor) -> None:
        for p in (*self.x.values(), *self.y.values()):
            p.grad = None
        value.backward()
        for p in (self.y if name == "identify" else self.x).values():
            p.grad = (
                torch.zeros_like(p) if p.grad is None else p.grad
            )  # a head that L_G does not move keeps its momentum
        self.by[name].step()


def tightness(features: Tensor, key: Tensor) -> float:
    """Gap statistics, a point and a pair at a time; seeds by their squared distances."""
    points, n = features.tolist(), len(features)
    apart = lambda a, b: sum((p - q) ** 2 for p, q in zip(a, b, strict=True))  # noqa: E731
    middle: list[list[float]] = []
    groups: list[list[Any]] = []
    for u in rng.uniform(key, CLUSTERS, torch.float64).tolist():
        mass = [min((apart(p, m) for m in middle), default=1.0) for p in points]
        mass = mass if sum(mass) > 0 else [1.0] * n
        so_far = [sum(mass[: i + 1]) for i in range(n)]
        middle.append(points[next(i for i in range(n) if so_far[i] > u * so_far[-1])])
    for turn in range(11):
        near = [min(range(CLUSTERS), key=lambda j, p=p: apart(p, middle[j])) for p in points]
        groups = [[p for p, j in zip(points, near, strict=True) if j == r] for r in range(CLUSTERS)]
        if turn < 10:
            middle = [
                [sum(c) / len(g) for c in zip(*g, strict=True)] if g else m for g, m in zip(groups, middle, strict=True)
            ]
    return sum(sum(math.sqrt(apart(a, b)) for a in g for b in g) / (2 * len(g)) for g in groups if g)


FALLING: dict[str, Any] = {"optimizer": {}, "lr_schedule": {"kind": "step", "every": 1, "factor": 0.5}}


@pytest.mark.parametrize(
    "options",
    [{}, {"align": False}, FALLING, {"steps": 1, "batch_size": 18}],
    ids=["default", "attention alone", "no momentum, falling rates", "more than a client has"],
)  # fmt: skip
def test_rounds_are_those_of_torch(options):
    """Three of four sources a round, whose models, optimisers and identifiers are made once."""
    where, given = world(), {**GIVEN, **options}
    algorithm, z = build(where.task, "fada", THREE, **given), begun(where)
    clients = {c: Nets(z, given["optimizer"].get("momentum", 0.0)) for c in range(5)}
    x, y = (where.population.data[k] for k in ("x", "y"))
    model, aligns, cloud, shares = dict(z["x"]), given.get("align", True), clients[3], []
    for r in records(algorithm, where, 3, z=z):
        heard = r.phases[1 if aligns else 0].clients.tolist()
        factor = 0.5**r.index if "lr_schedule" in options else 1.0
        for c in clients.values():
            for name, optimizer in c.by.items():
                optimizer.param_groups[0]["lr"] = factor * (DUAL if name == "identify" else LR)
        exchange = 0
        for _ in range(given["steps"]):
            cloud.load(model)
            rows, _ = walk(where, r.index, exchange, 3, given["batch_size"])
            exchange += aligns
            of_target = cloud.features(x[rows])
            pulls = []
            for c in heard:
                me, mine = clients[c], walk(where, r.index, exchange, c, given["batch_size"])[0]
                me.load(model)
                me.step("labels", nn.functional.cross_entropy(me.scores(x[mine]), y[mine]))
                if aligns:
                    theirs = of_target.detach().clone().requires_grad_()
                    told = lambda a, b: -me.of_source(a).log().mean() - b.log().mean()  # noqa: B023, E731
                    own = me.features(x[mine]).detach()
                    me.step("identify", told(own, 1 - me.of_source(theirs.detach())))
                    value = told(me.features(x[mine]), me.of_source(theirs))
                    (pull,) = torch.autograd.grad(value, theirs, retain_graph=True)
                    pulls.append(pull)
                    me.step("confuse", value)
            exchange += 1
            other, key = walk(where, r.index, exchange, 3, given["batch_size"])
            exchange += 1
            if aligns:
                cloud.step("confuse", (sum(pulls) / len(pulls) * of_target).sum())
            else:
                rows = other
            base, seeds, probe = cloud.found(), rng.fold(key, "clusters"), Nets(z)
            before, gains = tightness(cloud.features(x[rows]), seeds), []
            for c in heard:
                probe.load({n: base[n] + clients[c].found()[n] - model[n] for n in base})
                gains.append(before - tightness(probe.features(x[rows]), seeds))
            share = [math.exp(g) / sum(map(math.exp, gains)) for g in gains]
            shares.append(max(share))
            model = {
                n: base[n] + sum(a * (clients[c].found()[n] - model[n]) for a, c in zip(share, heard, strict=True))
                for n in base
            }
        for name, v in r.state.z["x"].items():
            torch.testing.assert_close(v, model[name], rtol=1e-6, atol=1e-9, msg=f"round {r.index}, {name}")
        assert r.metrics["attention"] == pytest.approx(sum(shares[-given["steps"] :]) / given["steps"], rel=1e-6)
        assert set(r.state.z) == {"x"}
    assert max(shares) > 0.35  # not as good as equal


def test_messages():
    """Features up and their gradient down, models of sources; identifiers travel nowhere."""
    where, (m, b) = world(), (1, BATCH)
    z = begun(where)
    d, w, n = T.count(z["x"]), 6, 3
    (r,) = records(build(where.task, "fada", THREE, **GIVEN), where, 1, z=z)
    counts = [(p.counts["floats_down"], p.counts["floats_up"]) for p in r.phases]
    each = m * b * (w + 1)
    once = [(d, each), (n * (d + each), n * (d + m * b * w)), ((n + 1) * d + b * w, d + n)]
    assert counts == once * STEPS
    (r,) = records(build(where.task, "fada", THREE, **{**GIVEN, "align": False, "steps": 1}), where, 1, z=z)
    assert [(p.counts["floats_down"], p.counts["floats_up"]) for p in r.phases] == [(n * d, n * d), ((n + 1) * d, n)]


def test_one_source_has_all_the_attention_and_alone_it_is_averaging():
    """With one source and no alignment a round is a step of that source."""
    where = world((20, 16), (1,))
    z = begun(where)
    algorithm = build(
        where.task, "fada", CohortOptions(size=1), **{**GIVEN, "align": False, "steps": 1, "optimizer": {}}
    )
    (r,) = records(algorithm, where, 1, z=z)
    me = Nets(z, 0.0)
    mine = walk(where, 0, 0, 0, BATCH)[0]
    x, y = (where.population.data[k] for k in ("x", "y"))
    me.step("labels", nn.functional.cross_entropy(me.scores(x[mine]), y[mine]))
    for name, v in me.found().items():
        torch.testing.assert_close(r.state.z["x"][name], v)
    assert r.metrics == {"attention": 1.0}


def test_several_targets_are_one_with_all_their_examples():
    """Two targets of one example each, of which both are taken, and the same two examples at one: equal steps of L_G."""
    found = []
    for sizes, targets in (((20, 1, 1), (1, 2)), ((20, 2), (1,))):
        where = world(sizes, targets)
        where.population.data["x"][:] = world((20, 2), (1,)).population.data["x"]
        given = {**GIVEN, "batch_size": 2, "steps": 1, "optimizer": {}, "clusters": 1}
        (r,) = records(build(where.task, "fada", CohortOptions(size=1), **given), where, 1, z=begun(where))
        found.append(flat(r.state.z))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_target_keeps_its_minibatch_until_the_gradient_of_its_features_is_back():
    """Without any data of the last exchange: the loss that its gradient is of is that of the features it had sent."""
    where = world()
    task: Any = where.task
    z = begun(where)
    batch = Batch({"x": where.population.data["x"][:5], "key": rng.key(1)}, torch.ones(5).double())
    pull = rng.normal(rng.key(2), (5, 6), torch.float64)
    x = {n: v.clone().requires_grad_() for n, v in z["x"].items()}
    value, aux = task.objectives["pulled"].loss({"x": x}, batch, {"pull": pull, "loss": torch.tensor(7.0)}, rng.key(1))
    assert float(value.detach()) == 7
    assert aux == {}
    found = torch.autograd.grad(value, [x["features.1.weight"]])
    wanted = torch.autograd.grad((pull * task.features({"x": x}, batch.x)).sum(), [x["features.1.weight"]])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(task.functions["features_in_training"](z, batch), task.features(z, batch.x))


def test_a_model_without_an_adversary_tells_no_domains():
    where = world()
    z = begun(where)
    batch = Batch({"x": where.population.data["x"][:5]}, torch.ones(5).double())
    assert set(where.task.functions["predict"]({"x": z["x"]}, batch)) == {"logits"}
    assert set(where.task.functions["predict"](z, batch)) == {"logits", "target"}


def test_rounds_with_clients_away():
    """Attention is among the sources heard; a minibatch without a target is begun anew with its round."""
    where = world(targets=(3, 4))
    federation = Federation(availability=Bernoulli(rate=0.7))
    algorithm, sizes = build(where.task, "fada", THREE, **GIVEN), set()
    for r in records(algorithm, where, 6, z=begun(where), federation=federation, attempts=400):
        assert all(leaf.isfinite().all() for leaf in T.leaves(r.state.z))
        heard = [p.counts["completed"] for p in r.phases if p.phase == "source"]
        sizes |= set(heard)
        assert r.metrics["attention"] >= sum(1 / n for n in heard) / len(heard)
    assert len(sizes) > 1


@pytest.mark.parametrize("inner", slow_but(["batched", "factored"], "batched"))
@pytest.mark.parametrize("align", [True, False])
def test_many_at_once_are_one_at_a_time(inner, align):
    """Clients of very different sizes, and two targets of fewer examples than a minibatch."""
    where = world((30, 17, 4, 4, 5), (1, 4))
    algorithm = build(where.task, "fada", THREE, **{**GIVEN, "align": align, "batch_size": 9})
    one, many = ([r.state for r in records(algorithm, where, 3, z=begun(where), inner=i)] for i in ("serial", inner))
    torch.testing.assert_close(flat(one[-1].z), flat(many[-1].z), rtol=1e-7, atol=1e-9)


def test_rates_fall_with_rounds():
    options = FadaOptions(lr=0.2, lr_schedule={"kind": "step", "every": 1, "factor": 0.5})  # type: ignore[arg-type]
    assert options.rates(1) == {"lr": 0.1, "dual_lr": 0.1}
    assert FadaOptions(lr=0.2, dual_lr=0.5).rates(3) == {"lr": 0.2, "dual_lr": 0.5}


@pytest.mark.parametrize(
    ("options", "size", "targets", "says"),
    [
        ({}, 5, (4,), "cohort.size=5: there are 4 source clients"),
        ({}, 3, (), "algorithm.name='fada': there is no target client"),
        ({"targets": 2}, 3, (4,), "algorithm.targets=2: there are 1 target clients"),
    ],
)
def test_what_is_refused(options, size, targets, says):
    where = world(targets=targets)
    made = build(where.task, "fada", CohortOptions(size=size), **options)
    with pytest.raises(ConfigError, match=says):
        made.init(where.task.init(0), rng.key(0), problem(where.population))


def test_other_tasks_and_options_of_a_game_that_is_not_played_are_refused():
    entry = TASKS["domain_adaptation"]
    for options, says in (
        ({"loss": "mdd"}, r"use task\.name=domain_adaptation with loss=dann"),
        ({"nu": 0.5}, r"task\.nu=0\.5: (fada|fedka) has losses of its own"),
        ({"psi_rescale": False}, r"task\.psi_rescale=False: (fada|fedka) has losses of its own"),
    ):
        task = entry.build(entry.options(hidden=(6,), **options), DataShape((1, 8, 8), 10))
        for name in ("fada", "fedka"):
            with pytest.raises(ConfigError, match=says):
                build(task, name, THREE)
