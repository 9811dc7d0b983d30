"""AFL against the traces, identities and laws of its specification, sections 3, 4 and 9."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from fedfleet.algorithms.afl import AflOptions, State
from fedfleet.algorithms.afl_theory import AflTheory
from fedfleet.algorithms.mirror import Ball
from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.simulator.errors import ConfigError
from tests.algorithms.agnostic import MANY, TWO, losses, run, w, world
from tests.algorithms.harness import Bowl, World


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


@pytest.mark.slow
def test_the_mean_of_the_points_comes_to_the_saddle():
    *_, last = run(TWO, 400, lr=0.05, dual={"lr": 0.05}, average=True)
    assert float(last.z_mean["x"]["w"]) == pytest.approx(2.0, abs=0.02)
    assert last.mixture_mean.tolist() == pytest.approx([2 / 3, 1 / 3], abs=0.02)


def test_the_mean_is_of_all_points_alike():
    states = run(TWO, 5, dual={"lr": 0.1}, average=True)
    points, mixtures = [w(s) for s in states], torch.stack([s.mixture for s in states])
    for t, state in enumerate(states, 1):
        assert float(state.z_mean["x"]["w"]) == pytest.approx(sum(points[:t]) / t, abs=1e-12)
        torch.testing.assert_close(state.mixture_mean, mixtures[:t].mean(0), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_best_response():
    states = run(TWO, 400, method="best_response", strong_convexity=1.0)
    mean = float(states[-1].z_mean["x"]["w"])
    assert mean == pytest.approx(2.0, abs=0.05)
    assert max(mean**2 / 2, 2 * (mean - 3) ** 2) < 2.1
    assert all(set(s.mixture.tolist()) == {0.0, 1.0} for s in states)


@pytest.mark.slow
def test_the_centre_of_the_smallest_ball():
    """Equal curvatures: the agnostic point is the centre of the smallest ball around the domains' own."""
    *_, last = run(world([(1, -1)], [(1, 0)], [(1, 3)]), 500, lr=0.05, dual={"lr": 0.05})
    assert float(last.z_mean["x"]["w"]) == pytest.approx(1.0, abs=0.02)
    assert last.mixture_mean.tolist() == pytest.approx([0.5, 0, 0.5], abs=0.03)
    *_, plain = run(world([(1, -1)], [(1, 0)], [(1, 3)]), 140, dual={"lambda_set": {"kind": "sizes"}})
    assert w(plain) == pytest.approx(2 / 3, abs=1e-6)


class Lines(Bowl):
    """Losses a w: L_1 = w, L_2 = -w is the bilinear game that plain steps circle around."""

    def _loss(self, z, batch, ctx, key):
        return batch.mean(batch.x[..., 0] * z["x"]["w"]), {}


LINES = World(Lines(), world([(1, 0)], [(-1, 0)]).population)


@pytest.mark.slow
def test_optimism():
    near(trace(run(LINES, 3, w=1.0, dual={"lr": 0.1})), [(1, 0.6), (0.98, 0.7), (0.94, 0.798)])
    wanted = [(1, 0.6), (0.96, 0.7), (0.90, 0.792)]
    near(trace(run(LINES, 3, w=1.0, dual={"lr": 0.1}, method="optimistic")), wanted)
    fast = {"lr": 0.3, "dual": {"lr": 0.3}}
    plain = run(LINES, 200, w=1.0, **fast)
    assert max(abs(w(s)) for s in plain[-50:]) > 0.1
    for method in ("optimistic", "two_sequence"):
        last = run(LINES, 200, w=1.0, **fast, method=method)
        assert max(abs(w(s)) for s in last[-50:]) < 1e-3
        assert last[-1].mixture.tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


@pytest.mark.parametrize("given", [{}, {"batch_size": 1, "size": 3}])
def test_the_two_offers_of_optimism_are_one_without_constraints(given):
    """Inside the simplex nothing is projected away: there the played points are the same (4.3), minibatches or not."""
    offers = [
        run(MANY, 6, w=0.7, lr=0.05, dual={"lr": 1e-3}, method=m, **given) for m in ("optimistic", "two_sequence")
    ]
    near(*map(trace, offers), rel=1e-9)
    plain = run(MANY, 6, w=0.7, lr=0.05, dual={"lr": 1e-3}, **given)
    assert trace(offers[0])[0] == pytest.approx(
        trace(plain)[0], rel=1e-12
    )  # g_{-1} is g_0: the first step is a plain one
    assert abs(w(offers[0][-1]) - w(plain[-1])) > 1e-3


def test_the_best_response_is_to_all_examples_though_gradients_are_of_minibatches():
    """lambda_t = argmax L(w_{t-1}, lambda) (4.2): not of the minibatch that the step is taken along."""
    uneven = world([(1, 0), (1, 0), (1, 9)], [(4, 3), (4, 1)])
    steps = set()
    for seed in range(12):
        (state,) = run(uneven, 1, method="best_response", batch_size=1, seed=seed)
        assert torch.equal(state.losses, losses(uneven, 0.0))
        assert state.mixture.tolist() == [1.0, 0.0]
        steps.add(round(w(state), 9))
    assert steps == {0.0, 0.9}
    with pytest.raises(ConfigError, match="best_response': it needs the losses of all clients"):
        run(uneven, 1, method="best_response", size=1)


# Constraints and Theorem 2, 3 and 3.2


def test_models_stay_in_their_ball():
    """On |w| <= 1 the toy's saddle is (1, (0, 1)): the farther domain's loss alone, 8."""
    for options in ({}, {"norm_penalty": 0.1}, {"method": "optimistic"}, {"method": "two_sequence"}, {"mirror": 1.5}):
        states = run(TWO, 60, radius=1.0, dual={"lr": 0.1}, **options)
        assert max(abs(w(s)) for s in states) <= 1 + 1e-12
        assert (w(states[-1]), *states[-1].mixture.tolist()) == pytest.approx((1.0, 0.0, 1.0))
    free, far = (run(TWO, 5, dual={"lr": 0.1}, **options) for options in ({}, {"radius": 100.0}))
    assert trace(free) == trace(far)


PLANE = {"a": torch.tensor([3.0, -1.0], dtype=torch.float64), "b": torch.tensor([[0.5]], dtype=torch.float64)}
PULL = {"a": torch.tensor([1.0, 0.2], dtype=torch.float64), "b": torch.tensor([[-4.0]], dtype=torch.float64)}


@pytest.mark.parametrize("radius", [None, 2.0])
@pytest.mark.parametrize("q", [1.2, 1.5, 2.0])
def test_the_mirror_step_is_the_least_of_its_definition(q, radius):
    """argmin over the ball of lr <d, w> + Phi(w) - <grad Phi(z), w> (4.1), found here by its conditions of optimality."""

    def phi(z):
        return torch.cat([leaf.flatten() for leaf in z.values()]).norm(q).square() / 2

    def slope(z):
        at = {k: v.clone().requires_grad_() for k, v in z.items()}
        return dict(zip(at, torch.autograd.grad(phi(at), list(at.values())), strict=True))

    found = Ball(q, radius).step(TWO.task.objectives["train"], PLANE, 0.3, PULL)
    before, after = slope(PLANE), slope(found)
    rest = torch.cat([(before[k] - 0.3 * PULL[k] - after[k]).flatten() for k in PLANE])
    normal = torch.cat([after[k].flatten() for k in PLANE])  # of the ball, at its edge
    if radius is None:
        torch.testing.assert_close(rest, torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    else:
        assert float((2 * phi(found)).sqrt()) == pytest.approx(radius)
        multiplier = float(rest @ normal / (normal @ normal))
        assert multiplier > 0
        torch.testing.assert_close(rest, multiplier * normal)


THEORY = {"rounds": 100, "gradient": 20.0, "gradient_noise": 15.0, "losses": 40.0, "losses_noise": 9.0}


def test_theorem_2s_steps():
    """gamma = 2 R / sqrt(T (sigma^2 + G^2)), of the model with R_W = radius, of lambda with that of the set."""
    half = {"kind": "capped", "high": 1.0}  # a point: (1/2, 1/2), of radius 1 / sqrt 2
    for dual, radius in (({}, 1.0), ({"lambda_set": half}, math.sqrt(0.5))):
        theory = AflTheory.model_validate(THEORY)
        assert theory.steps(2.5, radius) == pytest.approx((2 * 2.5 / (25 * 10), 2 * radius / (41 * 10)))
        steps = theory.steps(2.5, radius)
        given = [{"lr": steps[0], "dual": {**dual, "lr": steps[1]}}, {"theory": THEORY, "dual": dual}]
        wanted, found = (trace(run(TWO, 4, radius=2.5, average=True, **o)) for o in given)
        assert found == wanted
        assert abs(wanted[0][0]) > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"radius": None}, "set radius"),
        ({"lr": 0.5}, "leave lr out"),
        ({"dual": {"lr": 0.5}}, "leave dual.lr out"),
        ({"lr_schedule": {"kind": "power"}}, "leave lr_schedule out"),
        ({"average": False}, "not about average=False"),
        ({"estimator": "ratio"}, "not about estimator=ratio"),
        ({"method": "optimistic"}, "not about method=optimistic"),
        ({"dual": {"kind": "entropy"}}, "not about dual.kind=entropy"),
        ({"dual": {"chi2": 1.0}}, "not about dual.chi2=1.0"),
        ({"optimizer": {"name": "adam"}}, "radius is of a step of plain SGD"),
    ],
)
def test_theorem_2_is_refused_where_it_does_not_hold(options, says):
    with pytest.raises(ValidationError, match=says):
        AflOptions.model_validate({"theory": THEORY, "radius": 1.0, **options})


# Identities, 9.2


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
    states = run(MANY, 30, dual={"lr": 0.5, "lambda_set": kind}, size=2)
    assert all(allowed.contains(s.mixture) for s in states)


def test_the_mean_of_a_constant_sequence_is_that_constant():
    still = world([(1, 2)], [(3, 2)])
    states = run(still, 5, w=2.0, average=True)
    assert [float(s.z_mean["x"]["w"]) for s in states] == [2.0] * 5


@pytest.mark.slow
def test_the_penalty_of_the_norm_shrinks_the_model():
    """|w| (a norm, not its square) with L = (w - 1)^2 / 2: the minimum is at 1 - gamma_h, and at 0 from gamma_h = 1 on."""
    one = world([(1, 1)])
    assert w(run(one, 300, norm_penalty=0.25)[-1]) == pytest.approx(0.75)
    assert w(run(one, 300, norm_penalty=1.5)[-1]) == 0.0


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


@pytest.mark.slow
def test_the_gap_that_shows_the_propositions_constant():
    """9.2, item 12: empirical risk gives label 1 three quarters, agnostic loss log(4 / sqrt 3); the agnostic optimum is log 2."""
    where = World(Coin(), world([(1, 0), (1, 0)], [(1, 0), (0, 0)]).population)
    agnostic = lambda w: max(math.log1p(math.exp(w)) - w, math.log1p(math.exp(w)) - w / 2)  # noqa: E731
    *_, plain = run(where, 60, lr=8.0, dual={"lambda_set": {"kind": "sizes"}})
    assert agnostic(w(plain)) == pytest.approx(math.log(4 / math.sqrt(3)), abs=1e-4)
    *_, last = run(where, 200, lr=1.0, dual={"lr": 1.0}, average=True)
    assert agnostic(float(last.z_mean["x"]["w"])) == pytest.approx(math.log(2), abs=2e-3)


@pytest.mark.slow
def test_regularisers_in_the_loop():
    """minus pulls lambda to the sizes and makes its best response unique; plus favours the small domain."""
    rates = {1.0: 0.02, 1000.0: 1e-4}  # ascent needs a step below the smallest share over mu
    one, large = (run(MANY, 300, lr=0.05, dual={"lr": lr, "chi2": mu})[-1] for mu, lr in rates.items())
    assert large.mixture.tolist() == pytest.approx([3 / 9, 4 / 9, 2 / 9], abs=5e-3)
    rule = Dual.of(DualOptions(chi2=1.0), torch.tensor([3, 4, 2]))
    torch.testing.assert_close(one.mixture, rule.best(losses(MANY, w(one))), atol=1e-2, rtol=0)
    *_, plus = run(MANY, 50, lr=0.05, dual={"lr": 0.02, "chi2": 5.0, "chi2_sign": "plus"})
    assert plus.mixture.tolist() == pytest.approx([0, 0, 1])
    capped = {"lr": 0.02, "chi2": 5.0, "chi2_sign": "plus", "lambda_set": {"kind": "capped", "high": 1.5}}
    *_, plus = run(MANY, 30, lr=0.05, dual=capped)
    rule = Dual.of(DualOptions.model_validate(capped), torch.tensor([3, 4, 2]))
    torch.testing.assert_close(plus.mixture, rule.best(losses(MANY, w(plus))))


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
    for steps, seeds in ((8, 60), (128, 12)):
        rates = {"lr": 0.4 / math.sqrt(steps), "dual": {"lr": 0.1 / math.sqrt(steps)}}
        found = [gap(run(noisy, steps, batch_size=1, seed=s, average=True, **rates)[-1]) for s in range(seeds)]
        means.append(sum(found) / len(found))
        assert 0 <= means[-1] <= 3 * (radius * bound_w + bound_mixture) / math.sqrt(steps)
    slope = math.log(means[-1] / means[0]) / math.log(16)
    assert -1.0 < slope < -0.35


# Bad input


@pytest.mark.parametrize(
    ("dual", "says"),
    [
        ({"lambda_set": {"kind": "simplex", "domains": [0, 5]}}, "there is no domain 5, they are 0 to 1"),
        ({"lambda_set": {"kind": "hull", "vertices": [[1.0, 0.0], [0.5, 0.6]]}}, "vertex 1 is no mixture"),
        ({"lambda_set": {"kind": "hull", "vertices": [[1.0, 0.0, 0.0]]}}, "row 0 has 3 weights for 2 domains"),
        ({"kind": "entropy", "lambda_set": {"kind": "sizes"}}, "needs a simplex"),
    ],
)
def test_bad_options(dual, says):
    with pytest.raises(ConfigError, match=says):
        run(TWO, 1, dual=dual)
