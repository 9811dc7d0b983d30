"""Methods that compare domains beside versions of their own: the whole objective by autograd, and rounds by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Bowl, World, build, play, records
from harness import rows as clients_of
from test_personalised import BODY, HEAD, LR, START, WHERE, B, Params, Y, down, features, fit, logits, rows_of
from torch import Tensor, nn

from fedfleet.algorithms.coral import of_all
from fedfleet.algorithms.fedga import adjusted
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Cohort, Problem, Reduced
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.random_waves import KERNELS, in_waves, waves
from fedfleet.simulator.arithmetic.reduction import DomainMeans
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import ResponsePolicy, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.work import Batch, BatchPlan
from fedfleet.tasks.alike import by_head
from fedfleet.tasks.body_and_head import BodyAndHead
from tests.parts import slow_but

EVERY, CLIENTS, THREE = BODY + HEAD, 8, BatchPlan(size=B, steps=3)
SOME = Siwer(low=0.55, high=0.6)  # 3 of 5
APART = replace(WHERE, population=WHERE.population.grouped(torch.arange(CLIENTS)))
"""Each client a domain."""


@pytest.fixture(autouse=True)
def _looks_take_several_chunks(monkeypatch):
    for name in ("fedga", "local"):
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


def same(record: RoundRecord, wanted: Params, state: Callable[[Any], Any] = lambda s: s.z) -> None:
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


def mmd(p: Params) -> Tensor:
    """As DomainBed has it, but for the kernel, which is the mean product of as many waves as the algorithm has."""
    frequencies, shifts = waves(rng.fold(rng.key(0), "mmd"), len(START[BODY[1]]), 3, torch.float64)
    seen = [in_waves(features(p, rows_at(WHERE, c)), frequencies, shifts) for c in range(CLIENTS)]
    each = [c @ d.T for c in seen for d in seen]
    means = torch.stack([kernel.mean() for kernel in each]).view(CLIENTS, CLIENTS)
    apart = [
        means[i, i] + means[j, j] - means[i, j] - means[j, i] for i in range(CLIENTS) for j in range(i + 1, CLIENTS)
    ]
    return torch.stack([risk(p, c) for c in range(CLIENTS)]).mean() + 3.0 * torch.stack(apart).mean()


def variance(p: Params, rows: Tensor) -> Tensor:
    """The variance of each coordinate of single examples' gradients by the head."""

    def loss(head: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ head["3.weight"].T + head["3.bias"], y)

    head = {name: p[name] for name in HEAD}
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(head, features(p, rows), Y[rows])
    return torch.cat([leaf.flatten(1) for leaf in each.values()], 1).var(0, correction=0)


def fishr(p: Params) -> Tensor:
    """As its authors have it, without their moving mean."""
    each = torch.stack([variance(p, rows_at(WHERE, c)) for c in range(CLIENTS)])
    apart = (each - each.mean(0)).square().mean()
    return torch.stack([risk(p, c) for c in range(CLIENTS)]).mean() + 3.0 * apart


@pytest.mark.parametrize(
    ("name", "objective", "more"),
    [("vrex", vrex, {}), ("coral", coral, {}), ("mmd", mmd, {"waves": 3}), ("fishr", fishr, {})],
)
def test_a_full_step_of_all_is_one_of_the_whole_objective(name, objective, more):
    z = START
    for record in run(name, APART, CLIENTS, WaitAll(), steps=1, batch_size=1000, penalty=3.0, **more):
        z = down(z, objective, EVERY)
        same(record, z)
        z = record.state.z["x"]  # short waves make much of rounding
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


FREQUENCIES = waves(rng.fold(rng.key(0), "mmd"), len(START[BODY[1]]), 3, torch.float64)


def in_mean(p: Params, rows: Tensor) -> Tensor:
    return in_waves(features(p, rows), *FREQUENCIES).mean(0)


@pytest.mark.parametrize(
    ("name", "of", "more", "floats"),
    [
        ("mmd", in_mean, {"waves": 3, "penalty": 0.002}, 21),
        ("fishr", variance, {"anneal_rounds": 1, "penalty": 0.4}, 20 * (len(START[BODY[1]]) + 1)),
    ],
)
def test_mmd_and_fishr_by_hand_with_minibatches_and_clients_of_a_domain(name, of, more, floats):
    z = START
    for t, record in enumerate(run(name, WHERE, 5, SOME, steps=3, batch_size=B, **more)):
        first, second = heard(record)
        domains = [torch.cat([rows_at(WHERE, c) for c in first if c % 3 == d]) for d in sorted({c % 3 for c in first})]
        n = len(domains)
        middle = sum(of(z, rows) for rows in domains) / n
        ends = []
        for c in second:
            p = z
            for (rows,) in walk(t, c, 1):

                def loss(q: Params, rows: Tensor = rows, middle: Tensor = middle, n: int = n, t: int = t) -> Tensor:
                    ce, away = F.cross_entropy(logits(q, rows), Y[rows]), (of(q, rows) - middle).square()
                    if n == 1 or (name == "fishr" and t < 1):
                        return ce
                    return ce + more["penalty"] * (2 * n / (n - 1) * away.sum() if name == "mmd" else away.mean())

                p = down(p, loss, EVERY)
            ends.append(p)
        same(record, mean(ends, [1.0] * len(ends)))
        z = record.state.z["x"]
        assert record.phases[0].counts["floats_up"] == len(first) * floats


def test_the_distance_in_waves_is_that_of_the_kernels():
    """Of 4,096 waves a kernel, on points whose exact distance is known."""
    one, other = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0], [2.0, 2.0]]).double()
    both = torch.cat([one, other])
    kernel = sum(torch.exp(-g * torch.cdist(both, both).square()) for g in KERNELS)
    sign = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    assert float(sign @ kernel @ sign) == pytest.approx(4.3514603, abs=1e-7)
    seen = in_waves(both, *waves(rng.key(3), 2, 4096, torch.float64))
    assert float((sign @ seen).square().sum()) == pytest.approx(4.3514603, abs=0.2)
    torch.testing.assert_close(seen @ seen.T, kernel, rtol=0, atol=0.2)


def test_variances_of_a_head_are_those_of_its_authors():
    """Of two domains, by the closed form; the penalty is their mean squared distance from the mean."""
    head = {"weight": torch.tensor([[0.5, -0.5], [0.0, 1.0]]).double(), "bias": torch.zeros(2).double()}
    net = BodyAndHead(nn.Sequential(nn.Identity(), nn.Linear(2, 2)), frozenset({"1.weight", "1.bias"}))
    of = {f"1.{name}": leaf for name, leaf in head.items()}
    found = []
    for x, y in (
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [0, 1, 1]),
        ([[2.0, 1.0], [1.0, -1.0], [0.0, 1.0]], [1, 0, 0]),
    ):
        rows = torch.tensor([*x, [torch.nan] * 2]).double()  # the last does not count
        batch = Batch({"x": rows, "y": torch.tensor([*y, 0])}, torch.tensor([1.0, 1.0, 1.0, 0.0]))
        first, second = by_head(net, of, batch, rows, net.logits(of, rows))
        v = second / 3 - (first / 3).square()
        found.append(torch.cat([v[:, :2].flatten(), v[:, 2]]))
    wanted = [
        [0.07031173, 0.01256595, 0.07031173, 0.01256595, 0.08210958, 0.08210958],
        [0.1498589, 0.26362117, 0.1498589, 0.26362117, 0.24030858, 0.24030858],
    ]
    assert [v.tolist() for v in found] == [pytest.approx(w, abs=1e-8) for w in wanted]
    apart = (torch.stack(found) - torch.stack(found).mean(0)).square()
    assert float(apart.mean()) == pytest.approx(0.00786528, abs=1e-8)
    assert float(apart.sum(1).mean()) == pytest.approx(0.0471917, abs=1e-7)


def test_fish_goes_from_domain_to_domain_and_takes_part_of_the_way():
    bowls = World(Bowl(), clients_of([(1.0, 2.0)], [(3.0, -1.0)]))
    given, seen = {"steps": 1, "batch_size": 1, "lr": 0.1}, set()
    for seed in range(6):
        (z,) = play(build("fish", bowls.task, CohortOptions(size=2), **given), bowls, 1, seed=seed)
        seen.add(round(float(z["x"]["w"]), 12))
    assert seen == {0.735, 0.78}  # the one order, and the other
    alone, one = World(Bowl(), clients_of([(1.0, 2.0)])), CohortOptions(size=1)
    (z,) = play(build("fish", alone.task, one, **given, epsilon=1.0), alone, 1)
    assert float(z["x"]["w"]) == pytest.approx(1.1)  # a step of gradient descent


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


@pytest.mark.parametrize("name", slow_but(["irm", "vrex", "coral", "mmd", "fishr"], "irm", "fishr"))
def test_without_a_penalty_it_is_fedavg(name):
    given = {"steps": 1, "batch_size": 1000, "weight": "num_examples"}
    with_none = run(name, APART, CLIENTS, WaitAll(), penalty=0.0, anneal_rounds=2, **given)
    for a, b in zip(with_none, run("fedavg", APART, CLIENTS, WaitAll(), **given), strict=True):
        same(a, b.state.z["x"])
    given |= {"server_optimizer": {"name": "adam", "lr": 0.01}}
    with_none = run(name, APART, CLIENTS, WaitAll(), penalty=0.0, anneal_rounds=2, **given)
    for a, b in zip(with_none, run("fedopt", APART, CLIENTS, WaitAll(), **given), strict=True):
        same(a, b.state.z["x"])


@pytest.mark.parametrize("name", ["vrex", "coral", "mmd", "fishr"])
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
        same(record, z)
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
        ("mmd", lambda d, h, w: (d + 448, 2 * d + 448)),
        ("fishr", lambda d, h, w: (d + 2 * h, 2 * d + h)),
        ("fish", lambda d, h, w: (d, d)),
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


@pytest.mark.parametrize("name", ["fedga", "vrex", "coral", "mmd", "fishr", "fish", "fediir", "omg"])
def test_late_answers_are_of_no_use(name):
    """What one exchange says is of the model that another has sent; a matched update, of the model it started from."""
    algorithm = build(name, WHERE.task, CohortOptions(size=2))
    assert any(phase.dated for phase in algorithm.phases)  # one is enough to refuse them
    assert algorithm.same_cohort == (len(algorithm.phases) > 1 or name == "fish")
