"""DRFA against the AFL specification, sections 5.3 and 9.3."""

import itertools
import math

import pytest
import torch

from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.algorithms.options import CohortOptions
from tests.algorithms.agnostic import TWO, mean_of, run, w, world
from tests.algorithms.harness import World, build


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
    found = [drfa(TWO, 1, w=0.7, steps=3, size=1, seed=s, dual={"lr": 0.0})[0] for s in range(200)]
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
    found = drfa(TWO, 1, w=0.7, steps=1, weighting=weighting, dual={"lr": 0.02}, size=2)[0]
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
        (state,) = drfa(TWO, 1, steps=3, weighting="importance", dual={"lr": 0.001}, size=1, seed=seed, w=0.7)
        client = int(state.losses.isfinite().nonzero())
        seen.add(client)
        v = torch.zeros(2, dtype=torch.float64)
        v[client] = 2 * state.losses[client]
        rule = Dual.of(DualOptions(lr=1.0), torch.tensor([1, 1]))
        torch.testing.assert_close(
            state.mixture, rule.step(torch.tensor([0.5, 0.5], dtype=torch.float64), 3 * 0.001 * v)
        )
    assert seen == {0, 1}


@pytest.mark.parametrize("weighting", ["sampling", "importance"])
def test_models_of_clients_and_server_stay_in_their_ball(weighting):
    """Every local step is projected (5.3): from 0.7 towards 3, stopped at 0.8, where the snapshot's loss is taken."""
    one = world([(4, 3)])
    (state,) = drfa(one, 1, w=0.7, steps=4, radius=0.8, weighting=weighting)
    assert w(state) == pytest.approx(0.8, abs=1e-12)
    assert float(state.losses) == pytest.approx(2 * 2.2**2)
    back = world(
        [(4, 3), (4, 3), (4, -3)]
    )  # a minibatch may lead out of the ball and the next from its edge, not from beyond
    for seed in range(20):
        (state,) = drfa(back, 1, w=0.7, steps=2, batch_size=1, radius=0.8, weighting=weighting, seed=seed)
        assert min(abs(w(state) - x) for x in (0.8, 0.8 - 0.4 * 3.8, -0.78 + 0.4 * 3.78)) < 1e-9


def test_the_mean_of_the_models_is_evaluated_where_that_is_asked_for():
    states = drfa(TWO, 4, w=0.7, steps=3, dual={"lr": 0.1})
    points = [w(state) for state in states]
    for t, state in enumerate(states, start=1):
        assert float(state.z_mean["x"]["w"]) == pytest.approx(sum(points[:t]) / t, abs=1e-12)
    for average in (True, False):
        algorithm = build("drfa", TWO.task, CohortOptions(size=2), steps=3, average=average)
        found = algorithm.views["global"].params(states[-1])
        assert found is (states[-1].z_mean if average else states[-1].z)
    assert points[-1] != points[0]
