"""AFL and DRFA against the traces, identities and laws of the AFL specification, sections 3 to 5 and 9."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fedfleet.algorithms.afl import State, estimated, learnt
from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Problem, Reduced
from fedfleet.simulator.domains import Grouped
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.policies import First
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.reduction import DomainMeans
from fedfleet.simulator.responses import Federation
from tests.algorithms.harness import Bowl, Fixed, World, build, play, records, script

EXACT = {"batch_size": None, "lr": 0.1, "average": False}


def world(*clients: Sequence[Sequence[float]], domain: Sequence[int] | None = None) -> World:
    """Clients with rows (a, m) of losses a (w - m)^2 / 2; each a domain of its own if none are given."""
    sizes = torch.tensor([0, *(len(c) for c in clients)])
    data = torch.tensor([r for c in clients for r in c], dtype=torch.float64)
    of = torch.arange(len(clients)) if domain is None else torch.tensor(domain)
    return World(Bowl(), InMemoryPopulation({"x": data}, torch.arange(len(data)), sizes.cumsum(0), of))


TWO = world([(1, 0)], [(4, 3)])
"""The toy of the specification, 9.1: saddle w = 2, lambda = (2/3, 1/3), value 2."""


def at(w: float):
    return {"x": {"w": torch.tensor(w, dtype=torch.float64)}}


def run(
    where: World, rounds: int, name: str = "afl", *, w: float = 0.0, invite: int | None = None, **options
) -> list[State]:
    everybody = CohortOptions(invite=invite or where.population.size)
    seed = options.pop("seed", 0)
    algorithm = build(name, where.task, everybody, **{**EXACT, **options} if name == "afl" else options)
    return [r.state for r in records(algorithm, where, rounds, z=at(w), seed=seed)]


def w(state: State) -> float:
    return float(state.z["x"]["w"])


def trace(states: Sequence[State]) -> list[tuple[float, float]]:
    return [(w(s), float(s.mixture[0])) for s in states]


def near(found, wanted, **tolerance):
    assert [x for pair in found for x in pair] == pytest.approx([x for pair in wanted for x in pair], **tolerance)


def test_the_traces_of_the_toy():
    near(trace(run(TWO, 3, dual={"lr": 0.1})), [(0.6, 0), (1.56, 0), (2.136, 0)])
    wanted = [(0.12, 0.32), (0.275904, 0.154184), (0.459379919, 0.006150635)]
    near(trace(run(TWO, 3, lr=0.02, dual={"lr": 0.02})), wanted, abs=1e-9)


def test_exponentiated_gradient():
    wanted = [(0.6, 0.141851), (1.415312, 0.050498), (2.010031, 0.034354)]
    near(trace(run(TWO, 3, dual={"kind": "entropy", "lr": 0.1})), wanted, abs=1e-6)


def test_the_mean_of_the_points_comes_to_the_saddle():
    *_, last = run(TWO, 1500, lr=0.02, dual={"lr": 0.02}, average=True)
    assert float(last.z_mean["x"]["w"]) == pytest.approx(2.0, abs=0.02)
    assert last.mixture_mean.tolist() == pytest.approx([2 / 3, 1 / 3], abs=0.02)


def test_the_best_response():
    states = run(TWO, 1000, method="best_response", strong_convexity=1.0)
    mean = float(states[-1].z_mean["x"]["w"])
    assert mean == pytest.approx(2.0, abs=0.03)
    assert max(mean**2 / 2, 2 * (mean - 3) ** 2) < 2.05
    assert all(set(s.mixture.tolist()) == {0.0, 1.0} for s in states)


def test_the_centre_of_the_smallest_ball():
    """Equal curvatures: the agnostic point is the centre of the smallest ball around the domains' own."""
    *_, last = run(world([(1, -1)], [(1, 0)], [(1, 3)]), 1500, lr=0.02, dual={"lr": 0.02})
    assert float(last.z_mean["x"]["w"]) == pytest.approx(1.0, abs=0.02)
    assert last.mixture_mean.tolist() == pytest.approx([0.5, 0, 0.5], abs=0.03)
    *_, plain = run(world([(1, -1)], [(1, 0)], [(1, 3)]), 200, dual={"lambda_set": {"kind": "sizes"}})
    assert w(plain) == pytest.approx(2 / 3, abs=1e-6)


class Lines(Bowl):
    """Losses a w: L_1 = w, L_2 = -w is the bilinear game that plain steps circle around."""

    def _loss(self, z, batch, ctx, key):
        return batch.mean(batch.x[..., 0] * z["x"]["w"]), {}


LINES = World(Lines(), world([(1, 0)], [(-1, 0)]).population)


def test_optimism():
    near(trace(run(LINES, 3, w=1.0, dual={"lr": 0.1})), [(1, 0.6), (0.98, 0.7), (0.94, 0.798)])
    wanted = [(1, 0.6), (0.96, 0.7), (0.90, 0.792)]
    near(trace(run(LINES, 3, w=1.0, dual={"lr": 0.1}, method="optimistic")), wanted)
    plain = run(LINES, 1200, w=1.0, dual={"lr": 0.1})
    assert max(abs(w(s)) for s in plain[-100:]) > 0.1
    for method in ("optimistic", "two_sequence"):
        last = run(LINES, 1200, w=1.0, dual={"lr": 0.1}, method=method)
        assert max(abs(w(s)) for s in last[-100:]) < 1e-3
        assert last[-1].mixture.tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


def test_the_two_offers_of_optimism_are_one_without_constraints():
    """Inside the simplex nothing is projected away: there the played points are the same."""
    offers = [run(LINES, 5, w=0.1, dual={"lr": 0.01}, method=m) for m in ("optimistic", "two_sequence")]
    one, two = ([(x, y) for x, y in trace(states)] for states in offers)
    # The one-line form begins with a plain step, the other with a double one.
    assert one[0] == pytest.approx((0.1, 0.501))
    assert two[0] == pytest.approx((0.1, 0.502))


# Identities, 9.2


MANY = world([(1, 0), (2, 1)], [(4, 3)], [(1, -2), (1, 5), (3, 1)], [(2, 2)], [(1, 1), (1, 4)], domain=[0, 1, 1, 0, 2])
"""Domains of 3, 4 and 2 examples."""


def losses(where: World, point: float) -> torch.Tensor:
    """The loss of each domain."""
    p = where.population
    a, m = p.data["x"].unbind(1)
    each = a * (point - m) ** 2 / 2
    return torch.stack(
        [
            torch.cat([each[p.offsets[i] : p.offsets[i + 1]] for i in range(p.size) if p.domain[i] == k]).mean()
            for k in range(int(p.domain.max()) + 1)
        ]
    )


def test_with_every_client_heard_a_round_is_the_papers_whoever_holds_the_examples():
    """Gradients and losses of the whole domains, at the same point: simultaneous steps (items 7 and 8)."""
    rule = Dual.of(DualOptions(lr=0.01), torch.tensor([3, 4, 2]))
    point, mixture = 0.7, rule.start()
    for state in run(MANY, 6, w=0.7, lr=0.05, dual={"lr": 0.01}):
        here = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        found = losses(MANY, here)
        (mixture @ found).backward()
        point, mixture = point - 0.05 * float(here.grad), rule.step(mixture, found.detach())
        assert w(state) == pytest.approx(point, rel=1e-12)
        assert state.mixture.tolist() == pytest.approx(mixture.tolist(), rel=1e-9)
        torch.testing.assert_close(state.losses, found.detach())


@pytest.mark.parametrize("domain", [[0, 1, 1, 0, 2], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("dual", [{"lambda_set": {"kind": "sizes"}, "lr": 3.0}, {"lr": 0.0}])
def test_one_mixture_and_one_domain_are_empirical_risk(dual, domain):
    p = MANY.population
    where = World(Bowl(), replace(p, domain=torch.tensor(domain)))
    a, m = p.data["x"].unbind(1)
    point, shares = 0.0, [3 / 9, 4 / 9, 2 / 9] if any(domain) else [1.0]
    for state in run(where, 5, dual=dual if any(domain) else {"lr": 3.0}):
        point -= 0.1 * float((a * (point - m)).mean())
        assert w(state) == pytest.approx(point, rel=1e-12)
        assert state.mixture.tolist() == pytest.approx(shares)


def test_domains_alike_leave_lambda_alone():
    alike = world(*[[(1, 0), (2, 3)]] * 3)
    for state in run(alike, 20, dual={"lr": 1.0}):
        assert state.mixture.tolist() == pytest.approx([1 / 3] * 3, abs=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"domains": [0, 2]},
        {"kind": "capped", "high": 1.5},
        {"kind": "hull", "vertices": [[0.5, 0.5, 0], [0, 0.2, 0.8]]},
    ],
)
def test_lambda_stays_feasible(kind):
    kind = {"kind": "simplex", **kind}
    allowed = Dual.of(DualOptions.model_validate({"lambda_set": kind}), torch.tensor([3, 4, 2])).set
    states = run(MANY, 30, dual={"lr": 0.5, "lambda_set": kind}, invite=2)
    assert all(allowed.contains(s.mixture) for s in states)


def test_the_mean_of_a_constant_sequence_is_that_constant():
    still = world([(1, 2)], [(3, 2)])
    states = run(still, 5, w=2.0, average=True)
    assert [float(s.z_mean["x"]["w"]) for s in states] == [2.0] * 5


def test_the_penalty_of_the_norm_shrinks_the_model():
    """|w| (a norm, not its square) with L = (w - 1)^2 / 2: the minimum is at 1 - gamma_h, and at 0 from gamma_h = 1 on."""
    one = world([(1, 1)])
    assert w(run(one, 300, norm_penalty=0.25)[-1]) == pytest.approx(0.75)
    assert w(run(one, 300, norm_penalty=1.5)[-1]) == 0.0


# Estimators, 3.1, 5 and 9.3


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
        estimated(heard(MANY, c, 0.7), problem(MANY), last, "horvitz_thompson")
        for c in itertools.combinations(range(5), size)
    ]
    torch.testing.assert_close(torch.stack(found).mean(0), losses(MANY, 0.7))


def test_the_ratio_keeps_the_last_loss_of_a_domain_nobody_answered_for():
    answers = heard(MANY, [1, 2], 0.7)
    known = learnt(answers, torch.tensor([7.0, 8.0, math.nan], dtype=torch.float64))
    one = float(losses(MANY, 0.7)[1])
    assert known[:2].tolist() == pytest.approx([7.0, one])
    assert known[2].isnan()
    found = estimated(answers, problem(MANY), known, "ratio")
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


def mean_of(runs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and its standard error."""
    stacked = torch.stack(list(runs))
    return stacked.mean(0), stacked.std(0) / math.sqrt(len(stacked))


@pytest.mark.parametrize(
    "options",
    [{"gradient": "weighted"}, {"dual_gradient": "single"}, {"gradient": "weighted", "dual_gradient": "single"}],
)
def test_drawn_cohorts_are_unbiased(options):
    """Enough seeds to see a bias of a tenth of the step."""
    (whole,) = run(MANY, 1, w=0.7)
    ones = [run(MANY, 1, w=0.7, seed=s, invite=3, dual={"lr": 1e-4}, **options)[0] for s in range(400)]
    mean, error = mean_of([torch.tensor([w(s)]) for s in ones])
    assert abs(float(mean) - w(whole)) < 4.5 * float(error)
    assert float(error) < 0.1 * abs(w(whole) - 0.7)
    start = torch.tensor([3, 4, 2], dtype=torch.float64) / 9
    mean, error = mean_of([(s.mixture - start) / 1e-4 for s in ones])  # the losses but for a constant
    wanted = losses(MANY, 0.7)
    assert ((mean - (wanted - wanted.mean())).abs() < 4.5 * error).all()


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
        options = {"gradient": kind, "batch_size": 1, "invite": 3 if kind == "per_domain" else 1}
        found = torch.tensor([(0.7 - w(run(where, 1, w=0.7, seed=s, **options)[0])) / 0.1 for s in range(1500)])
        assert float(found.mean()) == pytest.approx(float(whole), abs=4.5 * math.sqrt(float(expected) / 1500))
        assert float(found.var()) == pytest.approx(float(expected), rel=0.2)


def test_local_steps_are_fedavg_with_the_weights_lambda():
    states = run(MANY, 3, steps=4, estimator="ratio", dual={"lambda_set": {"kind": "sizes"}})
    wanted = play(
        build("fedavg", MANY.task, CohortOptions(invite=5), epochs=4, batch_size=100, lr=0.1), MANY, 3, z=at(0.0)
    )
    for state, z in zip(states, wanted, strict=True):
        assert w(state) == pytest.approx(float(z["x"]["w"]), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"estimator": "ratio"}, {"gradient": "weighted"}])
def test_late_answers_count_less_in_what_they_are_divided_by_too(options):
    """Two clients alike, of which the second is late and counts half: every step goes along a mean of gradients on the way."""
    alike = world([(1, 0)], [(1, 0)], domain=[0, 0])
    fleet = Federation(devices=Fixed((1.0, 1.5)), policy=First(1))
    algorithm = build("afl", alike.task, CohortOptions(invite=2), **EXACT, **options)
    found = records(algorithm, alike, 4, z=at(1.0), federation=fleet, stale_discount=0.5)
    points = [1.0, *(w(r.state) for r in found)]
    gradients = [(a - b) / 0.1 for a, b in itertools.pairwise(points)]
    for i, gradient in enumerate(gradients):
        assert points[i] - 1e-9 <= gradient <= 1 + 1e-9
    if options != {"gradient": "weighted"}:  # whose cohort may be one client twice
        assert gradients[1] == pytest.approx((points[1] + 0.5 * 1.0) / 1.5)


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
        options = {"dual_gradient": kind, "batch_size": 1, "invite": 3 if kind == "per_domain" else 1}
        options |= {"dual": {"kind": "entropy", "lr": 1e-3}}  # from which the gradient can be read, but for a constant
        logs = [run(where, 1, w=0.7, seed=s, **options)[0].mixture.log() for s in range(800)]
        found = torch.stack([(log - start) / 1e-3 for log in logs]) @ away
        assert float(found.var(0).sum()) == pytest.approx(float((away @ matrix @ away).trace()), rel=0.25)


# DRFA, 5.3


def drfa(where: World, rounds: int, **options) -> list:
    return run(where, rounds, "drfa", **{"batch_size": None, "lr": 0.1, "average": False, **options})


def test_drfa_samples_by_lambda_and_steps_tau_times():
    """E over D_s of w is sum lambda_i w_i; E v = f at the snapshot; lambda moves by tau gamma (9.3)."""
    ends = []
    for m, a in ((0.0, 1), (3.0, 4)):
        point = 0.7
        for _ in range(3):
            point -= 0.1 * a * (point - m)
        ends.append(point)
    found = [drfa(TWO, 1, w=0.7, steps=3, invite=1, seed=s, dual={"lr": 0.0})[0] for s in range(600)]
    mean, error = mean_of([torch.tensor(w(s)) for s in found])
    assert {round(w(s), 9) for s in found} == {round(e, 9) for e in ends}
    assert abs(float(mean) - sum(ends) / 2) < 4.5 * float(error)


def test_drfas_snapshot_is_after_a_step_drawn_uniformly():
    """With one domain the losses are those at the snapshot, which tells the step."""
    one = world([(1, 0)])
    after = [0.9**k for k in range(1, 5)]
    found = [math.sqrt(2 * float(drfa(one, 1, w=1.0, steps=4, seed=s)[0].losses)) for s in range(200)]
    counts = [sum(abs(f - a) < 1e-9 for f in found) for a in after]
    assert sum(counts) == 200
    assert min(counts) > 30


@pytest.mark.parametrize("weighting", ["sampling", "importance"])
def test_drfa_with_one_step_is_afls_step_and_losses_at_the_new_point(weighting):
    """With all clients and importance weights nothing is left to chance."""
    found = drfa(TWO, 1, w=0.7, steps=1, weighting=weighting, dual={"lr": 0.02}, invite=2)[0]
    step = w(found)
    if weighting == "importance":
        assert step == pytest.approx(0.7 - 0.1 * (0.5 * 0.7 + 0.5 * 4 * (0.7 - 3)))
    new = torch.tensor([step**2 / 2, 2 * (step - 3) ** 2], dtype=torch.float64)
    torch.testing.assert_close(found.losses, new)
    rule = Dual.of(DualOptions(lr=0.02), torch.tensor([1, 1]))
    torch.testing.assert_close(found.mixture, rule.step(torch.tensor([0.5, 0.5], dtype=torch.float64), new))


def test_drfas_floor_and_decay():
    given = {"steps": 1, "weighting": "importance", "dual": {"lr": 1.0}}
    states = drfa(TWO, 30, lambda_floor=0.01, gamma_decay=0.5, **given)
    assert states[0].mixture.tolist() == pytest.approx([0.01, 0.99])
    assert all(float(s.mixture.sum()) == pytest.approx(1.0) for s in states)
    assert all(float(s.mixture.min()) >= 0.01 - 1e-12 for s in states)
    moved = [
        abs(float(b.mixture[0] - a.mixture[0])) for a, b in itertools.pairwise(drfa(TWO, 60, gamma_decay=0.5, **given))
    ]
    assert max(moved[-10:]) < 1e-9


def test_drfas_lambda_moves_by_tau_gamma_times_the_losses_heard():
    """E v = f over the uniform cohort: with one of two clients heard it is (0, 2 f_2) or (2 f_1, 0)."""
    seen = set()
    for seed in range(12):
        (state,) = drfa(TWO, 1, steps=3, weighting="importance", dual={"lr": 0.001}, invite=1, seed=seed, w=0.7)
        client = int(state.losses.isfinite().nonzero())
        seen.add(client)
        v = torch.zeros(2, dtype=torch.float64)
        v[client] = 2 * state.losses[client]
        rule = Dual.of(DualOptions(lr=1.0), torch.tensor([1, 1]))
        torch.testing.assert_close(
            state.mixture, rule.step(torch.tensor([0.5, 0.5], dtype=torch.float64), 3 * 0.001 * v)
        )
    assert seen == {0, 1}


# Bad input


@pytest.mark.parametrize(
    ("dual", "says"),
    [
        ({"lambda_set": {"kind": "simplex", "domains": [0, 5]}}, "there is no domain 5, they are 0 to 1"),
        ({"lambda_set": {"kind": "hull", "vertices": [[1.0, 0.0], [0.5, 0.6]]}}, "vertex 1 is no mixture"),
        ({"lambda_set": {"kind": "hull", "vertices": [[1.0, 0.0, 0.0]]}}, "row 0 has 3 weights for 2 domains"),
        ({"kind": "entropy", "lambda_set": {"kind": "sizes"}}, "needs a simplex"),
        ({"chi2": 1.0, "chi2_sign": "plus", "lambda_set": {"kind": "capped"}}, "plus needs"),
    ],
)
def test_bad_options(dual, says):
    with pytest.raises(ConfigError, match=says):
        run(TWO, 1, dual=dual)


# Sets and regularisers in the loop, 9.2; rates, 9.3


def test_a_finite_set_and_its_hull_have_the_same_objective():
    """Eq. (5): no mixture of the vertices beats the best of them; on the simplex that is the largest loss."""
    vertices = torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], dtype=torch.float64)
    rule = Dual.of(
        DualOptions.model_validate({"lambda_set": {"kind": "hull", "vertices": vertices.tolist()}}),
        torch.tensor([3, 4, 2]),
    )
    whole = Dual.of(DualOptions(), torch.tensor([3, 4, 2]))
    shares = torch.tensor([3, 4, 2], dtype=torch.float64) / 9
    mixtures = torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((200,)) @ vertices
    for point in (-3.0, 0.0, 0.7, 5.0):
        found = losses(MANY, point)
        assert rule.value(found) == pytest.approx(float((vertices @ found).max()))
        assert float((mixtures @ found).max()) <= rule.value(found) + 1e-12
        assert whole.value(found) == pytest.approx(float(found.max()))
        assert whole.value(found) >= float(shares @ found)


class Coin(Bowl):
    """The cross-entropy of a coin with log-odds w; examples are rows (whether it is 1, ignored)."""

    def _loss(self, z, batch, ctx, key):
        one = batch.x[..., 0]
        return batch.mean(torch.nn.functional.softplus(z["x"]["w"]) - one * z["x"]["w"]), {}


def test_the_gap_that_shows_the_propositions_constant():
    """9.2, item 12: empirical risk gives label 1 three quarters, agnostic loss log(4 / sqrt 3); the agnostic optimum is log 2."""
    where = World(Coin(), world([(1, 0), (1, 0)], [(1, 0), (0, 0)]).population)
    agnostic = lambda w: max(math.log1p(math.exp(w)) - w, math.log1p(math.exp(w)) - w / 2)  # noqa: E731
    *_, plain = run(where, 300, lr=2.0, dual={"lambda_set": {"kind": "sizes"}})
    assert agnostic(w(plain)) == pytest.approx(math.log(4 / math.sqrt(3)), abs=1e-4)
    *_, last = run(where, 600, lr=0.5, dual={"lr": 0.5}, average=True)
    assert agnostic(float(last.z_mean["x"]["w"])) == pytest.approx(math.log(2), abs=2e-3)


def test_regularisers_in_the_loop():
    """minus pulls lambda to the sizes and makes its best response unique; plus favours the small domain."""
    rates = {1.0: 0.02, 1000.0: 1e-4}  # ascent needs a step below the smallest share over mu
    one, large = (run(MANY, 300, lr=0.05, dual={"lr": lr, "chi2": mu})[-1] for mu, lr in rates.items())
    assert large.mixture.tolist() == pytest.approx([3 / 9, 4 / 9, 2 / 9], abs=5e-3)
    rule = Dual.of(DualOptions(chi2=1.0), torch.tensor([3, 4, 2]))
    torch.testing.assert_close(one.mixture, rule.best(losses(MANY, w(one))), atol=1e-2, rtol=0)
    *_, plus = run(MANY, 50, lr=0.05, dual={"lr": 0.02, "chi2": 5.0, "chi2_sign": "plus"})
    assert plus.mixture.tolist() == pytest.approx([0, 0, 1])


@pytest.mark.slow
def test_the_gap_shrinks_as_one_over_the_root_of_the_steps():
    """Theorem 2 on the toy with noise in its gradients: below the bound, and with a slope of about -1/2."""
    noisy = world([(1, -1), (1, 1)], [(4, 2), (4, 4)])
    a, c = torch.tensor([1.0, 4.0]), torch.tensor([0.0, 3.0])

    def gap(state: State) -> float:
        point, mixture = float(state.z_mean["x"]["w"]), state.mixture_mean.float()
        loss = lambda at: a * ((at - c).square() + 1) / 2  # noqa: E731
        least = (mixture * a * c).sum() / (mixture * a).sum()
        return float(loss(point).max() - mixture @ loss(least))

    # On |w - 1.5| <= 2.5: gradients at most 4 (2.5 + 1.5 + 1) = 20, losses at most 4 (16 + 1) / 2 = 34.
    radius, bound_w, bound_mixture = 2.5, 20.0, 34.0 * math.sqrt(2)
    means = []
    for steps in (16, 64, 256):
        rates = {"lr": 0.4 / math.sqrt(steps), "dual": {"lr": 0.1 / math.sqrt(steps)}}
        found = [gap(run(noisy, steps, batch_size=1, seed=s, average=True, **rates)[-1]) for s in range(15)]
        means.append(sum(found) / len(found))
        assert 0 <= means[-1] <= 3 * (radius * bound_w + bound_mixture) / math.sqrt(steps)
    slope = math.log(means[-1] / means[0]) / math.log(16)
    assert -1.0 < slope < -0.35
