"""AFL and DRFA with clients that are heard unequally often: section 5.4 of the specification of dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from agnostic import MANY, at, world
from harness import World, build, records
from limits import cohorts, restarting
from scripted import Drawn, Scripted
from torch import Tensor

from fedfleet.algorithms.lambda_sets import Simplex
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.responses import Federation

P = (0.9, 0.3)
TOY = world([(1, 0), (1, 0)], [(4, 3)])
"""The toy with domains of two examples and one, so that lambda starts at the saddle's (2/3, 1/3); there w = 2, both losses 2."""
P_MANY = (0.9, 0.5, 0.3, 0.7, 0.6)
SMALL = {"lr": 1e-3, "dual": {"lr": 1e-3}}


class Moved(NamedTuple):
    """What w and lambda move by in the mean over all cohorts, and the worst loss where they begin."""

    w: float
    mixture: Tensor
    worst: float


def mean_step(
    where: World,
    w: float,
    p: Sequence[float],
    *,
    mixture: Sequence[float] | None = None,
    told: Sequence[float] | None = None,
    known: Sequence[float] | None = None,
    **options: Any,
) -> Moved:
    """Return the mean of a round of AFL; a round that nobody answers moves nothing.

    Args:
        where: clients, all of whom are invited.
        w: the model at which it begins, with ``mixture``, the domains' shares if not given.
        p: the clients' chances; the algorithm is told others if ``told`` is given.
        known: the last losses.

    """
    given = {"mixture": mixture, "losses": known}
    changed = {key: torch.tensor(value, dtype=torch.float64) for key, value in given.items() if value is not None}
    made = build("afl", where.task, CohortOptions(size=len(p)), batch_size=None, average=False, **SMALL, **options)
    rows = list(cohorts(p))
    availability = Scripted([heard for _, heard in rows], told or p)
    fixed = restarting(made, lambda state: state._replace(**changed))
    found = list(records(fixed, where, len(rows), z=at(w), federation=Federation(availability=availability)))
    n = where.population.num_examples(torch.arange(where.population.size)).double()
    start = torch.zeros(int(where.population.domain.max()) + 1, dtype=torch.float64)
    start = changed.get("mixture", start.index_add(0, where.population.domain, n / n.sum()))
    chance = torch.tensor([c for c, _ in rows], dtype=torch.float64)
    dw = torch.tensor([float(r.state.z["x"]["w"]) - w for r in found], dtype=torch.float64)
    dl = torch.stack([r.state.mixture - start for r in found])
    everybody = max(range(len(rows)), key=lambda i: len(rows[i][1]))
    return Moved(float(chance @ dw), chance @ dl, float(found[everybody].state.losses.max()))


def test_the_saddle_is_a_fixed_point_of_corrected_steps():
    moved = mean_step(TOY, 2.0, P, correction="known_p")
    assert moved.w == pytest.approx(0, abs=1e-15)
    assert moved.mixture.abs().max() < 1e-15


def test_fixed_points_of_corrected_and_uncorrected_steps(subtests):
    """w = (sum sqrt(k a) c) / (sum sqrt(k a)), k how much a domain's answers count: p, or q where they are divided by those heard.

    A ratio within the domain leaves w right, and lambda takes in who is available: 11/27 in the place of 2/3.
    """
    whole, last = {"correction": "known_p", "told": (1.0, 1.0)}, {"estimator": "ratio", "known": (2.0, 2.0)}
    rows: list[tuple[tuple[float, float], dict[str, Any], float, float, float]] = [
        (P, whole, 1.60769515, 0.53589838, 3.877026),
        (P, {}, 1.44466163, 0.48155388, 4.838155),
        (P, {"correction": "known_p"}, 2.0, 2 / 3, 2.0),
        ((0.9, 0.5), whole, 1.795525, 0.598508, 2.901520),
        ((0.9, 0.5), {}, 1.682228, 0.560743, 3.473046),
        ((0.9, 0.5), last, 2.0, 11 / 27, 2.0),
    ]
    for p, options, w, first, worst in rows:
        with subtests.test(f"{p}, {options}"):
            moved = mean_step(TOY, w, p, mixture=(first, 1 - first), **options)
            assert moved.w / 1e-3 == pytest.approx(0, abs=5e-6)
            assert (moved.mixture / 1e-3).tolist() == pytest.approx([0, 0], abs=5e-6)
            assert moved.worst == pytest.approx(worst, abs=5e-6)


def test_ratios_have_no_fixed_point_where_lambda_cannot_take_in_who_is_available():
    """Any lambda above 0 lets w fall below 2; there lambda falls to 0, with which w rises again."""
    for first in (1e-9, 0.3, 1.0):
        moved = mean_step(TOY, 2.0, P, mixture=(first, 1 - first), known=(2.0, 2.0), estimator="ratio")
        assert moved.w < -5e-5
    below = (1.98**2 / 2, 2 * (1.98 - 3) ** 2)
    assert mean_step(TOY, 1.98, P, mixture=(0.3, 0.7), known=below, estimator="ratio").mixture[0] < -1e-5
    assert mean_step(TOY, 1.98, P, mixture=(0.0, 1.0), known=below, estimator="ratio").w > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "w", "first"),
    [({"estimator": "ratio"}, (1.99, 0.06), (0.08, 0.06)), ({"correction": "known_p"}, (2.007, 0.1), (0.6667, 0.03))],
)
def test_runs_of_afl_stay_about_their_fixed_points(options, w, first):
    """Bounds of 4 standard errors of 2,400 rounds; lambda of ratios stays about the boundary, not on it."""
    steps = {"lr": 0.01, "dual": {"lr": 0.01}}
    made = build("afl", TOY.task, CohortOptions(size=2), batch_size=None, average=False, **steps, **options)
    given = {"z": at(2.0), "inner": "batched", "attempts": 1000, "federation": Federation(availability=Drawn(P))}
    states = [r.state for r in records(made, TOY, 2900, **given)][500:]
    assert sum(float(s.z["x"]["w"]) for s in states) / 2400 == pytest.approx(w[0], abs=w[1])
    assert sum(float(s.mixture[0]) for s in states) / 2400 == pytest.approx(first[0], abs=first[1])


@pytest.mark.parametrize(
    "options",
    [
        {"correction": "known_p"},
        {"correction": {"kind": "known_p", "cap": 10.0}, "method": "optimistic"},
    ],
)
def test_corrected_steps_are_unbiased_over_all_cohorts(options):
    """Domains of several clients, each with a chance of its own."""
    found = mean_step(MANY, 0.7, P_MANY, **options)
    made = build("afl", MANY.task, CohortOptions(size=5), batch_size=None, average=False, **SMALL)
    (whole,) = records(made, MANY, 1, z=at(0.7))
    nobody = torch.tensor([1 - p for p in P_MANY], dtype=torch.float64).prod()
    assert found.w == pytest.approx(float(whole.state.z["x"]["w"]) - 0.7, rel=1e-9)
    start = torch.tensor([3.0, 4.0, 2.0], dtype=torch.float64) / 9
    moved = whole.state.mixture - start
    torch.testing.assert_close(found.mixture, moved, rtol=1e-9, atol=1e-15)
    assert nobody > 0.003  # of whom a sum knows nothing


def test_ratios_weigh_clients_of_a_domain_by_their_chances():
    """Domain 0 has clients 0 and 3, of 2 and 1 examples: Hajek within it."""
    made = build(
        "afl",
        MANY.task,
        CohortOptions(size=5),
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
            name, TOY.task, CohortOptions(size=2), batch_size=None, average=False, correction="known_p", **options
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
        CohortOptions(size=2),
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
    made = build("afl", MANY.task, CohortOptions(size=5), **options)
    found = [
        (float(r.state.z["x"]["w"]), float(r.state.mixture[0]))
        for r in records(made, MANY, 6, z=at(0.7), federation=Federation(availability=Scripted(script, P_MANY)))
    ]
    for ours, theirs in zip(found, table(script, 0.05, 0.02), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_memory_is_the_whole_round_where_all_are_heard():
    options = {"batch_size": None, "average": False, "lr": 0.05, "dual": {"lr": 0.02}}
    a, b = (
        list(records(build("afl", MANY.task, CohortOptions(size=5), **options, correction=c), MANY, 3, z=at(0.7)))
        for c in ("none", "memory")
    )
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one.state.mixture, other.state.mixture, rtol=0, atol=1e-12)
        assert float(one.state.z["x"]["w"]) == pytest.approx(float(other.state.z["x"]["w"]), abs=1e-12)
        torch.testing.assert_close(one.state.losses, other.state.losses, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_memory_comes_to_the_saddle_and_says_nothing_of_domains_never_heard():
    options = {"batch_size": None, "average": False, "lr": 0.1, "dual": {"lr": 0.006}, "correction": "memory"}
    made = build("afl", TOY.task, CohortOptions(size=2), **options)
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
        CohortOptions(size=2),
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


def test_chances_below_the_bound_are_counted(subtests):
    """Of two clients online with chances 0.9 and 0.3 one is cut at 1/p = 2, each time that it is asked."""
    cut = {"correction": {"kind": "known_p", "cap": 2.0}}
    rows: list[tuple[str, dict[str, Any], float]] = [
        ("afl", {**SMALL, "batch_size": None}, 1),
        ("afl", {**SMALL, "batch_size": None, "gradient": "weighted"}, 2),
        ("drfa", {"steps": 2, "weighting": "importance"}, 2),
        ("cluster_fedvarp", {"steps": 1}, 1),
        ("afl", {**SMALL, "batch_size": None, "correction": "known_p"}, 0),
    ]
    for name, options, count in rows:
        with subtests.test(f"{name}, {options}"):
            made = build(name, TOY.task, CohortOptions(size=2), **{**cut, **options})
            federation = Federation(availability=Scripted([(0, 1)] * 2, P))
            (record,) = records(made, TOY, 1, federation=federation)
            assert record.metrics["capped"] == count
