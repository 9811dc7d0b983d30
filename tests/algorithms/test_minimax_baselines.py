"""The methods CDMA is compared with: the two-client game worked out by hand, and the identities that hold exactly."""

import pytest
import torch
from harness import TOY, Game, World, build, digits, flat, play, point, positions, records, rows, script, xy
from scripted import Scripted

from fedfleet.algorithms.catalyst import drawn_gaps
from fedfleet.algorithms.options import CohortOptions, Schedule
from fedfleet.algorithms.parallel_sgda import ParallelOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.fleet.responses import Federation

GAME = World(Game(), TOY)
TWO_STEPS = {"steps": 2, "batch_size": 1, "lr": 0.1}
SADDLE = (0.25, 0.5)
FIXED = {"random_steps": False, "stage_iterations": 2000}


ROUNDS = [
    ("local_sgda_plus", {}, [(0.98, -0.45), (0.8684, -0.05505), (0.727001, 0.21008475)]),
    ("extra_step", {}, [(0.9482, -0.5405), (0.84913274, -0.217582785), (0.7370447816, 0.0006269255)]),
    ("coda_plus", {"theta": 0.5}, [(0.98, -0.45), (0.8727, -0.06575), (0.746173, 0.18636875)]),
    (
        "catalyst_scaffold_s",
        {"theta": 0.5, **FIXED},
        [(0.97, -0.46), (0.869725, -0.12445), (0.7623128125, 0.071403875)],
    ),
    ("codasca", {}, [(0.98, -0.45), (0.8609, -0.0606), (0.72241, 0.197594)]),
    ("codasca", {"dual_control": False}, [(0.98, -0.45), (0.8694, -0.06485), (0.735585, 0.19196275)]),
]


@pytest.mark.parametrize(("name", "options", "trace"), ROUNDS)
def test_toy_game_round_by_round(name, options, trace):
    found = [xy(z) for z in play(build(name, GAME.task, **TWO_STEPS, **options), GAME, 3)]
    assert found == [pytest.approx(want, abs=1e-9) for want in trace]


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("local_sgda_plus", {}, (0.23133505, 0.4689224)),
        ("extra_step", {}, (0.28671864, 0.27938638)),
        ("catalyst_scaffold_s", FIXED, SADDLE),
        ("codasca", {}, SADDLE),
        ("codasca", {"dual_control": False}, (0.27655172, 0.49655172)),  # the released code: a wrong point
    ],
)
@pytest.mark.slow
def test_toy_game_limit(name, options, limit):
    assert xy(play(build(name, GAME.task, **TWO_STEPS, **options), GAME, 400)[-1]) == pytest.approx(limit, abs=1e-7)


def test_controls_of_codasca_under_partial_participation(monkeypatch):
    script(monkeypatch, [[0], [1], [0]])
    kept = positions(monkeypatch)
    states = [r.state for r in records(build("codasca", GAME.task, **TWO_STEPS), GAME, 3)]
    want = [(0.96, -0.62), (0.9634, 0.1342), (0.544411, 0.330823)]
    assert [xy(s.z) for s in states] == [pytest.approx(z, abs=1e-9) for z in want]
    c = xy(states[-1].c)
    assert (c[0], -c[1]) == pytest.approx((1.0682225, 1.6718075), abs=1e-9)  # the dual part in direction space
    client_state = kept[0].memory.store.get(torch.arange(2), lambda: states[-1].c)
    assert client_state["x"]["x"].tolist() == pytest.approx([2.253445, -0.117], abs=1e-9)
    assert (-client_state["y"]["y"]).tolist() == pytest.approx([0.522615, 2.821], abs=1e-9)


def test_catalyst_at_the_saddle_stays_whatever_its_anchor_weighs():
    for theta in (0.0, 0.5, 3.0):
        algorithm = build("catalyst_scaffold_s", GAME.task, **TWO_STEPS, theta=theta)
        assert xy(play(algorithm, GAME, 3, z=point(*SADDLE))[-1]) == pytest.approx(SADDLE, abs=1e-12)


@pytest.mark.parametrize("theta", [0.0, 0.5])
def test_catalysts_global_step_stretches_every_round(monkeypatch, theta):
    """From z_t the server goes global_lr times as far as the mean of clients, whose anchor is the start of the stage."""
    script(monkeypatch, [[0], [1], [0, 1], [0], [1], [0, 1]])
    options = {**TWO_STEPS, **FIXED, "theta": theta, "global_lr": 0.7, "lr": 0.15, "dual_lr": 0.1}
    found = [xy(z) for z in play(build("catalyst_scaffold_s", GAME.task, **options), GAME, 3)]
    z, expected = (1.0, -1.0), []
    for first, second in (([0], [1]), ([0, 1], [0]), ([1], [0, 1])):
        u = means([slope(i, z) for i in first])
        ends = []
        for i in second:
            (x, y), (gx, gy) = z, slope(i, z)
            for _ in range(2):
                dx, dy = slope(i, (x, y))
                x, y = (
                    x - 0.15 * (dx - gx + u[0] + theta * (x - 1)),
                    y + 0.1 * (dy - gy + u[1] - theta * (y + 1)),
                )
            ends.append((x, y))
        z = tuple(a + 0.7 * (b - a) for a, b in zip(z, means(ends), strict=True))
        expected.append(z)
    assert found == [pytest.approx(want, abs=1e-12) for want in expected]


@pytest.mark.parametrize("dual_control", [True, False])
def test_codasca_by_hand_with_stages_an_anchor_and_a_global_step(monkeypatch, dual_control):
    cohorts = [[0], [0, 1], [1], [0, 1], [0]]
    script(monkeypatch, cohorts)
    options = {**TWO_STEPS, "theta": 0.5, "stage_iterations": 4, "stage_factor": 2.0, "global_lr": 0.7, "dual_lr": 0.2}
    algorithm = build("codasca", GAME.task, **options, dual_control=dual_control)
    found = list(records(algorithm, GAME, 5))
    z, c, client_state, anchor = (1.0, -1.0), (0.0, 0.0), [(0.0, 0.0)] * 2, 1.0
    for t, (cohort, r) in enumerate(zip(cohorts, found, strict=True)):
        anchor = z[0] if t % 2 == 0 else anchor  # two rounds a stage
        eta, gamma = 0.1 / 2 ** (t // 2), 0.2 / 2 ** (t // 2)
        ends, controls = [], {}
        for i in cohort:
            x, y = z
            cx, cy = c[0] - client_state[i][0], (c[1] - client_state[i][1]) * dual_control
            for _ in range(2):
                dx, dy = slope(i, (x, y))
                x, y = x - eta * (dx + cx + 0.5 * (x - anchor)), y + gamma * (dy + cy)
            ends.append((x, y))
            controls[i] = (
                client_state[i][0] - c[0] + (z[0] - x) / (2 * eta),
                client_state[i][1] - c[1] + (y - z[1]) / (2 * gamma),
            )
        z = tuple(a + 0.7 * (b - a) for a, b in zip(z, means(ends), strict=True))
        client_state = [controls.get(i, o) for i, o in enumerate(client_state)]
        c = means(client_state)
        assert xy(r.state.z) == pytest.approx(z, abs=1e-12)
        assert (xy(r.state.c)[0], -xy(r.state.c)[1]) == pytest.approx(c, abs=1e-12)
        assert r.metrics == {"stage": t // 2}


def slope(client, at):
    """The gradient of one client's game."""
    a, b, c, p, q = ((1, 2, 1, 1, -1), (3, 0, 2, -3, 2))[client]
    return a * at[0] + b * at[1] + p, b * at[0] - c * at[1] + q


def means(pairs):
    return tuple(sum(column) / len(pairs) for column in zip(*pairs, strict=True))


def test_an_extra_step_takes_its_second_gradient_on_a_second_minibatch():
    """One client with two examples, B = 1, K = 1: ahead on one of them, the step on the other, in either order."""
    alone = World(Game(), rows([(1, 2, 1, 1, -1), (3, 0, 2, -3, 2)]))
    extra = build("extra_step", alone.task, CohortOptions(size=1), steps=1, batch_size=1, lr=0.1, dual_lr=0.3)
    ends = {}
    for first, second in ((0, 1), (1, 0), (0, 0), (1, 1)):
        dx, dy = slope(first, (1, -1))
        dx, dy = slope(second, (1 - 0.1 * dx, -1 + 0.3 * dy))
        ends[first, second] = (1 - 0.1 * dx, -1 + 0.3 * dy)
    seen = set()
    for seed in range(8):
        z = xy(play(extra, alone, 1, seed=seed)[0])
        seen |= {order for order, end in ends.items() if z == pytest.approx(end, abs=1e-12)}
    assert seen == {(0, 1), (1, 0)}


AUC = digits("auc")
INVITE = CohortOptions(size=8)
LOCAL = {"steps": 3, "batch_size": 7, "lr": 0.3}


def auc(name, rounds=4, cohort=INVITE, **options):
    return [
        flat(z) for z in play(build(name, AUC.task, cohort, **options), AUC, rounds, inner="batched", policy=Siwer())
    ]


@pytest.mark.parametrize(
    ("name", "options", "same", "rounds"),
    [
        ("catalyst_scaffold_s", FIXED, "cdma_one", 4),
        ("coda_plus", {}, "cdma_nc", 4),
        ("codasca", {}, "cdma_nc", 1),
        ("local_sgda_plus", {"snapshot_refresh": "every_step"}, "cdma_nc", 4),
    ],
)
def test_methods_that_are_others_in_a_special_case(name, options, same, rounds):
    for a, b in zip(auc(name, rounds, **LOCAL, **options), auc(same, rounds, **LOCAL), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_snapshot_is_kept_for_as_many_rounds_as_asked():
    found = [
        r.state
        for r in records(build("local_sgda_plus", GAME.task, **TWO_STEPS, snapshot_refresh=3), GAME, 7, z=point(1, -1))
    ]
    # The state after round t has the snapshot that round used: the x before rounds 0, 3, 6.
    xs = [1.0, *(xy(s.z)[0] for s in found)]
    assert [float(s.snapshot["x"]) for s in found] == [xs[0]] * 3 + [xs[3]] * 3 + [xs[6]]


def test_a_snapshot_and_an_anchor_are_taken_also_in_a_round_that_nobody_answers():
    given = {"federation": Federation(availability=Scripted([(0, 1), (0, 1), (), (0, 1)])), "skip_aborted": True}
    found = [
        r.state for r in records(build("local_sgda_plus", GAME.task, **TWO_STEPS, snapshot_refresh=2), GAME, 4, **given)
    ]
    assert [float(s.snapshot["x"]) for s in found] == [1.0, 1.0, *[xy(found[1].z)[0]] * 2]
    options = {**TWO_STEPS, "theta": 0.5, "stage_iterations": 4, "anchor": "stage_average"}  # two rounds a stage
    for name in ("coda_plus", "codasca"):
        given["federation"] = Federation(availability=Scripted([(0, 1), (0, 1), (), (0, 1), (0, 1)]))
        found = [r.state for r in records(build(name, GAME.task, **options), GAME, 5, **given)]
        xs = [xy(s.z)[0] for s in found]
        anchors = [1.0, 1.0, *[(xs[0] + xs[1]) / 2] * 2, (xs[2] + xs[3]) / 2]  # in the round skipped the model stays
        assert [float(s.anchor["x"]) for s in found] == pytest.approx(anchors, abs=1e-12), name


def test_a_first_local_step_with_a_fresh_snapshot_is_that_of_local_sgda():
    once = LOCAL | {"steps": 1}
    for a, b in zip(auc("local_sgda_plus", **once), auc("local_sgda", **once), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_stages_divide_the_steps_and_move_the_anchor():
    options = {**TWO_STEPS, "theta": 0.5, "stage_iterations": 6}  # three rounds a stage
    for kind in ("last", "stage_average"):
        found = list(records(build("coda_plus", GAME.task, **options, anchor=kind), GAME, 8))
        assert [r.metrics["stage"] for r in found] == [0, 0, 0, 1, 1, 1, 2, 2]
        xs = [xy(r.state.z)[0] for r in found]
        anchors = [float(r.state.anchor["x"]) for r in found]
        second = xs[2] if kind == "last" else sum(xs[:3]) / 3
        assert anchors[:6] == pytest.approx([1.0] * 3 + [second] * 3)

        def stepped(z, anchor, lr):  # full participation, two steps: worked out client by client
            ends = []
            for a, b, c, p, q in ((1, 2, 1, 1, -1), (3, 0, 2, -3, 2)):
                x, y = z
                for _ in range(2):
                    x, y = x - lr * (a * x + b * y + p + 0.5 * (x - anchor)), y + lr * (b * x - c * y + q)
                ends.append((x, y))
            return tuple(sum(e[i] for e in ends) / 2 for i in (0, 1))

        assert xy(found[3].state.z) == pytest.approx(stepped(xy(found[2].state.z), second, 0.1 / 3), abs=1e-12)


def test_the_servers_control_is_the_mean_of_all_clients(monkeypatch):
    kept = positions(monkeypatch)
    everyone = torch.arange(AUC.population.size)
    algorithm = build("codasca", AUC.task, INVITE, **LOCAL, theta=0.1, stage_iterations=6)
    for r in records(algorithm, AUC, 5, policy=Siwer(), inner="batched"):
        states = kept[0].memory.store.get(everyone, lambda c=r.state.c: T.zeros_like(c))
        mean = T.map(lambda each: each.mean(0), states)
        torch.testing.assert_close(flat(r.state.c), flat(mean), rtol=1e-4, atol=1e-6)
    assert 8 < len(kept[0].memory.store) < len(everyone)


def test_late_stages_of_codasca_keep_controls_that_are_gradients():
    """Steps divided by 1e10 a round soon move nothing in single precision; the controls are mean gradients all the same."""
    options = {"steps": 3, "batch_size": 7, "lr": 0.3, "stage_iterations": 3, "stage_factor": 1e10}
    *_, last = records(build("codasca", AUC.task, INVITE, **options), AUC, 40, inner="batched")
    everyone = CohortOptions(size=AUC.population.size)
    (r,) = records(build("cdma_one", AUC.task, everyone, steps=1), AUC, 1, z=last.state.z, inner="batched")
    c, u = flat(last.state.c), flat(r.state.u)
    assert float((c - u).norm()) < 0.2 * float(
        u.norm()
    )  # minibatches of seven, and every client has been heard some rounds ago


class Drawn(Game):
    """Gradients with the noise d of a step: d x for x, d for y."""

    def _loss(self, z, batch, ctx, key):
        d = rng.normal(key, (), torch.float64)
        return d * (z["x"]["x"] ** 2 / 2 + z["y"]["y"]) + 0 * batch.x.sum(), {}


def test_the_two_gradients_of_an_extra_step_have_noise_of_their_own():
    drawn = World(Drawn(), rows([(1, 2, 1, 1, -1)]))
    extra = build("extra_step", drawn.task, CohortOptions(size=1), steps=1, batch_size=1, lr=1.0)
    x, y = xy(play(extra, drawn, 1)[0])
    second = y + 1  # from y = -1 along the second draw; x = 1 - second (1 - first)
    assert 1 - (1 - x) / second != pytest.approx(second, abs=1e-3)


def test_gaps_of_a_stage():
    key = rng.key(3)
    for stage in range(200):
        gaps = drawn_gaps(40, 5, rng.fold(key, stage))
        assert (gaps > 0).all()
        assert gaps.sum() < 40  # what comes after the last exchange is left out
    many = torch.cat([drawn_gaps(4000, 5, rng.fold(key, "long", stage)) for stage in range(25)]).double()
    n = len(many)
    assert float(many.mean()) == pytest.approx(5, abs=4 * (20 / n) ** 0.5)  # variance (1 - p) / p^2 = 20
    assert float((many == 1).double().mean()) == pytest.approx(0.2, abs=4 * (0.16 / n) ** 0.5)
    assert drawn_gaps(5, 1, key).tolist() == [1, 1, 1, 1]


def test_random_steps_are_those_of_the_stage():
    algorithm = build("catalyst_scaffold_s", AUC.task, INVITE, **LOCAL, theta=0.1, stage_iterations=12)
    rounds = list(records(algorithm, AUC, 12, inner="batched"))
    steps = [r.metrics["local_steps"] for r in rounds]
    assert len(set(steps)) > 1
    for r, before in zip(rounds[1:], rounds, strict=False):
        new_stage = len(before.state.gaps) == 0
        assert torch.equal(flat(r.state.anchor), flat(before.state.z if new_stage else before.state.anchor))
        if not new_stage:
            assert torch.equal(r.state.gaps, before.state.gaps[1:])
            assert r.metrics["local_steps"] == int(before.state.gaps[0])
    assert sum(len(r.state.gaps) == 0 for r in rounds) >= 2  # several stages were seen


def test_floats_follow_the_message_formulas():
    d = len(flat(AUC.task.init(0)))
    p = d - 1
    expected = {  # vectors up a phase, floats down a phase
        "local_sgda_plus": ({}, (1,), (d,)),
        "extra_step": ({}, (1,), (d,)),
        "coda_plus": ({"theta": 0.1}, (1,), (d + p,)),
        "catalyst_scaffold_s": ({"theta": 0.1}, (1, 1), (d, 3 * d)),
        "codasca": ({"theta": 0.1}, (2,), (2 * d + p,)),
    }
    for name, (options, up, down) in expected.items():
        algorithm = build(name, AUC.task, INVITE, **LOCAL, **options)
        for r in records(algorithm, AUC, 3, policy=Siwer(), inner="batched"):
            for i, phase in enumerate(r.phases):
                assert phase.counts["floats_up"] == phase.counts["completed"] * d * up[i]
                assert phase.counts["floats_down"] == 8 * down[i]
    old = build("local_sgda_plus", AUC.task, INVITE, **LOCAL, snapshot_refresh=2)
    sent = [r.phases[0].counts["floats_down"] for r in records(old, AUC, 3, inner="batched")]
    assert sent == [8 * d, 8 * (d + p), 8 * d]
    plain = build("catalyst_scaffold_s", AUC.task, INVITE, **LOCAL)  # no anchor where it weighs nothing
    (r,) = records(plain, AUC, 1, inner="batched")
    assert [phase.counts["floats_down"] for phase in r.phases] == [8 * d, 16 * d]


def test_one_step_through_phase_two_is_parallel_sgda():
    once = {"steps": 1, "batch_size": 7, "lr": 0.3, **FIXED}
    for a, b in zip(auc("catalyst_scaffold_s", **once), auc("parallel_sgda", lr=0.3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("iterations", [2, 3, 7])
def test_a_short_stage_draws_until_a_round_ends_after_its_first_step(iterations):
    """Successes at the first iteration alone are no round, and a single later one is."""
    seen = set()
    for seed in range(60):
        key = rng.key(seed)
        for attempt in range(1000):
            happened = rng.bernoulli(rng.fold(key, attempt), 1 / 3, (iterations,)).tolist()
            ends = [k for k in range(1, iterations) if happened[k]]
            if ends:
                break
        wanted = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        assert drawn_gaps(iterations, 3, key).tolist() == wanted
        seen.add((happened[0], len(ends)))
    assert {(True, 1), (False, 1)} <= seen


def test_both_steps_of_parallel_sgda_fall_alike():
    options = ParallelOptions(lr=0.4, dual_lr=0.1, lr_schedule=Schedule(kind="power", exponent=0.5))
    assert options.rates(3) == pytest.approx({"x": 0.2, "y": 0.05})
