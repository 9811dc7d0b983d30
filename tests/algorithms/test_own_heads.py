"""FedPAC and FedAS beside versions of their own: an MLP by hand, a client and a batch at a time; and FedPAC's programme."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import World, build, digits, records
from test_personalised import BODY, HEAD, LR, START, WHERE, B, Params, Y, down, features, fit, logits, rows_of, some
from torch import Tensor

from fedfleet.algorithms.fedpac import mixtures
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.prototypes import Moments
from fedfleet.algorithms.simplex_qp import least_quadratic
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.work import Batch, BatchPlan

ONCE, TWO, THREE = (
    BatchPlan(size=B, epochs=1),
    BatchPlan(size=B, steps=2),
    BatchPlan(size=B, steps=3),
)
ROUNDS, CLIENTS, CLASSES = 6, 8, 10
SORTED = World(WHERE.task, replace(digits("classification", clients=8).population, data=WHERE.population.data))
"""The same examples, of one or two classes a client: of some classes nobody may be heard."""


def run(name: str, where: World = WHERE, **options: Any) -> list[RoundRecord]:
    """3 of 5 are heard in the first exchange of a round, and 2 of the 3 in the second, if there is one."""
    algorithm = build(name, where.task, CohortOptions(size=5), batch_size=B, lr=LR, **options)
    z = T.map(torch.Tensor.double, where.task.init(0))
    return list(records(algorithm, where, ROUNDS, z=z, policy=Siwer(low=0.55, high=0.6)))


def heard(record: RoundRecord) -> list[list[int]]:
    return [p.clients[p.responses.outcome == Outcome.COMPLETED].tolist() for p in record.phases]


def everything(c: int, where: World = WHERE) -> Tensor:
    local = where.population.local_data(torch.tensor([c]))
    return local.rows[0, : int(local.counts[0])]


def means(p: Params, c: int, where: World = WHERE) -> dict[int, Tensor]:
    rows = everything(c, where)
    return {k: features(p, rows[Y[rows] == k]).mean(0) for k in Y[rows].unique().tolist()}


def pulled(p: Params, rows: Tensor, towards: dict[int, Tensor]) -> Tensor:
    """How far each feature is from the one that its class has, mean over features (B,); 0 where it has none."""
    f = features(p, rows)
    return torch.stack(
        [(f[i] - towards[int(k)]).square().mean() if int(k) in towards else 0 * f[i, 0] for i, k in enumerate(Y[rows])]
    )


def best(matrix: Tensor) -> Tensor:
    """The least of a' P a on the simplex: of the best points on each of its faces that are in it."""
    n, found = len(matrix), []
    for size in range(1, n + 1):
        for face in itertools.combinations(range(n), size):
            part = matrix[list(face)][:, list(face)]
            weights = torch.linalg.pinv(part) @ torch.ones(size, dtype=matrix.dtype)
            weights = weights / weights.sum()
            if bool((weights >= -1e-12).all()):
                a = torch.zeros(n, dtype=matrix.dtype)
                a[list(face)] = weights
                found.append(a)
    return min(found, key=lambda a: float(a @ matrix @ a))


@pytest.mark.parametrize("where", [WHERE, SORTED], ids=["skewed", "sorted"])
def test_fedpac_by_hand(where):
    z, heads, common = some(START, BODY), {c: some(START, HEAD) for c in range(CLIENTS)}, {}
    mixed, missing = 0, 0
    for t, record in enumerate(run("fedpac", where, steps=3, head_steps=2, pull=0.7)):
        first, second = heard(record)
        assert len(first) == 3
        assert len(second) == 2
        key = rng.fold(rng.key(0), "client", t, 0)
        sent: list[Params] = []
        h, v, after = [], [], []
        for c in first:
            p, rows = {**z, **heads[c]}, everything(c, where)
            f = features(p, rows)
            shares = {k: float((Y[rows] == k).double().mean()) for k in range(CLASSES)}
            mu = means(p, c, where)
            h.append(torch.stack([shares[k] * mu[k] if k in mu else torch.zeros_like(f[0]) for k in range(CLASSES)]))
            squared = sum(shares[k] * f[Y[rows] == k].square().sum(1).mean() for k in mu)
            v.append((squared - sum(shares[k] ** 2 * mu[k].square().sum() for k in mu)) / len(rows))
            p = fit(p, rows_of(c, key, 1, TWO, where), HEAD)
            for (batch,) in rows_of(c, key, 2, THREE, where):

                def near(q: Params, batch: Tensor = batch) -> Tensor:
                    apart = pulled(q, batch, common).mean() if common else 0.0
                    return F.cross_entropy(logits(q, batch), Y[batch]) + 0.7 * apart

                p = down(p, near, BODY)
            sent.append(p)
            after.append(means(p, c, where))
        weights = [len(everything(c, where)) for c in first]
        z = {n: sum(w * p[n] for w, p in zip(weights, sent, strict=True)) / sum(weights) for n in BODY}
        for k in range(CLASSES):
            if having := [m[k] for m in after if k in m]:
                common[k] = torch.stack(having).mean(0)
            missing += not having and k in common
        heads |= {c: some(p, HEAD) for c, p in zip(first, sent, strict=True)}
        own = []
        for i, c in enumerate(first):
            d = torch.stack([torch.stack([((h[i] - a) * (h[i] - b)).sum() for b in h]) for a in h])
            a = best(torch.diag(torch.stack(v)) + d)
            a = torch.where(a < 1e-3, 0.0, a)
            own.append(float(a[i] / a.sum()))
            if c in second:
                mixed += int((a > 0).sum()) > 1
                heads[c] = {n: sum(x * p[n] for x, p in zip(a / a.sum(), sent, strict=True)) for n in HEAD}
        assert record.metrics["own_head"] == pytest.approx(sum(own) / len(own), rel=1e-6)
        for n in BODY:
            torch.testing.assert_close(record.state.z["x"][n], z[n], rtol=1e-9, atol=1e-11)
        for k, wanted in common.items():
            torch.testing.assert_close(record.state.prototypes[k], wanted, rtol=1e-9, atol=1e-11)
        assert record.state.known.tolist() == [float(k in common) for k in range(CLASSES)]
    assert mixed > 3 or where is SORTED
    assert (missing > 0) == (where is SORTED)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_fedpac_moves_a_part_at_a_time_whatever_the_optimiser_remembers(clip):
    given = {"client_optimizer": {"momentum": 0.9, "weight_decay": 0.1, "clip_norm": clip}, "head_steps": 2}
    one = run("fedpac", steps=3, **given)[0]
    key, sent = rng.fold(rng.key(0), "client", 0, 0), []
    for c in heard(one)[0]:
        p = START
        for stage, plan, names in ((1, TWO, HEAD), (2, THREE, BODY)):
            v = {n: torch.zeros_like(p[n]) for n in names}
            for (rows,) in rows_of(c, key, stage, plan):
                at = {name: leaf.clone().requires_grad_() for name, leaf in p.items()}
                g = torch.autograd.grad(F.cross_entropy(logits(at, rows), Y[rows]), [at[n] for n in names])
                long = float(sum(d.square().sum() for d in g)) ** 0.5
                scale = 1.0 if clip is None else min(1.0, clip / (long + 1e-6))
                v = {n: 0.9 * v[n] + scale * d + 0.1 * p[n] for n, d in zip(names, g, strict=True)}
                p = {**p, **{n: p[n] - LR * v[n] for n in names}}
        sent.append((len(everything(c)), p))
    for n in BODY:
        mean = sum(w * p[n] for w, p in sent) / sum(w for w, _ in sent)
        torch.testing.assert_close(one.state.z["x"][n], mean, rtol=1e-9, atol=1e-11)


def test_what_fedpac_sends_is_counted():
    one = run("fedpac", steps=1)[0]
    width = len(START[BODY[1]])
    body, head = (sum(START[n].numel() for n in names) for names in (BODY, HEAD))
    table = CLASSES * width
    assert one.phases[0].counts["floats_down"] == 5 * (body + table + CLASSES)
    assert one.phases[0].counts["floats_up"] == 3 * (body + head + table + 1 + table + CLASSES)
    assert one.phases[1].counts["floats_down"] == 3 * head
    assert one.phases[1].counts["floats_up"] == 0


def test_fedas_by_hand():
    z, models = some(START, BODY), {}
    for t, record in enumerate(run("fedas", steps=3, align_lr=0.3, align_epochs=2)):
        (first,) = heard(record)
        key = rng.fold(rng.key(0), "client", t, 0)
        sent, information = [], []
        for c in first:
            p = {**z, **some(models.get(c, START), HEAD)}
            if c in models:
                towards = means(models[c], c)
                for (batch,) in rows_of(c, key, 1, BatchPlan(size=B, epochs=2)):

                    def apart(q: Params, batch: Tensor = batch, towards: dict[int, Tensor] = towards) -> Tensor:
                        each = pulled(q, batch, towards)
                        return sum((each[Y[batch] == k].mean() for k in Y[batch].unique()), torch.zeros(()))

                    p = down(p, apart, BODY, 0.3)
            p = fit(p, rows_of(c, key, 2, THREE))
            of = torch.tensor(0.0, dtype=torch.float64)
            for (batch,) in rows_of(c, key, 3, ONCE):
                at = {n: leaf.clone().requires_grad_() for n, leaf in p.items()}
                g = torch.autograd.grad(F.cross_entropy(logits(at, batch), Y[batch]), [*at.values()])
                of += sum(leaf.square().sum() for leaf in g)
            models[c] = p
            sent.append(p)
            information.append(float(of))
        z = {n: sum(w * p[n] for w, p in zip(information, sent, strict=True)) / sum(information) for n in BODY}
        for n in BODY:
            torch.testing.assert_close(record.state.z["x"][n], z[n], rtol=1e-9, atol=1e-11)
    assert len(models) > 4


def test_one_client_of_fedas_trains_alone_once_it_is_aligned():
    """Its body is the server's, so that with no rate of alignment it is local training."""
    alone = build("fedas", WHERE.task, CohortOptions(size=1), batch_size=B, lr=LR, steps=3, align_lr=0.0)
    one = type(WHERE)(WHERE.task, only(0))
    z = T.map(torch.Tensor.double, WHERE.task.init(0))
    p = START
    for t, record in enumerate(records(alone, one, 3, z=z)):
        key = rng.fold(rng.key(0), "client", t, 0)
        p = fit(p, rows_of(0, key, 2, THREE, one))
        for n in BODY:
            torch.testing.assert_close(record.state.z["x"][n], p[n], rtol=1e-9, atol=1e-11)


def only(c: int) -> Any:
    return one_client(everything(c))


def one_client(rows: Tensor) -> Any:
    whole = WHERE.population
    return type(whole)(whole.data, rows, torch.tensor([0, len(rows)]), torch.zeros(1).long())


def test_fedas_goes_on_where_no_client_has_anything_to_learn():
    """A common model that is certain, and right, of all that clients have."""
    z = T.map(torch.Tensor.double, WHERE.task.init(0))
    z = {"x": {**z["x"], "3.bias": 1e6 * (torch.arange(CLASSES) == 0).double()}}
    where = World(WHERE.task, one_client((Y == 0).nonzero()[:9, 0]))
    (one,) = records(build("fedas", where.task, CohortOptions(size=1), batch_size=B), where, 1, z=z)
    for n in BODY:
        torch.testing.assert_close(one.state.z["x"][n], z["x"][n], rtol=1e-12, atol=0)


def test_moments_add_up_over_batches():
    x, y = rng.normal(rng.key(5), (7, 3), torch.float64), torch.tensor([0, 2, 2, 0, 2, 1, 1])
    seen = Moments(torch.zeros(4, 3).double(), torch.zeros(4).double(), torch.zeros(4).double())
    ops: Any = SimpleNamespace(apply=lambda name, z, batch: batch.x)
    for rows in (slice(0, 4), slice(4, 7)):
        weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])[rows]
        seen = seen.plus(
            ops, {}, Batch({"x": torch.where(weight[:, None] > 0, x[rows], torch.nan), "y": y[rows]}, weight)
        )
    assert seen.counts.tolist() == [2, 0, 3, 0]
    assert seen.known.tolist() == [1, 0, 1, 0]
    parts = {0: x[[0, 3]], 2: x[[1, 2, 4]]}
    for k in range(4):
        of = parts.get(k, torch.zeros(1, 3).double())
        torch.testing.assert_close(seen.means()[k], of.mean(0))
        torch.testing.assert_close(seen.squares[k], of.square().sum())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_programmes_on_the_simplex_are_solved(size):
    found = torch.stack([rng.normal(rng.key(i), (size, 3), torch.float64) for i in range(12)])
    p = found @ found.mT + 0.01 * torch.eye(size, dtype=torch.float64)
    for matrix in p:
        a = least_quadratic(matrix)
        assert float(a.sum()) == pytest.approx(1, abs=1e-12)
        assert float(a.min()) >= 0
        value, least = float(a @ matrix @ a), float(best(matrix) @ matrix @ best(matrix))
        assert value == pytest.approx(least, rel=1e-10)


def test_mixtures_are_on_the_simplex_without_small_weights():
    h = rng.normal(rng.key(3), (9, 4), torch.float64)
    found = mixtures(h @ h.T, rng.uniform(rng.key(4), (9,), torch.float64), 0.05)
    torch.testing.assert_close(found.sum(1), torch.ones(9, dtype=torch.float64))
    assert float(found.min()) >= 0
    assert (found == 0).any()
    assert not ((found > 0) & (found < 0.05)).any()


def test_of_equal_clients_the_one_with_the_least_variance_counts_most():
    equal = torch.zeros(3, 3, dtype=torch.float64)
    found = mixtures(equal, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), 1e-3)
    torch.testing.assert_close(
        found, torch.tensor([[4.0, 2.0, 1.0]] * 3, dtype=torch.float64) / 7, rtol=1e-4, atol=1e-5
    )


def test_where_every_weight_is_small_a_client_has_its_own_head():
    found = mixtures(torch.zeros(3, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0.5)
    assert torch.equal(found, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("seed", [6, 8, 20, 36])
def test_programmes_without_variance_are_solved(seed):
    """Of clients of an example each: of features far apart in size the solver needs many passes."""
    size = rng.uniform(rng.key(seed), (70, 1), torch.float64) ** 6
    h = size * rng.normal(rng.key(seed + 10**6), (70, 20), torch.float64)
    found = mixtures(h @ h.T, torch.zeros(70, dtype=torch.float64), 0.0)
    torch.testing.assert_close(found @ h, h, rtol=0, atol=1e-6)
