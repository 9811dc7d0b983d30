"""CDMA: the vectors of a two-client toy game worked out by hand, and the identities that hold exactly."""

import math

import pytest
import torch
from harness import TOY, Game, World, build, digits, flat, play, point, records, rows, script, xy

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.theory import CdmaTheory
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import Siwer

GAME = World(Game(), TOY)
TWO_STEPS = {"steps": 2, "batch_size": 1, "lr": 0.1}
SADDLE = (0.25, 0.5)


@pytest.mark.parametrize(
    ("name", "options", "trace"),
    [
        ("parallel_sgda", {"lr": 0.1}, [(1, -0.7), (0.97, -0.445), (0.9205, -0.23125)]),
        ("cdma_one", {**TWO_STEPS, "steps": 1}, [(1, -0.7), (0.97, -0.445), (0.9205, -0.23125)]),
        ("cdma_ada", {**TWO_STEPS, "steps": 1, "alpha": 0.5}, [(1, -0.7), (0.97, -0.445), (0.9205, -0.23125)]),
        ("cdma_nc", TWO_STEPS, [(0.98, -0.45), (0.8684, -0.06585), (0.728945, 0.18488775)]),
        ("local_sgda", TWO_STEPS, [(0.98, -0.45), (0.8684, -0.06585), (0.728945, 0.18488775)]),
        ("cdma_one", TWO_STEPS, [(0.97, -0.445), (0.859525, -0.0545125), (0.7254953125, 0.2054814688)]),
        (
            "cdma_ada",
            {**TWO_STEPS, "alpha": 0.3},
            [(0.97, -0.445), (0.859525, -0.0545125), (0.7254953125, 0.2054814688)],
        ),
    ],
)
def test_toy_game_round_by_round(name, options, trace):
    found = [xy(z) for z in play(build(name, GAME.task, **options), GAME, 3)]
    assert found == [pytest.approx(want, abs=1e-9) for want in trace]


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("parallel_sgda", {"lr": 0.1}, SADDLE),
        ("cdma_nc", TWO_STEPS, (0.25891911, 0.41222183)),  # client drift: not the saddle
        ("cdma_one", TWO_STEPS, SADDLE),
        ("cdma_ada", {**TWO_STEPS, "alpha": 0.5}, SADDLE),
    ],
)
@pytest.mark.slow
def test_toy_game_limit(name, options, limit):
    assert xy(play(build(name, GAME.task, **options), GAME, 200)[-1]) == pytest.approx(limit, abs=1e-7)


@pytest.mark.parametrize(
    ("alpha", "u_trace", "z_trace"),
    [
        (0.5, [(0, 2), (-0.06, 2.26), (1.1556, 1.4827)], [(0.98, -0.63), (0.9682, -0.2113), (0.745365, 0.0514435)]),
        (1.0, [(0, 2), (-0.06, 3.26), (1.9056, 0.9427)], [(0.98, -0.63), (0.9582, -0.0263), (0.605765, 0.1290435)]),
    ],
)
def test_recursion_under_partial_participation(monkeypatch, alpha, u_trace, z_trace):
    script(monkeypatch, [[0], [0, 1], [1], [0, 1], [0], [0, 1]])  # phase-1 cohorts {1}, {2}, {1}; phase 2 both
    algorithm = build("cdma_ada", GAME.task, alpha=alpha, **TWO_STEPS)
    states = [r.state for r in records(algorithm, GAME, 3)]
    # u is kept in direction space, so its dual part has the opposite sign of v
    assert [(xy(s.u)[0], -xy(s.u)[1]) for s in states] == [pytest.approx(u, abs=1e-9) for u in u_trace]
    assert [xy(s.z) for s in states] == [pytest.approx(z, abs=1e-9) for z in z_trace]


def test_one_round_with_different_cohorts_in_the_two_phases(monkeypatch):
    script(monkeypatch, [[0], [1]])
    assert xy(play(build("cdma_one", GAME.task, **TWO_STEPS), GAME, 1)[0]) == pytest.approx((1, -0.64), abs=1e-12)


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_full_gradients_are_exact_whatever_the_chunk(inner):
    # 7 examples, 3 at a time: 3/7 and 1/7 are no float32. u_1 = (1 - alpha) u_0 + g(z_1) - (1 - alpha) g(z_0) = g(z_1)
    examples = [(1 + i / 3, i / 7, 1.5, i * i / 9, -i / 11) for i in range(7)]
    alone = World(Game(), rows(examples))
    a, b, c, p, q = (sum(column) / 7 for column in zip(*examples, strict=True))
    ada = build("cdma_ada", alone.task, CohortOptions(size=1), alpha=0.3, gradient_chunk=3, **TWO_STEPS)
    for r in records(ada, alone, 3, inner=inner):
        x, y = xy(r.state.z_before)
        assert xy(r.state.u) == pytest.approx((a * x + b * y + p, -(b * x - c * y + q)), abs=1e-14)


def test_the_saddle_is_a_fixed_point_of_one_and_ada_but_not_of_nc():
    at = point(*SADDLE)
    for name in ("cdma_one", "cdma_ada", "parallel_sgda"):
        options = {"lr": 0.1} if name == "parallel_sgda" else TWO_STEPS
        assert xy(play(build(name, GAME.task, **options), GAME, 1, z=at)[0]) == pytest.approx(SADDLE, abs=1e-12)
    assert xy(play(build("cdma_nc", GAME.task, **TWO_STEPS), GAME, 1, z=at)[0]) == pytest.approx(
        (0.2375, 0.4725), abs=1e-12
    )


def test_one_client_is_centralised_training():
    alone = World(Game(), rows([(1, 2, 1, 1, -1)]))
    invite = CohortOptions(size=1)
    x, y = 1.0, -1.0
    for _ in range(6):  # plain descent-ascent, K T = 6 steps
        x, y = x - 0.1 * (x + 2 * y + 1), y + 0.1 * (2 * x - y - 1)
    for name in ("cdma_nc", "cdma_one", "cdma_ada", "local_sgda"):
        assert xy(play(build(name, alone.task, invite, **TWO_STEPS), alone, 3)[-1]) == pytest.approx((x, y), abs=1e-12)


AUC = digits("auc")
INVITE = CohortOptions(size=8)
LOCAL = {"steps": 3, "batch_size": 7, "lr": 0.3, "dual_lr": 0.1}


def auc(name, rounds=4, cohort=INVITE, inner="batched", **options):
    return play(build(name, AUC.task, cohort, **options), AUC, rounds, inner=inner, policy=Siwer())


def test_beta_zero_is_local_sgda_bit_for_bit():
    for a, b in zip(auc("cdma_nc", **LOCAL), auc("local_sgda", **LOCAL), strict=True):
        assert torch.equal(flat(a), flat(b))


def test_alpha_one_is_cdma_one_bit_for_bit():
    for a, b in zip(auc("cdma_ada", alpha=1.0, **LOCAL), auc("cdma_one", **LOCAL), strict=True):
        assert torch.equal(flat(a), flat(b))


def test_ada_equals_one_exactly_as_long_as_its_schedule_keeps_alpha_at_one():
    # alpha_0 = 1.5, s = 0.25: alpha = 1.5 / sqrt(t + 1) falls below 1 at t = 2
    ada, one = (
        auc(name, decay=0.25, **extra, **LOCAL) for name, extra in (("cdma_ada", {"alpha": 1.5}), ("cdma_one", {}))
    )
    assert [torch.equal(flat(a), flat(b)) for a, b in zip(ada, one, strict=True)] == [True, True, False, False]


def test_one_local_step_is_parallel_sgda_bit_for_bit():
    once = LOCAL | {"steps": 1}
    for a, b in zip(auc("cdma_one", **once), auc("parallel_sgda", lr=0.3, dual_lr=0.1), strict=True):
        assert torch.equal(flat(a), flat(b))


def test_ada_with_every_client_heard_in_phase_one_is_one_for_every_alpha():
    everyone = CohortOptions(size=AUC.population.size)
    runs = [
        play(build(name, AUC.task, everyone, decay=0.4, **extra, **LOCAL), AUC, 3, inner="batched")[-1]
        for name, extra in (("cdma_one", {}), ("cdma_ada", {"alpha": 0.7}))
    ]
    torch.testing.assert_close(flat(runs[0]), flat(runs[1]), rtol=1e-4, atol=1e-5)


def test_identical_hessians_make_phase_two_independent_of_who_answers(monkeypatch):
    same = World(Game(), rows([(1, 2, 1, 5, -1)], [(1, 2, 1, -3, 2)], [(1, 2, 1, 0, 7)]))
    found = []
    for second in ([0], [1, 2], [0, 1, 2]):
        script(monkeypatch, [[0, 1, 2], second])
        found.append(xy(play(build("cdma_one", same.task, steps=4, batch_size=1, lr=0.1), same, 1)[0]))
    assert found == [pytest.approx(found[0], abs=1e-12)] * 3


def test_the_correction_cancels_linear_minibatch_noise():
    noisy = [(1, 2, 1, p, q) for p, q in ((3, 1), (-5, 2), (0, -8), (2, 5))]
    mean = [(1, 2, 1, 0, 0)]
    results = [
        xy(
            play(
                build("cdma_one", GAME.task, CohortOptions(size=1), steps=4, batch_size=1, lr=0.1),
                World(Game(), p),
                3,
            )[-1]
        )
        for p in (rows(noisy), rows(mean))
    ]
    assert results[0] == pytest.approx(results[1], abs=1e-12)
    plain = play(
        build("cdma_nc", GAME.task, CohortOptions(size=1), steps=3, batch_size=1, lr=0.1),
        World(Game(), rows(noisy)),
        1,
    )
    assert xy(plain[0]) != pytest.approx(
        xy(
            play(
                build("cdma_nc", GAME.task, CohortOptions(size=1), steps=3, batch_size=1, lr=0.1),
                World(Game(), rows(mean)),
                1,
            )[0]
        ),
        abs=1e-3,
    )


class Noise(Game):
    """Gradients that are the noise of a step alone."""

    def _loss(self, z, batch, ctx, key):
        drawn = rng.normal(key, (2,), torch.float64)
        return drawn[0] * z["x"]["x"] + drawn[1] * z["y"]["y"] + 0 * batch.x.sum(), {}


@pytest.mark.parametrize("share", [True, False])
def test_noise_is_shared_between_the_two_points(share):
    noise = World(Noise(), TOY)
    one = build("cdma_one", noise.task, **TWO_STEPS, share_noise=share)
    (first,) = records(one, noise, 1)
    moved = [(a - b) / 0.2 for a, b in zip(xy(point(1, -1)), xy(first.state.z), strict=True)]
    assert (moved == pytest.approx(xy(first.state.u), abs=1e-9)) == share
    # alpha = 1/4: u_1 = 3/4 u_0 + mean r with r = g - 3/4 g', a quarter of one draw where the noise is shared
    draws = []
    for seed in range(40):
        ada = build("cdma_ada", noise.task, **TWO_STEPS, share_noise=share, alpha=0.25)
        a, b = (r.state.u for r in records(ada, noise, 2, seed=seed))
        draws += [y - 0.75 * x for x, y in zip(xy(a), xy(b), strict=True)]
    variance = torch.tensor(draws).square().mean().item() * 2  # two clients heard
    assert variance == pytest.approx(1 / 16 if share else 1 + 9 / 16, rel=0.5)


def test_floats_follow_the_message_formulas():
    d = len(flat(AUC.task.init(0)))
    up = {"cdma_nc": (1,), "cdma_one": (1, 1), "cdma_ada": (1, 1), "parallel_sgda": (1,), "local_sgda": (1,)}
    down = {"cdma_nc": (1,), "cdma_one": (1, 2), "cdma_ada": (2, 2), "parallel_sgda": (1,), "local_sgda": (1,)}
    for name, vectors in up.items():
        options = {"lr": 0.3} if name == "parallel_sgda" else LOCAL
        for r in records(build(name, AUC.task, INVITE, **options), AUC, 3, policy=Siwer(), inner="batched"):
            for i, p in enumerate(r.phases):
                sent = 1 if name == "cdma_ada" and r.index == 0 else down[name][i]  # no z_{-1} in round 0
                sent = 2 if name == "cdma_ada" and i == 1 else sent
                assert p.counts["floats_up"] == p.counts["completed"] * d * vectors[i]
                assert p.counts["floats_down"] == 8 * d * sent
                assert p.counts["completed"] in (5, 6, 7, 8)
    once = list(records(build("cdma_one", AUC.task, INVITE, **(LOCAL | {"steps": 1})), AUC, 2, policy=Siwer()))
    assert [[p.phase for p in r.phases] for r in once] == [["gradient"], ["gradient"]]


def test_cohort_options_of_the_two_phases():
    def cohorts(**options):
        cohort = CohortOptions(size=8, **options)
        one = build("cdma_one", AUC.task, cohort, **LOCAL)
        run = records(one, AUC, 6, policy=Siwer(), shared_response_count=cohort.shared_response_count, inner="batched")
        return [[(p.clients.tolist(), p.responses.completed.tolist()) for p in r.phases] for r in run]

    paper, code, shared = cohorts(), cohorts(resample=False), cohorts(shared_response_count=True)
    again = cohorts(resample=False, shared_response_count=True)
    assert all(a[0] != b[0] for a, b in paper)
    assert all(a[0] == b[0] for a, b in code)
    assert all(a[0] == b[0] and len(a[1]) == len(b[1]) for a, b in again)
    assert any(a[1] != b[1] for a, b in again)  # of the same clients as many answer, and others
    assert any(len(a[1]) != len(b[1]) for a, b in code)
    assert all(len(a[1]) == len(b[1]) for a, b in shared)
    assert any(len(a[1]) != len(b[1]) for a, b in paper)


def test_practical_schedule():
    algorithm = build("cdma_ada", AUC.task, INVITE, decay=0.2, alpha=5.0, **LOCAL)
    alphas = [r.metrics["alpha"] for r in records(algorithm, AUC, 3, inner="batched")]
    assert alphas == [1.0, 1.0, 1.0]
    falling = build("cdma_ada", GAME.task, **TWO_STEPS | {"steps": 1}, decay=0.2, alpha=0.9)
    z = point(1, -1)
    for r in records(falling, GAME, 4):  # K = 1: z_{t+1} = z_t - eta_t u_t
        assert r.metrics["alpha"] == pytest.approx(0.9 / (r.index + 1) ** 0.4)
        rate = 0.1 / (r.index + 1) ** 0.2
        want = [a - rate * b for a, b in zip(xy(z), xy(r.state.u), strict=True)]
        z = r.state.z
        assert xy(z) == pytest.approx(want, abs=1e-12)


OF_THEORY = {
    "smoothness": 2.3,
    "pl": 0.7,
    "sigma_1": 1.3,
    "sigma_2": 3.1,
    "local_1": 0.6,
    "local_2": 0.7,
    "gap": 1.7,
    "responses": 5,
    "rounds": 90,
}


def theorem(variant, k, t, lf, mu, s1, s2, g1, g2, gap, s, rounds):
    """The terms whose least are gamma_t and eta_t, as the paper prints them."""
    kappa = lf / mu
    both = lf + kappa * lf / 2 + lf  # L_Phi + L_f
    if variant == "nc":
        gammas = [
            math.sqrt(20 * gap * s / (lf * rounds * k * k * s2 * s2)),
            math.cbrt(30 * gap / (lf * lf * (s2 * s2 + g2 * g2) * rounds * k * k * k)),
            1 / (87 * lf * k),
        ]
        etas = [
            math.sqrt(20 * gap * s / (7 * both * rounds * k * k * s1 * s1)),
            math.cbrt(3 * gap / (lf * lf * (s1 * s1 + g1 * g1) * rounds * k * k * k)),
            min(gammas) / (21 * kappa * kappa),
        ]
    elif variant == "one":
        gammas = [1 / (87 * lf * k), math.sqrt(4 * gap * s / (3 * lf * rounds * k * k * s2 * s2))]
        etas = [min(gammas) / (21 * kappa * kappa), math.sqrt(40 * gap * s / (21 * both * rounds * k * k * s1 * s1))]
    else:
        spread = s1 * s1 / (kappa * kappa) + s2 * s2
        last = math.cbrt(s) * math.cbrt(gap) / (math.cbrt(lf) ** 2 * k * math.cbrt(t + 1) * math.cbrt(spread))
        gammas = [1 / (2 * lf), 5.78e-4 / (lf * k), last]
        etas = [min(gammas) / (12 * kappa * kappa)]
    return gammas, etas


@pytest.mark.parametrize(
    ("variant", "of", "change"),
    [
        ("nc", ("y", 0), {"sigma_2": 3e3}),
        ("nc", ("y", 1), {"local_2": 4e4}),
        ("nc", ("y", 1), {"sigma_2": 3e3, "local_2": 2e3, "responses": 10**9}),
        ("nc", ("y", 2), {}),
        ("nc", ("x", 0), {"sigma_1": 9e5}),
        ("nc", ("x", 1), {"local_1": 8e8}),
        ("nc", ("x", 1), {"sigma_1": 2e6, "local_1": 1e6, "responses": 10**9}),
        ("nc", ("x", 2), {}),
        ("one", ("y", 0), {}),
        ("one", ("y", 1), {"sigma_2": 3e3}),
        ("one", ("x", 0), {}),
        ("one", ("x", 1), {"sigma_1": 9e5}),
        ("ada", ("y", 1), {}),
        ("ada", ("y", 2), {"sigma_2": 7e6}),
        ("ada", ("y", 2), {"sigma_1": 3e7}),
    ],
)
def test_every_term_of_the_theorems_schedules(variant, of, change):
    # gamma_t's first term of Theorem 3 is never the least: 5.78e-4 / K is below a half
    constants = OF_THEORY | change
    part, term = of
    found, alpha = CdmaTheory(**constants).at(variant, 6, 7)
    gammas, etas = theorem(variant, 6, 7, *constants.values())
    terms = gammas if part == "y" else etas
    assert terms.index(min(terms)) == term  # the case is of the term it is meant for
    assert (found["y"], found["x"]) == pytest.approx((min(gammas), min(etas)), rel=1e-13)
    assert alpha == (pytest.approx(200_000 * 2.3**2 * 36 * min(gammas) ** 2, rel=1e-13) if variant == "ada" else 1.0)


@pytest.mark.parametrize("name", ["nc", "one", "ada"])
def test_a_round_takes_the_theorems_steps(name):
    constants = OF_THEORY | {"responses": 2, "gap": 9.0}
    algorithm = build(f"cdma_{name}", GAME.task, steps=1, batch_size=1, theory=constants)
    x, y = 1.0, -1.0
    for r in records(algorithm, GAME, 2):
        rates, alpha = CdmaTheory(**constants).at(name, 1, r.index)
        x, y = x - rates["x"] * (2 * x + y - 1), y + rates["y"] * (x - 1.5 * y + 0.5)  # of the mean game
        assert xy(r.state.z) == pytest.approx((x, y), abs=1e-14)
        assert r.metrics.get("alpha", 1.0) == pytest.approx(alpha)


@pytest.mark.parametrize(
    ("name", "options", "cohort", "line"),
    [
        ("cdma_nc", {"local_1": None}, {}, r"algorithm.theory.local_1: missing: Theorem 1 needs Assumption 4: give it"),
        ("cdma_nc", {"local_2": None}, {}, r"algorithm.theory.local_2: missing"),
        ("cdma_one", {"responses": 6}, {"wait_for": "siwer"}, r"theory.responses=6: a phase may go on after 5 answers"),
        ("cdma_one", {"responses": 8}, {"wait_for": 7}, r"theory.responses=8: a phase may go on after 7 answers"),
        ("cdma_ada", {"gap": 0.8}, {}, r"theory.responses=5: Theorem 3 needs .* = 5.3079 at least"),
        ("cdma_ada", {"pl": 2.4}, {}, r"pl=2.4 is above smoothness=2.3"),
    ],
)
def test_constants_under_which_a_theorem_says_nothing_are_refused(name, options, cohort, line):
    given = {k: v for k, v in (OF_THEORY | options).items() if v is not None}
    with pytest.raises(ValueError, match=line):
        build(name, GAME.task, CohortOptions(size=8, **cohort), steps=2, batch_size=1, theory=given)


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", 0.3), ("dual_lr", 0.1), ("decay", 0.2), ("alpha", 0.5), ("lr_schedule", {"kind": "power"})],
)
def test_a_theory_and_practical_steps_are_not_given_together(key, value):
    with pytest.raises(ValueError, match=f"{key}=.* is not for theory: leave it out"):
        build("cdma_ada", GAME.task, steps=2, batch_size=1, theory=OF_THEORY, **{key: value})


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("cdma_nc", {"steps": 4, "batch_size": 2}, None),  # epochs of 2 and of 1
        (
            "cdma_nc",
            {"steps": 3, "batch_size": 2},
            r"algorithm.steps=3: Theorem 1 needs a multiple .* which has 2 steps of",
        ),
        ("cdma_one", {"steps": 3, "batch_size": 2}, None),
        (
            "cdma_one",
            {"epochs": 2, "batch_size": 2},
            r"algorithm.epochs=2: .* an epoch has 1 to 2 here: give algorithm.steps",
        ),
        ("cdma_nc", {"epochs": 2, "batch_size": 3}, None),
        ("cdma_ada", {"batch_size": 2}, r"algorithm.epochs=1: "),
    ],
)
def test_local_steps_of_which_a_theorem_does_not_speak_are_refused(name, options, line):
    uneven = World(Game(), rows([(1, 2, 1, 1, -1)] * 3, [(3, 0, 2, -3, 2)] * 2))
    algorithm = build(name, uneven.task, theory=OF_THEORY | {"responses": 2, "gap": 9.0}, **options)
    if line is None:
        assert len(play(algorithm, uneven, 1)) == 1
    else:
        with pytest.raises(ConfigError, match=line):
            play(algorithm, uneven, 1)


def test_a_step_of_svrg_is_taken_at_the_minibatch():
    """One client with two examples, K = 2, B = 1: u + grad at z^(1) - grad at z_0 of the second, in either order."""
    first, second = (1, 2, 1, 5, -1), (3, 0, 2, -3, 2)
    alone = World(Game(), rows([first, second]))
    found = xy(play(build("cdma_one", alone.task, CohortOptions(size=1), **TWO_STEPS), alone, 1)[0])

    def direction(of, x, y):
        a, b, c, p, q = of
        return a * x + b * y + p, b * x - c * y + q

    u = [sum(g) / 2 for g in zip(direction(first, 1, -1), direction(second, 1, -1), strict=True)]
    x, y = 1 - 0.1 * u[0], -1 + 0.1 * u[1]
    ends = []
    for of in (first, second):
        now, then = direction(of, x, y), direction(of, 1, -1)
        ends.append((x - 0.1 * (u[0] + now[0] - then[0]), y + 0.1 * (u[1] + now[1] - then[1])))
    assert any(found == pytest.approx(end, abs=1e-12) for end in ends)
    assert ends[0] != pytest.approx(ends[1], abs=1e-3)


def test_with_identical_hessians_and_everybody_heard_nc_is_centralised():
    same = World(Game(), rows([(1, 2, 1, 5, -1)], [(1, 2, 1, -3, 2)], [(1, 2, 1, 0, 7)]))
    x, y = 1.0, -1.0
    for _ in range(8):
        x, y = x - 0.1 * (x + 2 * y + 2 / 3), y + 0.1 * (2 * x - y + 8 / 3)
    algorithm = build("cdma_nc", same.task, CohortOptions(size=3), steps=4, batch_size=1, lr=0.1)
    assert xy(play(algorithm, same, 2)[-1]) == pytest.approx((x, y), abs=1e-12)


def test_the_mean_over_clients_of_what_phase_one_collects_is_that_of_all(monkeypatch):
    found = []
    for cohort in ([0], [1], [0, 1]):
        script(monkeypatch, [[0, 1], [0, 1], cohort, [0, 1]])  # the same first round for all
        *_, last = records(build("cdma_ada", GAME.task, alpha=0.3, **TWO_STEPS), GAME, 2)
        found.append(xy(last.state.u))
    mean = [(a + b) / 2 for a, b in zip(found[0], found[1], strict=True)]
    assert mean == pytest.approx(found[2], abs=1e-12)


def test_algorithms_of_one_seed_see_the_same_cohorts():
    def seen(name, seed, **options):
        run = records(build(name, AUC.task, INVITE, **options), AUC, 4, policy=Siwer(), seed=seed, inner="batched")
        return [
            (p.clients.tolist(), p.responses.completed.tolist(), p.counts["floats_up"])
            for r in run
            for p in r.phases[:1]
        ]

    nc = seen("cdma_nc", 5, **LOCAL)
    assert nc == seen("cdma_nc", 5, **LOCAL) == seen("local_sgda_plus", 5, **LOCAL) == seen("parallel_sgda", 5, lr=0.3)
    assert nc != seen("cdma_nc", 6, **LOCAL)


@pytest.mark.parametrize(("alpha", "rounds", "within"), [(0.5, 800, 0.2), (0.2, 1500, 0.25)])
@pytest.mark.slow
def test_the_gradient_estimate_has_the_stationary_variance_of_its_recursion(alpha, rounds, within):
    # identical Hessians, clients' gradients differ by noise of variance sigma^2: Var(u) -> alpha / (2 - alpha) * sigma^2 / S
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std(correction=0)
    clients = World(Game(), rows(*([(0.5, 0, 0.5, float(p), 0)] for p in noise)))
    algorithm = build("cdma_ada", clients.task, CohortOptions(size=1), alpha=alpha, steps=1, batch_size=1, lr=1e-3)
    errors = [
        float(r.state.u["x"]["x"]) - 0.5 * float(r.state.z_before["x"]["x"])
        for r in records(algorithm, clients, rounds)
    ][100:]
    assert torch.tensor(errors).var().item() == pytest.approx(alpha / (2 - alpha), rel=within)
