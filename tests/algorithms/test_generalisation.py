"""FedSAM, MoFedSAM and FedIIR beside versions of their own, whose second derivatives are autograd's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from harness import build, records
from test_personalised import BODY, HEAD, LR, START, WHERE, B, Params, heard, logits, rows_of
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.work import BatchPlan

EVERY = BODY + HEAD
THREE = BatchPlan(size=B, steps=3)


def run(name: str, invite: int = 5, **options) -> list[RoundRecord]:
    algorithm = build(
        name, WHERE.task, CohortOptions(size=invite), **{"batch_size": B, "lr": LR, "steps": 3, **options}
    )
    z = T.map(torch.Tensor.double, WHERE.task.init(0))
    return list(records(algorithm, WHERE, 4, z=z, policy=First(3)))


def gradient(p: Params, rows: Tensor, names: tuple[str, ...] = EVERY) -> Params:
    at = {n: leaf.clone().requires_grad_() for n, leaf in p.items()}
    found = torch.autograd.grad(
        F.cross_entropy(logits(at, rows), WHERE.population.data["y"][rows]), [at[n] for n in names]
    )
    return dict(zip(names, found, strict=True))


def sharp(p: Params, rows: Tensor, rho: float) -> Params:
    g = gradient(p, rows)
    length = float(sum(v.square().sum() for v in g.values())) ** 0.5 + 1e-7
    return gradient({n: p[n] + rho / length * g[n] for n in p}, rows)


def mean(ends: list[Params], weights: list[float]) -> Params:
    return {n: sum(w * e[n] for w, e in zip(weights, ends, strict=True)) / sum(weights) for n in ends[0]}


def sizes(clients: list[int]) -> list[float]:
    return WHERE.population.num_examples(torch.tensor(clients)).double().tolist()


def compare(found: RoundRecord, wanted: Params) -> None:
    for n, leaf in wanted.items():
        torch.testing.assert_close(found.state.z["x"][n], leaf, rtol=1e-8, atol=1e-10)


def walk(t: int, c: int, exchange: int = 0, plan: BatchPlan = THREE) -> Iterator[Tensor]:
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    return (rows for (rows,) in rows_of(c, key, 0, plan))


def test_fedsam_by_hand():
    z = START
    for t, record in enumerate(run("fedsam", rho=0.3)):
        ends = []
        for c in heard(record):
            p = z
            for rows in walk(t, c):
                g = sharp(p, rows, 0.3)
                p = {n: p[n] - LR * g[n] for n in p}
            ends.append(p)
        z = mean(ends, sizes(heard(record)))
        compare(record, z)


def test_fedsam_without_a_distance_is_fedavg():
    for a, b in zip(run("fedsam", rho=0.0), run("fedavg"), strict=True):
        compare(a, b.state.z["x"])


@pytest.mark.parametrize("length", [{"steps": 3}, {"steps": None, "epochs": 2}])
def test_mofedsam_by_hand(length):
    z, before = START, {n: torch.zeros_like(p) for n, p in START.items()}
    plan = BatchPlan(size=B, steps=length["steps"], epochs=length.get("epochs"))
    for t, record in enumerate(run("mofedsam", rho=0.3, share=0.6, **length)):
        ends, steps = [], []
        for c in heard(record):
            p, taken = z, 0
            for rows in walk(t, c, plan=plan):
                g = sharp(p, rows, 0.3)
                p, taken = {n: p[n] - LR * (0.6 * g[n] + 0.4 * before[n]) for n in p}, taken + 1
            ends.append(p)
            steps.append(float(taken))
        weights = sizes(heard(record))
        new = mean(ends, weights)
        pace = LR * sum(w * k for w, k in zip(weights, steps, strict=True)) / sum(weights)
        before, z = {n: (z[n] - new[n]) / pace for n in z}, new
        compare(record, z)
        assert record.phases[0].counts["floats_down"] == 5 * 2 * T.count(START)
        assert record.phases[0].counts["floats_up"] == 3 * (T.count(START) + 1)


def test_mofedsam_stands_still_at_a_rate_of_nothing():
    schedule = {"kind": "cosine", "rounds": 2}
    *_, third, fourth = run("mofedsam", lr_schedule=schedule)
    compare(fourth, third.state.z["x"])


def test_fediir_by_hand():
    z, running = START, {n: torch.zeros_like(START[n]) for n in HEAD}
    y, once = WHERE.population.data["y"], BatchPlan(size=B, epochs=1)
    for t, record in enumerate(run("fediir", penalty=0.3, ema=0.6)):
        one, two = (p.clients[p.responses.outcome == Outcome.COMPLETED].tolist() for p in record.phases)
        found = [gradient(z, rows, HEAD) for c in one for rows in walk(t, c, plan=once)]
        running = {n: 0.6 * running[n] + 0.4 * sum(g[n] for g in found) / len(found) for n in HEAD}
        ends = []
        for c in two:
            p = z
            for rows in walk(t, c, exchange=1):
                at = {n: leaf.clone().requires_grad_() for n, leaf in p.items()}
                loss = F.cross_entropy(logits(at, rows), y[rows])
                of_head = torch.autograd.grad(loss, [at[n] for n in HEAD], create_graph=True)
                total = loss + 0.3 * sum((g - running[n]).square().sum() for g, n in zip(of_head, HEAD, strict=True))
                g = dict(zip(EVERY, torch.autograd.grad(total, [at[n] for n in EVERY]), strict=True))
                p = {n: p[n] - LR * g[n] for n in p}
            ends.append(p)
        z = mean(ends, [1.0] * len(ends))
        compare(record, z)


def test_fediir_without_a_penalty_is_fedavg_with_clients_alike():
    z = START
    for t, record in enumerate(run("fediir", penalty=0.0)):
        ends = []
        for c in record.phases[1].clients[record.phases[1].responses.outcome == Outcome.COMPLETED].tolist():
            p = z
            for rows in walk(t, c, exchange=1):
                g = gradient(p, rows)
                p = {n: p[n] - LR * g[n] for n in p}
            ends.append(p)
        z = mean(ends, [1.0] * len(ends))
        compare(record, z)
