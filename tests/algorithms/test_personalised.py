"""Methods that leave something with the client, beside versions of their own: an MLP by hand, a client and a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, CUT, MODEL
from harness import World, build, digits, records
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.work import BatchPlan
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

LR, B, ROUNDS = 0.2, 6, 4
HEAD, BODY = ("3.weight", "3.bias"), ("1.weight", "1.bias")
Params = dict[str, Tensor]
Rows = Callable[[int, BatchPlan], Iterator[tuple[Tensor, ...]]]
"""(stage, plan) -> the rows of each batch of each step."""

PLAIN = digits("classification", "quantity_skew", clients=8, alpha=1.0, min_size=3)
DOUBLE = {**PLAIN.population.data, "x": PLAIN.population.data["x"].double()}
WHERE = World(PLAIN.task, replace(PLAIN.population, data=DOUBLE))
X, Y = WHERE.population.data["x"], WHERE.population.data["y"]
START: Params = {name: p.double() for name, p in WHERE.task.init(0)["x"].items()}


def features(p: Params, rows: Tensor) -> Tensor:
    return torch.relu(X[rows].flatten(1) @ p["1.weight"].T + p["1.bias"])


def logits(p: Params, rows: Tensor) -> Tensor:
    return features(p, rows) @ p["3.weight"].T + p["3.bias"]


def down(p: Params, loss: Callable[[Params], Tensor], names: tuple[str, ...], lr: float = LR) -> Params:
    """A step of gradient descent of some of the parameters."""
    at = {name: leaf.clone().requires_grad_() for name, leaf in p.items()}
    found = torch.autograd.grad(loss(at), [at[n] for n in names])
    return {**p, **{n: p[n] - lr * g for n, g in zip(names, found, strict=True)}}


def fit(p: Params, batches: Iterator[tuple[Tensor, ...]], names: tuple[str, ...] = BODY + HEAD) -> Params:
    for (rows,) in batches:
        p = down(p, lambda q, rows=rows: F.cross_entropy(logits(q, rows), Y[rows]), names)
    return p


def some(p: Params, names: tuple[str, ...]) -> Params:
    return {name: p[name] for name in names}


ONCE, THREE = BatchPlan(size=B, epochs=1), BatchPlan(size=B, steps=3)
# A client's round: (what it is sent, what it keeps, its batches) -> (what it sends, what it keeps).


def fedper(z: Params, client_state: Params, rows: Rows):
    p = fit({**z, **client_state}, rows(0, ONCE))
    return some(p, BODY), some(p, HEAD)


def lg_fedavg(z: Params, client_state: Params, rows: Rows):
    p = fit({**z, **client_state}, rows(0, ONCE))
    return some(p, HEAD), some(p, BODY)


def fedrep(z: Params, client_state: Params, rows: Rows):
    p = fit({**z, **client_state}, rows(0, THREE), HEAD)
    p = fit(p, rows(1, ONCE), BODY)
    return some(p, BODY), some(p, HEAD)


def fedbabu(z: Params, client_state: Params, rows: Rows):
    return some(fit({**z, **some(START, HEAD)}, rows(0, ONCE), BODY), BODY), client_state


def fedrod(z: Params, client_state: Params, rows: Rows):
    counts = Y[torch.cat([r for (r,) in rows(0, BatchPlan(size=4096, epochs=1, shuffle=False))])].bincount(minlength=10)
    for (batch,) in rows(1, ONCE):
        with torch.no_grad():
            h, common = features(z, batch), logits(z, batch)

        def balanced(q: Params, batch: Tensor = batch) -> Tensor:
            return F.cross_entropy(logits(q, batch) + counts.double().log(), Y[batch])

        def residual(q: Params, batch: Tensor = batch, h: Tensor = h, common: Tensor = common) -> Tensor:
            return F.cross_entropy(common + h @ q["3.weight"].T + q["3.bias"], Y[batch])

        z, client_state = down(z, balanced, BODY + HEAD), down(client_state, residual, HEAD)
    return z, client_state


def ditto(z: Params, client_state: Params, rows: Rows):
    for (batch,) in rows(1, THREE):

        def near(q: Params, batch: Tensor = batch) -> Tensor:
            return F.cross_entropy(logits(q, batch), Y[batch]) + 0.25 * sum((q[n] - z[n]).square().sum() for n in q)

        client_state = down(client_state, near, BODY + HEAD)
    return fit(z, rows(0, ONCE)), client_state


def peravg(z: Params, client_state: Params, rows: Rows):
    for first, second in rows(0, replace(ONCE, per_step=2)):
        near = down(z, lambda q, r=first: F.cross_entropy(logits(q, r), Y[r]), BODY + HEAD, 0.05)
        at = {name: leaf.clone().requires_grad_() for name, leaf in near.items()}
        loss = F.cross_entropy(logits(at, second), Y[second]) if len(second) else 0 * at["3.bias"].sum()
        g = torch.autograd.grad(loss, [*at.values()], allow_unused=True, materialize_grads=True)
        z = {n: z[n] - LR * d for n, d in zip(at, g, strict=True)}
    return z, client_state


BY_HAND: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "fedper": (fedper, {}, BODY, HEAD),
    "lg_fedavg": (lg_fedavg, {}, HEAD, BODY),
    "fedrep": (fedrep, {"head_steps": 3}, BODY, HEAD),
    "fedbabu": (fedbabu, {}, BODY, ()),
    "fedrod": (fedrod, {}, BODY + HEAD, HEAD),
    "ditto": (ditto, {"own_steps": 3, "pull": 0.5}, BODY + HEAD, BODY + HEAD),
    "peravg": (peravg, {"alpha": 0.05}, BODY + HEAD, ()),
}
"""The client's round, its options, what is averaged, what stays."""


def rows_of(
    client: int, key: Tensor, stage: int, plan: BatchPlan, where: World = WHERE
) -> Iterator[tuple[Tensor, ...]]:
    """The rows of the batches that the engine draws, without padding."""
    local = where.population.local_data(torch.tensor([client]))
    mine = rng.fold(rng.fold(key, torch.tensor([client]), torch.tensor([0])), "stage", stage)
    walk = schedule(plan, local.rows, local.counts, mine)
    for rows, weight in zip(walk.rows[0], walk.weight[0], strict=True):
        yield tuple(r[w > 0] for r, w in zip(rows.chunk(plan.per_step), weight.chunk(plan.per_step), strict=True))


def heard(record: RoundRecord) -> list[int]:
    (phase,) = record.phases
    return phase.clients[phase.responses.outcome == Outcome.COMPLETED].tolist()


def run(name: str, where: World = WHERE, rounds: int = ROUNDS, **more: Any) -> list[RoundRecord]:
    options = {"batch_size": B, "lr": LR, "epochs": 1, **BY_HAND[name][1], **more}
    algorithm = build(name, where.task, CohortOptions(size=5), **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    return list(records(algorithm, where, rounds, z=z, policy=First(3)))


@pytest.mark.parametrize("name", BY_HAND)
def test_rounds_are_those_by_hand(name):
    client, _, travels, stays = BY_HAND[name]
    z, kept = some(START, travels), {c: some(START, stays) for c in range(8)}
    for t, record in enumerate(run(name)):
        key = rng.fold(rng.key(0), "client", t, 0)
        sent, weights = [], []
        for c in heard(record):
            up, kept[c] = client(z, kept[c], lambda stage, plan, c=c, key=key: rows_of(c, key, stage, plan))
            sent.append(up)
            weights.append(float(WHERE.population.num_examples(torch.tensor(c))))
        assert len(sent) == 3
        share = [w / sum(weights) for w in weights]
        z = {n: sum(s * up[n] for s, up in zip(share, sent, strict=True)) for n in travels}
        found = record.state.z["x"]
        assert set(found) == set(travels)
        for n in travels:
            torch.testing.assert_close(found[n], z[n], rtol=1e-9, atol=1e-11)
    assert max(float((z[n] - START[n]).abs().max()) for n in travels) > 1e-2


@pytest.mark.parametrize("name", BY_HAND)
def test_what_travels_is_counted_and_nothing_else(name):
    travels = sum(START[n].numel() for n in BY_HAND[name][2])
    for record in run(name, rounds=2):
        counts = record.phases[0].counts
        assert counts["floats_up"] == 3 * travels
        assert counts["floats_down"] == 5 * travels


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedbn"])
def test_with_one_client_it_is_fedavg(name):
    net = {"model": MODEL[name]} if name in MODEL else {"model": "mlp", "hidden": (8,)}
    entry = TASKS["classification"]
    where = World(
        entry.build(entry.options(**net), DataShape((1, 8, 8), 10)), digits("classification", clients=1).population
    )
    given = {"steps": 4, "batch_size": 20, "weight": "uniform", "client_optimizer": {"momentum": 0.5}}
    plain = [r.state.z for r in records(build("fedavg", where.task, CohortOptions(size=1), **given), where, 3)]
    partly = list(records(build(name, where.task, CohortOptions(size=1), **given), where, 3))
    for whole, record in zip(plain, partly, strict=True):
        for part, tree in record.state.z.items():
            for n, leaf in tree.items():
                assert torch.equal(leaf, whole[part][n])
    assert 0 < sum(map(len, partly[0].state.z.values())) < sum(map(len, plain[0].values()))


def test_fedbn_keeps_scales_and_statistics():
    where = digits("classification", net={"model": "cnn_bn"}, clients=4)
    (record,) = records(build("fedbn", where.task, CohortOptions(size=4), steps=2), where, 1)
    assert set(record.state.z) == {"x"}
    assert not {n for n in record.state.z["x"] if n.startswith(("1.", "5."))}
    every = T.count(where.task.init(0))
    assert record.phases[0].counts["floats_up"] == 4 * (every - 4 * 16 - 4 * 32)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_fedrep_moves_a_part_at_a_time_whatever_the_optimiser_remembers(clip):
    given = {"client_optimizer": {"momentum": 0.9, "weight_decay": 0.1, "clip_norm": clip}, "head_steps": 2}
    one = run("fedrep", rounds=1, **given)[0].state.z["x"]
    key, up, sizes = rng.fold(rng.key(0), "client", 0, 0), [], []
    for c in heard(run("fedrep", rounds=1, **given)[0]):
        p = START
        for stage, (plan, names) in enumerate(((BatchPlan(size=B, steps=2), HEAD), (ONCE, BODY))):
            v = {n: torch.zeros_like(p[n]) for n in names}
            for (rows,) in rows_of(c, key, stage, plan):
                at = {name: leaf.clone().requires_grad_() for name, leaf in p.items()}
                g = torch.autograd.grad(F.cross_entropy(logits(at, rows), Y[rows]), [at[n] for n in names])
                long = float(sum(d.square().sum() for d in g)) ** 0.5
                scale = 1.0 if clip is None else min(1.0, clip / (long + 1e-6))
                v = {n: 0.9 * v[n] + scale * d + 0.1 * p[n] for n, d in zip(names, g, strict=True)}
                p = {**p, **{n: p[n] - LR * v[n] for n in names}}
        up.append(p)
        sizes.append(float(WHERE.population.num_examples(torch.tensor(c))))
    for n in BODY:
        mean = sum(s * p[n] for s, p in zip(sizes, up, strict=True)) / sum(sizes)
        torch.testing.assert_close(one[n], mean, rtol=1e-9, atol=1e-11)


def test_fedrod_with_as_many_examples_of_each_class_moves_the_common_model_as_plain_cross_entropy():
    z = {"x": START}
    rows = torch.cat([(c == Y).nonzero()[:2, 0] for c in range(10)])
    from fedfleet.simulator.work import Batch

    batch = Batch({"x": X[rows], "y": Y[rows]}, torch.ones(20, dtype=torch.float64))
    task: Any = WHERE.task
    grads = []
    for name, ctx in (("balanced", torch.full((10,), 2.0, dtype=torch.float64)), ("train", None)):
        at = T.map(lambda leaf: leaf.clone().requires_grad_(), z)
        grads.append(torch.autograd.grad(task.objectives[name].loss(at, batch, ctx, rng.key(0))[0], T.leaves(at)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(CUT - {"omg", "robust"}))
def test_a_net_without_such_parts_is_refused(name):
    entry = TASKS["classification"]
    model = "mlp" if name == "fedbn" else "logistic"
    task = entry.build(entry.options(model=model), DataShape((1, 8, 8), 10))
    with pytest.raises(ConfigError, match=rf"algorithm.name='{name}': the net has no .*: choose task.model="):
        build(name, task, **CASES[name][1])


@pytest.mark.parametrize("name", sorted(CUT - {"omg", "robust"}))
def test_a_task_that_does_not_say_its_parts_is_refused(name):
    entry = TASKS["language_model"]
    task = entry.build(entry.options(), DataShape((10,), 50))
    with pytest.raises(
        ConfigError, match=r"the task does not say which parts there are: use task\.name=classification"
    ):
        ALGORITHMS[name].build(ALGORITHMS[name].options(**CASES[name][1]), task, CohortOptions(size=2))


def test_both_lengths_are_refused():
    for name, key in (("fedrep", "head"), ("ditto", "own")):
        with pytest.raises(ValueError, match=f"give {key}_steps or {key}_epochs, not both"):
            ALGORITHMS[name].options(**{f"{key}_steps": 1, f"{key}_epochs": 1})
