"""AFL and DRFA with clients that are heard unequally often: section 5.4 of the specification of dropout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agnostic import MANY, at, world
from harness import World, build, records
from scripted import Drawn, Scripted

from fedfleet.algorithms.lambda_sets import Simplex
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.responses import Federation

P = (0.9, 0.3)
Q = (0.82258065, 0.17741935)  # how often each is heard, as a share, empty rounds tried again
TOY = world([(1, 0), (1, 0)], [(4, 3)])
"""The toy with domains of two examples and one, so that lambda starts at the saddle's (2/3, 1/3); there w = 2, both losses 2."""
P_MANY = (0.9, 0.5, 0.3, 0.7, 0.6)


def mean_step(where: World, name: str, w: float, p: Sequence[float], **options: Any) -> tuple[float, torch.Tensor]:
    """Return the mean over all cohorts of what w and lambda move by in the first round; nobody heard moves nothing."""
    options = {"batch_size": None, "average": False, **options}
    made = build(name, where.task, CohortOptions(invite=len(p)), **options)
    sizes = torch.zeros(0)
    dw, dl = 0.0, torch.zeros(0)
    for mask in itertools.product((False, True), repeat=len(p)):
        heard = tuple(i for i, on in enumerate(mask) if on)
        if not heard:
            continue
        chance = 1.0
        for on, c in zip(mask, p, strict=True):
            chance *= c if on else 1 - c
        script = [heard] * len(made.phases)
        (record,) = records(made, where, 1, z=at(w), federation=Federation(availability=Scripted(script, p)))
        if not len(sizes):
            n = where.population.num_examples(torch.arange(where.population.size)).double()
            sizes = torch.zeros(len(record.state.mixture), dtype=torch.float64)
            sizes.index_add_(0, where.population.domain, n)
            sizes /= sizes.sum()
            dl = torch.zeros_like(sizes)
        dw += chance * (float(record.state.z["x"]["w"]) - w)
        dl += chance * (record.state.mixture - sizes)
    return dw, dl


SMALL = {"lr": 1e-3, "dual": {"lr": 1e-3}}


def test_the_saddle_is_a_fixed_point_of_corrected_steps():
    dw, dl = mean_step(TOY, "afl", 2.0, P, correction="known_p", **SMALL)
    assert dw == pytest.approx(0, abs=1e-15)
    assert dl.abs().max() < 1e-15


def test_uncorrected_steps_have_another_fixed_point():
    """Those heard are counted as all: (w, lambda) is the saddle of losses times q, 1.44466163 and 0.48155388."""
    dw, dl = mean_step(TOY, "afl", 2.0, P, **SMALL)
    assert dw / 1e-3 < -1
    assert dl[0] > 1e-3 / 3  # both neglect the domain that is rarely heard
    q = torch.tensor(Q, dtype=torch.float64)
    w = 1.44466163
    lost = q * torch.tensor([w**2 / 2, 4 * (w - 3) ** 2 / 2], dtype=torch.float64)
    assert float(lost[0] - lost[1]) == pytest.approx(0, abs=1e-6)  # where lambda rests
    assert 0.48155388 * Q[0] * w + (1 - 0.48155388) * Q[1] * 4 * (w - 3) == pytest.approx(0, abs=1e-6)  # where w does


@pytest.mark.parametrize(
    "options",
    [
        {"correction": "known_p"},
        {"correction": {"kind": "known_p", "cap": 10.0}, "method": "optimistic"},
    ],
)
def test_corrected_steps_are_unbiased_over_all_cohorts(options):
    """Domains of several clients, each with a chance of its own."""
    found = mean_step(MANY, "afl", 0.7, P_MANY, **SMALL, **options)
    made = build("afl", MANY.task, CohortOptions(invite=5), batch_size=None, average=False, **SMALL)
    (whole,) = records(made, MANY, 1, z=at(0.7))
    nobody = torch.tensor([1 - p for p in P_MANY], dtype=torch.float64).prod()
    assert found[0] == pytest.approx(float(whole.state.z["x"]["w"]) - 0.7, rel=1e-9)
    start = torch.tensor([3.0, 4.0, 2.0], dtype=torch.float64) / 9
    moved = whole.state.mixture - start
    torch.testing.assert_close(found[1], moved, rtol=1e-9, atol=1e-15)
    assert nobody > 0.003  # of whom a sum knows nothing


def test_ratios_weigh_clients_of_a_domain_by_their_chances():
    """Domain 0 has clients 0 and 3, of 2 and 1 examples: Hajek within it."""
    made = build(
        "afl",
        MANY.task,
        CohortOptions(invite=5),
        batch_size=None,
        average=False,
        estimator="ratio",
        correction="known_p",
    )
    availability = Scripted([(0, 3, 4)], P_MANY)
    (record,) = records(made, MANY, 1, z=at(0.7), federation=Federation(availability=availability))
    each = [(0.7**2 / 2 + 2 * (0.7 - 1) ** 2 / 2) / 2, 2 * (0.7 - 2) ** 2 / 2]
    weights = [2 / P_MANY[0], 1 / P_MANY[3]]
    expected = sum(v * w for v, w in zip(each, weights, strict=True)) / sum(weights)
    assert float(record.state.losses[0]) == pytest.approx(expected, rel=1e-12)


def test_drawn_by_lambda_one_divides_by_those_drawn(monkeypatch):
    """AFL's weighted gradients and DRFA's models: 1/p_i each, over the number drawn, not heard."""
    p, heard = (0.5, 0.25), (1,)
    for name, options in (
        ("afl", {"gradient": "weighted"}),
        ("drfa", {"steps": 1, "lr": 0.1}),
    ):
        made = build(
            name, TOY.task, CohortOptions(invite=2), batch_size=None, average=False, correction="known_p", **options
        )
        with monkeypatch.context() as patch:
            patch.setattr(f"fedfleet.algorithms.{name}.by_shares", lambda rnd, size, mixture: rnd.invite(size))
            script = [heard, (0, 1)] if name == "drfa" else [(0, 1), heard]
            where = Federation(availability=Scripted(script, p))
            (record,) = records(made, TOY, 1, z=at(1.0), federation=where)
        gradient = 4 * (1.0 - 3.0)
        assert float(record.state.z["x"]["w"]) == pytest.approx(1.0 - 0.1 * gradient / p[1] / 2, rel=1e-12)


def test_one_client_a_domain_drawn_uniformly_is_weighed_too(monkeypatch):
    made = build(
        "afl",
        TOY.task,
        CohortOptions(invite=2),
        batch_size=None,
        average=False,
        dual_gradient="single",
        correction="known_p",
        dual={"lr": 1e-3},
    )
    with monkeypatch.context() as patch:
        patch.setattr("fedfleet.algorithms.afl.by_shares", lambda rnd, size, mixture: rnd.invite(size))
        availability = Scripted([(1,), (0, 1)], (0.5, 0.25))
        (record,) = records(made, TOY, 1, z=at(1.0), federation=Federation(availability=availability))
    estimate = 2 * (4 * (1.0 - 3.0) ** 2 / 2 / 0.25) / 2  # p / S times the loss over its chance; 0 of the other
    assert float(record.state.mixture[1] - record.state.mixture[0]) == pytest.approx(1 / 3 - 2 / 3 + 1e-3 * estimate)


def table(script: Sequence[Sequence[int]], lr: float, dual_lr: float) -> list[tuple[float, float]]:
    """AFL with every client's last gradient and loss at the server, for the clients of MANY."""
    n = torch.tensor([2.0, 1.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    of, m = torch.tensor([0, 1, 1, 0, 2]), torch.tensor([3.0, 4.0, 2.0], dtype=torch.float64)
    rows = [[(1, 0), (2, 1)], [(4, 3)], [(1, -2), (1, 5), (3, 1)], [(2, 2)], [(1, 1), (1, 4)]]
    g, loss = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    w, lam, found = 0.7, m / 9, []
    simplex = Simplex(torch.ones(3, dtype=torch.bool))
    for heard in script:
        for i in heard:
            g[i] = sum(a * (w - c) for a, c in rows[i]) / len(rows[i])
            loss[i] = sum(a * (w - c) ** 2 / 2 for a, c in rows[i]) / len(rows[i])
        share = n / m[of]
        step = float((lam[of] * share * g).sum())
        all_losses = torch.zeros(3, dtype=torch.float64).index_add_(0, of, share * loss)
        w, lam = w - lr * step, simplex.project(lam + dual_lr * all_losses)
        found.append((w, float(lam[0])))
    return found


def test_memory_is_the_table_of_last_gradients_and_losses():
    script = [(0, 2), (1,), (3, 4), (0, 1, 2), (4,), (2, 3)]
    options = {"batch_size": None, "average": False, "lr": 0.05, "dual": {"lr": 0.02}, "correction": "memory"}
    made = build("afl", MANY.task, CohortOptions(invite=5), **options)
    found = [
        (float(r.state.z["x"]["w"]), float(r.state.mixture[0]))
        for r in records(made, MANY, 6, z=at(0.7), federation=Federation(availability=Scripted(script, P_MANY)))
    ]
    for ours, theirs in zip(found, table(script, 0.05, 0.02), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_memory_is_the_whole_round_where_all_are_heard():
    options = {"batch_size": None, "average": False, "lr": 0.05, "dual": {"lr": 0.02}}
    a, b = (
        list(records(build("afl", MANY.task, CohortOptions(invite=5), **options, correction=c), MANY, 3, z=at(0.7)))
        for c in ("none", "memory")
    )
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one.state.mixture, other.state.mixture, rtol=0, atol=1e-12)
        assert float(one.state.z["x"]["w"]) == pytest.approx(float(other.state.z["x"]["w"]), abs=1e-12)
        torch.testing.assert_close(one.state.losses, other.state.losses, rtol=0, atol=1e-12)


def test_memory_comes_to_the_saddle_and_says_nothing_of_domains_never_heard():
    options = {"batch_size": None, "average": False, "lr": 0.1, "dual": {"lr": 0.006}, "correction": "memory"}
    made = build("afl", TOY.task, CohortOptions(invite=2), **options)
    script = [(0,), (0,), (0, 1), (1,), (0,)] * 40
    found = list(records(made, TOY, 200, z=at(0.0), federation=Federation(availability=Scripted(script, P))))
    assert found[1].state.losses.isnan().tolist() == [False, True]
    assert float(found[-1].state.z["x"]["w"]) == pytest.approx(2.0, abs=1e-6)
    assert found[-1].state.mixture.tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-6)


def test_memory_needs_the_plain_estimators():
    for name, value in (("gradient", "weighted"), ("estimator", "ratio"), ("method", "best_response")):
        with pytest.raises(ValueError, match=f"{name}={value}: correction: memory"):
            build("afl", TOY.task, correction="memory", **{name: value})
    build("afl", TOY.task, correction="memory", method="optimistic")


def test_drfas_second_cohort_stands_for_those_invited():
    made = build(
        "drfa",
        TOY.task,
        CohortOptions(invite=2),
        batch_size=None,
        steps=1,
        lr=1e-9,
        weighting="importance",
        correction="known_p",
        dual={"lr": 1e-3},
    )
    (record,) = records(made, TOY, 1, z=at(1.0), federation=Federation(availability=Scripted([(0, 1), (1,)], P)))
    estimate = 4 * (1.0 - 3.0) ** 2 / 2 / P[1]  # N / S = 1
    assert float(record.state.mixture[1] - record.state.mixture[0]) == pytest.approx(
        1 / 3 - 2 / 3 + 1e-3 * estimate, rel=1e-6
    )


def test_chances_that_are_drawn_are_those_that_are_told():
    """The mean of sum_H 1/p over rounds is N, within four standard errors."""
    model, clients = Drawn(P), torch.arange(2)
    key, now = rng.key(3), torch.zeros(2, dtype=torch.float64)
    p = model.chance(clients, now, now)
    sums = torch.stack([(model.online(rng.fold(key, t), clients, now) / p).sum() for t in range(2000)])
    assert abs(float(sums.mean()) - 2) < 4 * float(sums.std()) / 2000**0.5
