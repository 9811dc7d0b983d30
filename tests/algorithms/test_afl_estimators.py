"""AFL's estimates from the answers of some clients: sections 3.1, 5 and 9.3 of its specification."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from fedfleet.algorithms.agnostic import estimated, latest_losses
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Problem, Reduced
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import DomainMeans
from fedfleet.simulator.domains import Grouped
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.agnostic import EXACT, MANY, at, losses, mean_of, run, w, world
from tests.algorithms.harness import Fixed, World, build, digits, play, records, script


def heard(where: World, clients: Sequence[int], point: float) -> Reduced:
    """What a phase yields that hears these clients' losses, weighted by their examples."""
    p = where.population
    a, m = p.data["x"].unbind(1)
    each = a * (point - m) ** 2 / 2
    total, weight = torch.zeros(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    for i in clients:
        total[p.domain[i]] += each[p.offsets[i] : p.offsets[i + 1]].sum()
        weight[p.domain[i]] += p.offsets[i + 1] - p.offsets[i]
    there = weight.nonzero().flatten()
    means = DomainMeans(there, total[there] / weight[there], weight[there])
    return Reduced({"loss": means}, torch.tensor(list(clients)), {}, torch.ones(len(clients), dtype=torch.float64))


def problem(where: World) -> Problem:
    p = where.population
    return Problem(p.size, 2.0, p.num_examples, Grouped(p.size, 3, p.domains, p.num_examples))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_horvitz_thompson_is_unbiased_for_the_losses(size):
    last = torch.full((3,), 7.0, dtype=torch.float64)
    found = [
        estimated(heard(MANY, c, 0.7), problem(MANY), last, "horvitz_thompson", size)
        for c in itertools.combinations(range(5), size)
    ]
    torch.testing.assert_close(torch.stack(found).mean(0), losses(MANY, 0.7))


def test_the_ratio_keeps_the_last_loss_of_a_domain_nobody_answered_for():
    answers = heard(MANY, [1, 2], 0.7)
    known = latest_losses(answers, torch.tensor([7.0, 8.0, math.nan], dtype=torch.float64))
    one = float(losses(MANY, 0.7)[1])
    assert known[:2].tolist() == pytest.approx([7.0, one])
    assert known[2].isnan()
    found = estimated(answers, problem(MANY), known, "ratio", 2)
    assert found.tolist() == pytest.approx([7.0, one, (7 + one) / 2])  # of one that was never heard nothing is known


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_step_is_unbiased_over_cohorts(monkeypatch, size):
    """The mean step over all cohorts of a size is the step of all clients."""
    (whole,) = run(MANY, 1, w=0.7)
    steps = []
    for cohort in itertools.combinations(range(5), size):
        with monkeypatch.context() as m:
            script(m, [cohort])
            (state,) = run(MANY, 1, w=0.7)
        steps.append(w(state))
    assert sum(steps) / len(steps) == pytest.approx(w(whole), rel=1e-12)


def test_a_step_of_ratios_is_the_mean_over_those_heard(monkeypatch):
    script(monkeypatch, [[1, 4]])
    (state,) = run(MANY, 1, w=0.7, estimator="ratio")
    weights = torch.tensor([4 / 9 * 1 / 4, 2 / 9])
    gradients = torch.tensor([4 * (0.7 - 3), (0.7 - 1 + 0.7 - 4) / 2])
    assert w(state) == pytest.approx(0.7 - 0.1 * float(weights @ gradients / weights.sum()))


@pytest.mark.parametrize(
    "options",
    [{"gradient": "weighted"}, {"dual_gradient": "single"}, {"gradient": "weighted", "dual_gradient": "single"}],
)
@pytest.mark.slow
def test_drawn_cohorts_are_unbiased(options):
    """Enough seeds to see a bias of a tenth of the step."""
    (whole,) = run(MANY, 1, w=0.7)
    ones = [run(MANY, 1, w=0.7, seed=s, size=3, dual={"lr": 1e-4}, **options)[0] for s in range(250)]
    mean, error = mean_of([torch.tensor([w(s)]) for s in ones])
    assert abs(float(mean) - w(whole)) < 4.5 * float(error)
    assert float(error) < 0.1 * abs(w(whole) - 0.7)
    start = torch.tensor([3, 4, 2], dtype=torch.float64) / 9
    mean, error = mean_of([(s.mixture - start) / 1e-4 for s in ones])  # the losses but for a constant
    wanted = losses(MANY, 0.7)
    assert ((mean - (wanted - wanted.mean())).abs() < 4.5 * error).all()


@pytest.mark.slow
def test_variances_of_the_gradients():
    """PerDomain: sum lambda_k^2 V_k; Weighted: sum lambda_k V_k + sum lambda_k |grad L_k - grad L|^2, one example a domain."""
    where = world([(1, 0), (2, 1), (1, 4)], [(4, 3), (1, -2)], [(1, 1), (2, 4), (2, -3), (1, 0)])
    gradient = lambda rows: torch.tensor([a * (0.7 - m) for a, m in rows], dtype=torch.float64)  # noqa: E731
    each = [gradient(where.population.data["x"][a:b].tolist()) for a, b in itertools.pairwise([0, 3, 5, 9])]
    mixture = torch.tensor([3, 2, 4], dtype=torch.float64) / 9
    mean = torch.stack([g.mean() for g in each])
    variance = torch.stack([g.var(correction=0) for g in each])
    whole = mixture @ mean
    wanted = {
        "per_domain": mixture.square() @ variance,
        "weighted": mixture @ variance + mixture @ (mean - whole).square(),
    }
    for kind, expected in wanted.items():
        options = {"gradient": kind, "batch_size": 1, "size": 3 if kind == "per_domain" else 1}
        found = torch.tensor([(0.7 - w(run(where, 1, w=0.7, seed=s, **options)[0])) / 0.1 for s in range(300)])
        assert float(found.mean()) == pytest.approx(float(whole), abs=4.5 * math.sqrt(float(expected) / 300))
        assert float(found.var()) == pytest.approx(float(expected), rel=0.3)


def test_local_steps_are_fedavg_with_the_weights_lambda():
    states = run(MANY, 3, steps=4, estimator="ratio", dual={"lambda_set": {"kind": "sizes"}})
    wanted = play(
        build("fedavg", MANY.task, CohortOptions(size=5), epochs=4, batch_size=100, lr=0.1), MANY, 3, z=at(0.0)
    )
    for state, z in zip(states, wanted, strict=True):
        assert w(state) == pytest.approx(float(z["x"]["w"]), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"estimator": "ratio"}, {"gradient": "weighted"}])
def test_late_answers_count_less_in_what_they_are_divided_by_too(options):
    """Two clients alike, of which the second is late and counts half: every step goes along a mean of gradients on the way."""
    alike = world([(1, 0)], [(1, 0)], domain=[0, 0])
    fleet = Federation(devices=Fixed((1.0, 1.5)), policy=First(1))
    algorithm = build("afl", alike.task, CohortOptions(size=2), **EXACT, **options)
    found = records(algorithm, alike, 4, z=at(1.0), federation=fleet, stale_discount=0.5)
    points = [1.0, *(w(r.state) for r in found)]
    gradients = [(a - b) / 0.1 for a, b in itertools.pairwise(points)]
    for i, gradient in enumerate(gradients):
        assert points[i] - 1e-9 <= gradient <= 1 + 1e-9
    if options != {"gradient": "weighted"}:  # whose cohort may be one client twice
        assert gradients[1] == pytest.approx((points[1] + 0.5 * 1.0) / 1.5)


@pytest.mark.slow
def test_variances_of_the_losses():
    """single: p sum E loss^2 - sum L_k^2; per domain: the sum of the domains' own (3.1)."""
    where = world([(1, 0), (2, 1), (1, 4)], [(4, 3), (1, -2)], [(1, 1), (2, 4), (2, -3), (1, 0)])
    x = where.population.data["x"]
    each = [a * (0.7 - m) ** 2 / 2 for a, m in (x[i:j].unbind(1) for i, j in itertools.pairwise([0, 3, 5, 9]))]
    mean = torch.stack([e.mean() for e in each])
    second = torch.stack([e.square().mean() for e in each])
    covariance = {"per_domain": (second - mean.square()).diag(), "single": 3 * second.diag() - mean[:, None] * mean}
    wanted = {"per_domain": (second - mean.square()).sum(), "single": 3 * second.sum() - mean.square().sum()}
    start = (torch.tensor([3, 2, 4], dtype=torch.float64) / 9).log()
    away = torch.eye(3, dtype=torch.float64) - 1 / 3
    for kind, matrix in covariance.items():
        assert float(matrix.trace()) == pytest.approx(float(wanted[kind]))
        options = {"dual_gradient": kind, "batch_size": 1, "size": 3 if kind == "per_domain" else 1}
        options |= {"dual": {"kind": "entropy", "lr": 1e-3}}  # from which the gradient can be read, but for a constant
        logs = [run(where, 1, w=0.7, seed=s, **options)[0].mixture.log() for s in range(300)]
        found = torch.stack([(log - start) / 1e-3 for log in logs]) @ away
        assert float(found.var(0).sum()) == pytest.approx(float((away @ matrix @ away).trace()), rel=0.3)


# The account, 5.1 to 5.3


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        # phase: what goes down to a client, and up from one
        ("afl", {}, {"gradient": ((1, 1), (1, 1))}),  # lambda_k n_i / m_k, and a loss
        ("afl", {"estimator": "ratio"}, {"gradient": ((1, 1), (1, 1))}),
        ("afl", {"gradient": "weighted"}, {"loss": ((1, 0), (0, 1)), "gradient": ((1, 0), (1, 0))}),
        ("afl", {"dual_gradient": "single"}, {"loss": ((1, 0), (0, 1)), "gradient": ((1, 1), (1, 0))}),
        ("afl", {"method": "best_response"}, {"loss": ((1, 0), (0, 1)), "gradient": ((1, 1), (1, 0))}),
        ("drfa", {}, {"train": ((1, 0), (2, 0)), "loss": ((1, 0), (0, 1))}),  # the last point and the snapshot
        ("drfa", {"weighting": "importance"}, {"train": ((1, 1), (2, 0)), "loss": ((1, 0), (0, 1))}),
        ("qffl", {}, {"train": ((1, 0), (1, 1))}),  # Delta_k and h_k
    ],
)
def test_floats_follow_the_message_formulas(name, options, wanted):
    """In models and single numbers, for each client asked and each heard."""
    where = digits("classification", clients=9)
    everybody = CohortOptions(size=9)
    algorithm = build(name, where.task, everybody, batch_size=4, **options)
    d = T.count(where.task.init(0))
    for record in records(algorithm, where, 2, policy=First(4)):
        assert [p.phase for p in record.phases] == list(wanted)
        for phase in record.phases:
            down, up = (models * d + numbers for models, numbers in wanted[phase.phase])
            assert phase.counts["floats_down"] == 9 * down
            assert phase.counts["floats_up"] == 4 * up
