"""FedGA, IRM, V-REx and CORAL beside versions of their own: the whole objective by autograd, and rounds by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import World, build, records
from test_personalised import BODY, HEAD, LR, START, WHERE, B, Params, Y, down, features, fit, logits, rows_of
from torch import Tensor

from fedfleet.algorithms.coral import of_all
from fedfleet.algorithms.fedga import adjusted
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Cohort, Problem, Reduced
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import DomainMeans
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import ResponsePolicy, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.work import BatchPlan

EVERY, CLIENTS, THREE = BODY + HEAD, 8, BatchPlan(size=B, steps=3)
SOME = Siwer(low=0.55, high=0.6)  # 3 of 5
APART = replace(WHERE, population=WHERE.population.grouped(torch.arange(CLIENTS)))
"""Each client a domain."""


@pytest.fixture(autouse=True)
def _looks_take_several_chunks(monkeypatch):
    for name in ("fedga", "vrex", "coral"):
        monkeypatch.setattr(f"fedfleet.algorithms.{name}.EVERYTHING", BatchPlan(size=50, epochs=1, shuffle=False))


def run(
    name: str, where: World, invite: int, policy: ResponsePolicy, length: int = 4, **options: Any
) -> list[RoundRecord]:
    algorithm = build(name, where.task, CohortOptions(size=invite), **{"lr": LR, **options})
    assert algorithm.name in (None, name)
    assert algorithm.buffers  # models are averaged, and what their layers count with them
    z = T.map(torch.Tensor.double, where.task.init(0))
    return list(records(algorithm, where, length, z=z, policy=policy))


def heard(record: RoundRecord) -> list[list[int]]:
    return [p.clients[p.responses.outcome == Outcome.COMPLETED].tolist() for p in record.phases]


def rows_at(where: World, c: int) -> Tensor:
    local = where.population.local_data(torch.tensor([c]))
    return local.rows[0, : int(local.counts[0])]


def walk(t: int, c: int, exchange: int, where: World = WHERE, plan: BatchPlan = THREE, stage: int = 0):
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    return rows_of(c, key, stage, plan, where)


def mean(ends: list[Params], weights: list[float]) -> Params:
    return {n: sum(w * e[n] for w, e in zip(weights, ends, strict=True)) / sum(weights) for n in ends[0]}


def same(record: RoundRecord, wanted: Params, state: Callable[[Any], Any] = lambda s: s) -> None:
    for n, leaf in wanted.items():
        torch.testing.assert_close(state(record.state)["x"][n], leaf, rtol=1e-9, atol=1e-11)


def risk(p: Params, c: int) -> Tensor:
    rows = rows_at(WHERE, c)
    return F.cross_entropy(logits(p, rows), Y[rows])


def vrex(p: Params) -> Tensor:
    risks = torch.stack([risk(p, c) for c in range(CLIENTS)])
    return risks.mean() + 3.0 * risks.var(correction=0)


def coral(p: Params) -> Tensor:
    """As DomainBed has it: over all pairs of domains."""
    seen = [features(p, rows_at(WHERE, c)) for c in range(CLIENTS)]
    apart = []
    for i in range(CLIENTS):
        for j in range(i + 1, CLIENTS):
            means = (seen[i].mean(0) - seen[j].mean(0)).square().mean()
            apart.append(means + (torch.cov(seen[i].T) - torch.cov(seen[j].T)).square().mean())
    return torch.stack([risk(p, c) for c in range(CLIENTS)]).mean() + 3.0 * torch.stack(apart).mean()


@pytest.mark.parametrize(("name", "objective"), [("vrex", vrex), ("coral", coral)])
def test_a_full_step_of_all_is_one_of_the_whole_objective(name, objective):
    z = START
    for record in run(name, APART, CLIENTS, WaitAll(), steps=1, batch_size=1000, penalty=3.0):
        z = down(z, objective, EVERY)
        same(record, z)
    assert float((objective(z) - objective(START)).abs()) > 0.1


def irm_penalty(p: Params, rows: Tensor) -> Tensor:
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    grads = []
    for half in (rows[0::2], rows[1::2]):
        if not len(half):
            return torch.zeros(())
        loss = F.cross_entropy(logits(p, half) * factor, Y[half])
        grads.append(torch.autograd.grad(loss, factor, create_graph=True)[0])
    return grads[0] * grads[1]


@pytest.mark.parametrize("anneal", [0, 2])
def test_irm_by_hand(anneal):
    z, short = START, 0
    for t, record in enumerate(
        run("irm", WHERE, 5, SOME, epochs=1, batch_size=B, penalty=30.0, anneal_rounds=anneal, weight="num_examples")
    ):
        (first,) = heard(record)
        ends = []
        for c in first:
            p = z
            for (rows,) in walk(t, c, 0, plan=BatchPlan(size=B, epochs=1)):
                short += len(rows) == 1
                factor = 1.0 if t < anneal else 30.0
                p = down(
                    p, lambda q, r=rows, f=factor: F.cross_entropy(logits(q, r), Y[r]) + f * irm_penalty(q, r), EVERY
                )
            ends.append(p)
        z = mean(ends, [float(len(rows_at(WHERE, c))) for c in first])
        same(record, z)


def test_vrex_by_hand_with_clients_of_a_domain_and_some_unheard():
    z, unknown = START, 0
    for t, record in enumerate(run("vrex", WHERE, 4, SOME, length=6, steps=3, batch_size=B, penalty=3.0)):
        first, second = heard(record)
        of: dict[int, list[int]] = {}
        for c in first:
            of.setdefault(c % 3, []).append(c)
        risks = {}
        for d, clients in of.items():
            sizes = [len(rows_at(WHERE, c)) for c in clients]
            risks[d] = sum(s * risk(z, c) for s, c in zip(sizes, clients, strict=True)) / sum(sizes)
        middle = sum(risks.values()) / len(risks)
        ends = []
        for c in second:
            unknown += c % 3 not in risks
            factor = 1 + 6.0 * float(risks[c % 3] - middle) if c % 3 in risks else 1.0
            p = z
            for (rows,) in walk(t, c, 1):
                p = down(p, lambda q, r=rows, f=factor: f * F.cross_entropy(logits(q, r), Y[r]), EVERY)
            ends.append(p)
        z = mean(ends, [1.0] * len(ends))
        same(record, z)
    assert unknown


def test_coral_by_hand_with_minibatches_and_clients_of_a_domain():
    z, single, width = START, 0, len(START[BODY[1]])
    for t, record in enumerate(run("coral", WHERE, 5, SOME, epochs=1, batch_size=B, penalty=0.2)):
        first, second = heard(record)
        domains = [torch.cat([rows_at(WHERE, c) for c in first if c % 3 == d]) for d in sorted({c % 3 for c in first})]
        n = len(domains)
        m = sum(features(z, rows).mean(0) for rows in domains) / n
        covariance = sum(torch.cov(features(z, rows).T) for rows in domains) / n
        ends = []
        for c in second:
            p = z
            for (rows,) in walk(t, c, 1, plan=BatchPlan(size=B, epochs=1)):
                single += len(rows) == 1 and n > 1

                def loss(
                    q: Params, rows: Tensor = rows, m: Tensor = m, covariance: Tensor = covariance, n: int = n
                ) -> Tensor:
                    f = features(q, rows)
                    ce = F.cross_entropy(logits(q, rows), Y[rows])
                    if len(rows) == 1 or n == 1:
                        return ce
                    apart = (f.mean(0) - m).square().mean() + (torch.cov(f.T) - covariance).square().mean()
                    return ce + 0.2 * 2 * n / (n - 1) * apart

                p = down(p, loss, EVERY)
            assert float(features(p, rows).max()) > 0.1  # of a dead net nothing is asked
            ends.append(p)
        z = mean(ends, [1.0] * len(ends))
        same(record, z)
        assert record.phases[0].counts["floats_up"] == len(first) * (width + width**2)
    assert single


def test_a_domain_of_one_example_has_no_covariance():
    first, second = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[[1.0, 2.0], [2.0, 4.0]], [[9.5, 12.0], [12.0, 16.5]]]),
    )
    domain, count = torch.tensor([0, 2]), torch.tensor([1.0, 4.0], dtype=torch.float64)
    found = {name: DomainMeans(domain, v, count) for name, v in (("first", first), ("second", second))}
    none = torch.zeros(0, dtype=torch.int64)
    known = of_all(Reduced(found, none, {}, none), Cohort(none, none), Problem(3, 1.0))
    assert known.send["mean"].tolist() == [2.0, 3.0]
    torch.testing.assert_close(known.send["covariance"], torch.eye(2) * 0.5 * 4 / 3 / 2)
    assert known.config == {"factor": 4.0}


@pytest.mark.parametrize("name", ["irm", "vrex", "coral"])
def test_without_a_penalty_it_is_fedavg(name):
    given = {"steps": 1, "batch_size": 1000, "weight": "num_examples"}
    with_none = run(name, APART, CLIENTS, WaitAll(), penalty=0.0, anneal_rounds=2, **given)
    for a, b in zip(with_none, run("fedavg", APART, CLIENTS, WaitAll(), **given), strict=True):
        same(a, b.state.z["x"])


@pytest.mark.parametrize("name", ["vrex", "coral"])
def test_one_domain_alone_is_refused(name):
    one = replace(WHERE, population=WHERE.population.grouped(torch.zeros(CLIENTS, dtype=torch.int64)))
    with pytest.raises(ConfigError, match=rf"algorithm.name='{name}': it compares domains, and there is one alone: "):
        run(name, one, 4, WaitAll(), steps=1, batch_size=B)


@pytest.mark.parametrize("gap", ["loss", "accuracy"])
@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize(("much", "rounds"), [(0.2, 9), (1.0, 5)])
def test_fedga_by_hand(gap, centre, much, rounds):
    where = replace(WHERE, population=HeldOut(WHERE.population, 0.25, 0))
    z, shares = START, [1 / CLIENTS] * CLIENTS
    given = {"steps": 3, "batch_size": B, "step": much, "rounds": rounds, "gap": gap, "centre": centre}
    for t, record in enumerate(run("fedga", WHERE, 5, SOME, length=8, **given)):
        first, second = heard(record)
        assert len(second) < len(first)
        ends = {c: fit(z, walk(t, c, 0, where)) for c in first}
        new = mean([*ends.values()], [max(shares[c], 1e-12) for c in first])

        def measured(p: Params, c: int) -> float:
            held = where.population.local_data(torch.tensor([c])).held
            rows = held.rows[0, : int(held.counts[0])]
            out = logits(p, rows)
            return float(F.cross_entropy(out, Y[rows]) if gap == "loss" else (out.argmax(1) == Y[rows]).double().mean())

        gaps = [(1 if gap == "loss" else -1) * (measured(new, c) - measured(ends[c], c)) for c in second]
        assert record.metrics["gap_mean"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-6)
        if centre:
            gaps = [g - sum(gaps) / len(gaps) for g in gaps]
        largest, before = max(map(abs, gaps)), sum(shares[c] for c in second)
        if largest > 1e-6 and before:  # or they have nothing to share
            pace = much * max(0, 1 - t / rounds) / len(second)
            moved = [
                min(1.0, max(0.0, shares[c] / before + g / largest * pace)) for c, g in zip(second, gaps, strict=True)
            ]
            shares = [*shares]
            for c, s in zip(second, moved, strict=True):
                shares[c] = s * before / sum(moved)
        z = new
        same(record, z, lambda s: s.z)
        assert record.state.shares.tolist() == pytest.approx(shares, abs=1e-7)
        shares = record.state.shares.tolist()  # what is measured is single
    assert max(shares) > 1.05 / CLIENTS
    assert min(shares) < 0.95 / CLIENTS


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("irm", lambda d, h, w: (d, d)),
        ("vrex", lambda d, h, w: (d + 1, 2 * d + 1)),
        ("coral", lambda d, h, w: (d + w + w**2, 2 * d + w + w**2)),
        ("fedga", lambda d, h, w: (d, 2 * d + 1)),
        ("fedsam", lambda d, h, w: (d, d)),
        ("mofedsam", lambda d, h, w: (d + 1, 2 * d)),
        ("fediir", lambda d, h, w: (d + h + 1, 2 * d + h)),
    ],
)
def test_as_many_floats_travel_as_the_page_says(name, wanted):
    sizes = (sum(START[n].numel() for n in names) for names in (EVERY, HEAD, BODY[1:]))
    *_, record = run(name, WHERE, CLIENTS, WaitAll(), length=2, steps=1, batch_size=B)
    found = [sum(phase.counts[way] for phase in record.phases) / CLIENTS for way in ("floats_up", "floats_down")]
    assert found == list(wanted(*sizes))


def test_shares_keep_their_sum():
    shares = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    gaps = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    raw = torch.tensor([1 / 6 + 0.2, 1 / 3 - 0.1, 1 / 2], dtype=torch.float64)
    for had in (1.0, 0.6, 0.01):  # of a few among many clients, the shares move by no more
        torch.testing.assert_close(adjusted(shares / 0.6 * had, gaps, 0.6), raw / raw.sum() * had)
    cut = torch.tensor([0.01, 0.89, 0.1], dtype=torch.float64)
    moved = torch.tensor([0.0, 1.0, 0.1], dtype=torch.float64)
    torch.testing.assert_close(adjusted(cut, torch.tensor([-1.0, 1.0, 0.0]).double(), 0.9), moved / moved.sum())
    assert adjusted(shares, gaps * 1e-8, 0.6) is shares  # equal accuracies, of which one was rounded
    idle = torch.zeros(2, dtype=torch.float64)
    assert adjusted(idle, gaps[:2], 0.6) is idle
    equal = torch.full((3,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(adjusted(shares[:1].repeat(3), equal, 0.6), shares[:1].repeat(3))
    assert adjusted(shares, torch.zeros(3, dtype=torch.float64), 0.6) is shares
    none = adjusted(torch.tensor([0.1, 0.1], dtype=torch.float64), torch.tensor([-1.0, -1.0], dtype=torch.float64), 1.0)
    assert none.tolist() == [0.1, 0.1]


@pytest.mark.parametrize("name", ["fedga", "vrex", "coral", "fediir", "omg"])
def test_late_answers_are_of_no_use(name):
    """What one exchange says is of the model that another has sent; a matched update, of the model it started from."""
    algorithm = build(name, WHERE.task, CohortOptions(size=2))
    assert any(phase.dated for phase in algorithm.phases)  # one is enough to refuse them
    assert algorithm.same_cohort == (len(algorithm.phases) > 1)
