"""Clients' own models, of each method that has them, as they are measured on what the client has not learnt from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import MODEL
from harness import World, build, digits
from test_own_heads import pulled
from test_personalised import (
    BODY,
    BY_HAND,
    HEAD,
    LR,
    START,
    WHERE,
    B,
    Params,
    Y,
    down,
    features,
    fit,
    heard,
    logits,
    rows_of,
    some,
)
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.driver.client_metrics import client_phase, evaluate_clients, states
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import play, start
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.work import BatchPlan
from tests.parts import slow_but

APART = World(WHERE.task, HeldOut(WHERE.population, 0.25, 0))
CLIENTS = 8


def measured(name: str, where: World, inner: str, rounds: int, z: Any, **options: Any):
    """The state after some rounds, their records, and what clients' own models and the global one come to."""
    algorithm = build(name, where.task, CohortOptions(size=5), **options)
    measure = client_phase(("accuracy", "loss"), held_out=True, personal=algorithm.personal)
    setup = Setup.of(algorithm, where.task, where.population, inner)
    setup = replace(setup, phases={**setup.phases, measure.name: measure})
    executor = LocalExecutor(1)
    executor.start(setup)
    conditions = Conditions(seed=0, block_size=4, federation=Federation(policy=First(3)))
    people = problem(where.population)
    at, records = start(algorithm, z, people, conditions), []
    for _ in range(rounds):
        records.append(play(algorithm, at, people, conditions, executor))
        at.accept(records[-1])
    personal = algorithm.personal
    assert personal is not None
    message = personal.message(at.state, max(at.index - 1, 0))
    view = algorithm.views["global"].params(at.state)
    found = evaluate_clients(
        executor, view, where.population.size, message=message, client_state=states(at.memory.store, personal, message)
    )
    executor.close()
    return records, found


def own_logits(name: str, z: Params, client_state: Params, rows: Any, held: Tensor) -> Tensor:
    if name == "fedbabu":
        return logits(fit({**z, **some(START, HEAD)}, rows(0, BatchPlan(size=B, epochs=2))), held)
    if name == "fedrod":
        return logits(z, held) + features(z, held) @ client_state["3.weight"].T + client_state["3.bias"]
    if name == "ditto":
        return logits(client_state, held)
    if name == "peravg":
        for (batch,) in rows(0, BatchPlan(size=B, steps=1)):
            z = down(z, lambda q, r=batch: F.cross_entropy(logits(q, r), Y[r]), BODY + HEAD, 0.05)
        return logits(z, held)
    return logits({**z, **client_state}, held)


@pytest.mark.parametrize("inner", slow_but(["serial", "batched"], "batched"))
@pytest.mark.parametrize("name", BY_HAND)
def test_own_models_are_those_by_hand(name, inner):
    client, more, travels, stays = BY_HAND[name]
    options = {"batch_size": B, "lr": LR, "epochs": 1, **more} | ({"fine_tune_epochs": 2} if name == "fedbabu" else {})
    records, found = measured(name, APART, inner, 3, T.map(torch.Tensor.double, WHERE.task.init(0)), **options)
    z, kept = some(START, travels), {c: some(START, stays) for c in range(CLIENTS)}
    for t, record in enumerate(records):
        key = rng.fold(rng.key(0), "client", t, 0)
        ends = []
        for c in heard(record):
            up, kept[c] = client(z, kept[c], lambda s, plan, c=c, key=key: rows_of(c, key, s, plan, APART))
            ends.append((up, float(APART.population.num_examples(torch.tensor(c)))))
        total = sum(n for _, n in ends)
        z = {name: sum(n / total * up[name] for up, n in ends) for name in travels}
    local, key = APART.population.local_data(torch.arange(CLIENTS)), rng.fold(rng.key(0), "own model")
    assert local.held is not None
    for c in range(CLIENTS):
        held = local.held.rows[c, : int(local.held.counts[c])]
        mine = own_logits(name, z, kept[c], lambda s, plan, c=c: rows_of(c, key, s, plan, APART), held)
        assert int(found.examples[c]) == len(held)
        for metric, out in (("own_loss", mine), ("loss", logits({**START, **z}, held))):
            assert float(found.found[metric][c]) == pytest.approx(float(F.cross_entropy(out, Y[held])), rel=1e-9)


def test_fedas_own_model_is_the_body_it_would_train_under_its_head():
    z = T.map(torch.Tensor.double, WHERE.task.init(0))
    options = {"batch_size": B, "lr": LR, "steps": 3, "align_lr": 0.3}
    records, found = measured("fedas", APART, "serial", 3, z, **options)
    body = {n: records[-1].state.z["x"][n] for n in BODY}
    local, key = APART.population.local_data(torch.arange(CLIENTS)), rng.fold(rng.key(0), "own model")
    asked, models = {c for r in records for c in heard(r)}, {}
    z = some(START, BODY)
    for t, record in enumerate(records):  # what clients keep: see test_own_heads for the rounds
        at, sent = rng.fold(rng.key(0), "client", t, 0), []
        for c in heard(record):
            p = turned({**z, **some(models.get(c, START), HEAD)}, models.get(c), c, at)
            p = fit(p, rows_of(c, at, 2, BatchPlan(size=B, steps=3), APART))
            sent.append((c, p))
        models |= dict(sent)
        z = {n: record.state.z["x"][n] for n in BODY}
    for c in range(CLIENTS):
        held = local.held.rows[c, : int(local.held.counts[c])]
        p = turned({**body, **some(models.get(c, START), HEAD)}, models.get(c), c, key)
        assert float(found.found["own_loss"][c]) == pytest.approx(
            float(F.cross_entropy(logits(p, held), Y[held])), rel=1e-8
        )
    assert 3 < len(asked) < CLIENTS


def turned(p: Params, old: Params | None, c: int, key: Tensor) -> Params:
    """What a client that has an old body makes of the one that it is sent."""
    if old is None:
        return p
    local = APART.population.local_data(torch.tensor([c]))
    mine = local.rows[0, : int(local.counts[0])]
    towards = {k: features(old, mine[Y[mine] == k]).mean(0) for k in Y[mine].unique().tolist()}
    for (batch,) in rows_of(c, key, 1, BatchPlan(size=B, epochs=1), APART):

        def apart(q: Params, batch: Tensor = batch) -> Tensor:
            each = pulled(q, batch, towards)
            return sum((each[Y[batch] == k].mean() for k in Y[batch].unique()), torch.zeros(()))

        p = down(p, apart, BODY, 0.3)
    return p


STATISTICS = digits("classification", "quantity_skew", clients=8, net={"model": "cnn_bn"}, alpha=1.0, min_size=3)
"""A net whose layers keep count."""


@pytest.mark.parametrize(
    "name",
    slow_but(
        [*BY_HAND, "fedavg", "fedbn", "fedpac", "fedas", "fedsam", "mofedsam"], "ditto", "fedbn", "fedpac", "fedas"
    ),
)
def test_own_models_of_nets_that_keep_count(name):
    where = World(STATISTICS.task, HeldOut(STATISTICS.population, 0.25, 0))
    short = {"steps": 2, "batch_size": 7} | ({"fine_tune_epochs": 1} if name == "fedbabu" else {})
    _, found = measured(name, where, "serial", 1, where.task.init(0), **short)
    assert bool(found.found["own_loss"].isfinite().all())
    assert name in MODEL or not torch.equal(found.found["own_loss"], found.found["loss"])


@pytest.mark.parametrize("name", ["fedavg", "fedbabu", "peravg"])
def test_own_models_are_tuned_at_the_rate_of_the_last_round(name):
    """Not at that of a round that will not come, which a schedule may have brought to 0."""
    schedule = {"kind": "cosine", "rounds": 2}
    z = T.map(torch.Tensor.double, WHERE.task.init(0))
    _, found = measured(name, APART, "serial", 2, z, batch_size=B, lr=LR, lr_schedule=schedule)
    assert float((found.found["own_loss"] - found.found["loss"]).abs().max()) > 1e-2


@pytest.mark.slow
def test_fedas_leaves_a_new_client_the_statistics_that_it_is_sent():
    """It turns towards no old body, and what layers keep count of does not move either."""
    where, one = World(STATISTICS.task, HeldOut(STATISTICS.population, 0.25, 0)), {"steps": 2, "batch_size": 7}
    records, found = measured("fedas", where, "batched", 1, where.task.init(0), **one)
    new = [c for c in range(CLIENTS) if c not in heard(records[0])]
    assert torch.equal(found.found["own_loss"][new], found.found["loss"][new])
    longer, _ = measured("fedas", where, "batched", 1, where.task.init(0), align_epochs=4, **one)
    first, other = (r[0].state.z["b"] for r in (records, longer))
    assert all(torch.equal(leaf, other[name]) for name, leaf in first.items())
