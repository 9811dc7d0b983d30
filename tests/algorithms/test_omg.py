"""Matching on the server: the solver beside an exact one, the step beside its formula in coordinates, the wrapper."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from harness import NET, Bowl, World, build, digits, flat, play, records, rows
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from test_personalised import BODY, HEAD, LR, ONCE, START, WHERE, B, fit, heard, rows_of
from torch import Tensor

from fedfleet.algorithms.matching import coefficients, exact_mixture, mixture, objective
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import First
from tests.parts import slow_but


def exact(gram: Tensor, w: Tensor, kappa: float) -> Tensor:
    k, size = gram.numpy(), len(w)
    found = minimize(
        lambda g: g @ k @ w.numpy() + kappa * np.sqrt(max(w.numpy() @ k @ w.numpy() * (g @ k @ g), 0)),
        np.full(size, 1 / size),
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda g: g.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.from_numpy(found.x.clip(0)) / found.x.clip(0).sum()


def step_of(updates: Tensor, w: Tensor, gamma: Tensor, kappa: float) -> Tensor:
    """Eq. (16), in all coordinates."""
    mean, mixed = w @ updates, gamma @ updates
    return mean + kappa * mean.norm() * mixed / mixed.norm()


def drawn(seed: int, size: int, floats: int = 12) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    updates = torch.randn(size, floats, dtype=torch.float64, generator=g)
    weights = torch.rand(size, dtype=torch.float64, generator=g).square() + 0.01
    return updates, weights / weights.sum()


CASES = st.tuples(st.integers(0, 300), st.integers(2, 9), st.sampled_from([0.1, 0.25, 0.5, 0.9]))


def test_the_solver_comes_near_the_exact_optimum():
    """Of few clients with updates of many coordinates; ``benchmarks/matching.py`` has what becomes of many."""
    above = []
    for seed, size, kappa in itertools.product(range(10), (2, 3, 5, 8), (0.25, 0.5, 0.9)):
        updates, w = drawn(seed, size, 1000)
        gram = updates @ updates.T
        found = mixture(gram, w, kappa)
        assert float(found.sum()) == pytest.approx(1)
        assert bool((found >= 0).all())
        best, mine = (float(objective(gram, w, of, kappa)) for of in (exact(gram, w, kappa), found))
        assert best - 1e-6 <= mine
        above.append((mine - best) / abs(best))
    assert max(above) < 0.05


@given(CASES)
def test_duality_radius_and_the_gain_of_the_worst(case):
    seed, size, kappa = case
    updates, w = drawn(seed, size)
    gram = updates @ updates.T
    gamma = exact(gram, w, kappa)
    a = coefficients(gram, w, gamma, kappa)
    step, mean = a @ updates, w @ updates
    torch.testing.assert_close(step, step_of(updates, w, gamma, kappa), rtol=1e-9, atol=1e-9)
    assert float((step - mean).norm()) == pytest.approx(kappa * float(mean.norm()), rel=1e-9)
    worst, scale = float((updates @ step).min()), float(gram.diagonal().mean())
    assert worst == pytest.approx(float(objective(gram, w, gamma, kappa)), abs=1e-3 * scale)
    assert worst >= (1 + kappa) * float((updates @ mean).min()) - 1e-3 * scale


@given(CASES, st.floats(0.01, 1000.0))
def test_scale_order_and_sign_of_updates_go_through(case, factor):
    seed, size, kappa = case
    updates, w = drawn(seed, size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    a, b, c = (
        mixture(u @ u.T, v, kappa) for u, v in ((updates, w), (-factor * updates, w), (updates[order], w[order]))
    )
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(a[order], c, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("updates", "kappa", "value", "step"),
    [
        ([[1.0, 0.0], [0.0, 3.0]], 0.5, 1.290569, [1.290569, 1.5]),
        ([[1.0, 0.0], [0.0, 3.0]], 0.1, 0.658114, None),
        ([[1.0, 0.2], [-1.0, 0.2]], 0.5, 0.06, [0.0, 0.3]),
    ],
)
def test_golden_values(updates, kappa, value, step):
    u = torch.tensor(updates, dtype=torch.float64)
    w = torch.full((2,), 0.5, dtype=torch.float64)
    gamma = mixture(u @ u.T, w, kappa)
    assert float(objective(u @ u.T, w, gamma, kappa)) == pytest.approx(value, abs=2e-4)
    assert float(objective(u @ u.T, w, exact(u @ u.T, w, kappa), kappa)) == pytest.approx(value, abs=1e-6)
    if step is not None:
        assert (coefficients(u @ u.T, w, gamma, kappa) @ u).tolist() == pytest.approx(step, abs=1e-3)


def test_what_vanishes_leaves_the_mean():
    w = torch.full((2,), 0.5, dtype=torch.float64)
    for updates in ([[1.0, 2.0], [-1.0, -2.0]], [[0.0, 0.0], [0.0, 0.0]]):
        u = torch.tensor(updates, dtype=torch.float64)
        a = coefficients(u @ u.T, w, mixture(u @ u.T, w, 0.5), 0.5)
        assert (a @ u).tolist() == [0.0, 0.0]
    one = torch.ones(1, 1, dtype=torch.float64)
    assert coefficients(one, one[0], mixture(one, one[0], 0.5), 0.5).tolist() == pytest.approx([1.5])


@pytest.mark.parametrize("kappa", [0.25, 0.5, 0.9])
def test_of_a_client_that_does_not_move_nothing_can_be_gained(kappa):
    """The exact step is then the mean; the paper's search leaves a little of the others, along which it goes as far as ever."""
    updates, w = drawn(0, 4, 50)
    updates[0] = 0.0
    gram, mean = updates @ updates.T, w @ updates
    torch.testing.assert_close(coefficients(gram, w, exact_mixture(gram, w, kappa), kappa), w)
    more = coefficients(gram, w, mixture(gram, w, kappa), kappa) @ updates - mean
    assert float(more.norm()) == pytest.approx(kappa * float(mean.norm()))
    assert abs(float(more @ mean / more.norm() / mean.norm())) < 0.5


@given(CASES)
def test_the_exact_solver_comes_to_the_least_objective_and_the_largest_gain(case):
    seed, size, kappa = case
    updates, w = drawn(seed, size)
    gram = updates @ updates.T
    gamma, scale = exact_mixture(gram, w, kappa), float(gram.diagonal().mean())
    assert float(gamma.sum()) == pytest.approx(1)
    assert bool((gamma >= 0).all())
    least = float(objective(gram, w, gamma, kappa))
    assert least <= float(objective(gram, w, exact(gram, w, kappa), kappa)) + 1e-9 * scale
    if float(gamma @ gram @ gamma) > 1e-9 * scale:  # or there is none
        assert float((gram @ coefficients(gram, w, gamma, kappa)).min()) == pytest.approx(least, abs=1e-7 * scale)


def test_the_exact_solver_is_an_option():
    where, cohort = world("fedavg"), CohortOptions(size=8)
    of = {"name": "fedavg", "steps": 3, "batch_size": 7}
    paper, best = (
        flat(play(build("omg", where.task, cohort, of=of, solver=solver), where, 1)[0]) for solver in ("paper", "exact")
    )
    assert 1e-5 < float((paper - best).abs().max()) < 0.1
    with pytest.raises(ValueError, match="updates=5 is not for solver=exact"):
        build("omg", where.task, cohort, of=of, solver="exact", updates=5)


def test_a_client_twice_at_half_the_weight_changes_nothing():
    updates, w = drawn(3, 4)
    twice, halves = torch.cat([updates, updates[:1]]), torch.cat([w[:1] / 2, w[1:], w[:1] / 2])
    steps = []
    for u, v in ((updates, w), (twice, halves)):
        gram = u @ u.T
        steps.append(coefficients(gram, v, exact_mixture(gram, v, 0.5), 0.5) @ u)
    torch.testing.assert_close(*steps, rtol=1e-6, atol=1e-6)


def test_uploads_as_differences():
    g = torch.Generator().manual_seed(0)
    blocks = tuple({"a": torch.randn(n, 3, 2, generator=g), "b": torch.randn(n, 4, generator=g)} for n in (2, 3))
    origin = {"a": torch.randn(3, 2, generator=g), "b": torch.randn(4, generator=g)}
    kept = UploadMatrix(blocks, (torch.ones(2), torch.ones(3)))
    each = torch.cat([torch.cat([(b[k] - origin[k]).double().flatten(1) for k in b], 1) for b in blocks])
    torch.testing.assert_close(kept.gram(origin), each @ each.T, rtol=1e-6, atol=1e-6)
    w = torch.arange(5, dtype=torch.float64)
    found = kept.combine(w, origin)
    torch.testing.assert_close(torch.cat([found["a"].flatten(), found["b"]]).double(), w @ each, rtol=1e-5, atol=1e-5)
    assert found["a"].dtype == torch.float32
    part = kept.of(lambda z: {"b": z["b"]})
    torch.testing.assert_close(part.gram(origin={"b": origin["b"]}), each[:, 6:] @ each[:, 6:].T, rtol=1e-6, atol=1e-6)


# The wrapper

FEDAVG = {"name": "fedavg", "epochs": 1, "batch_size": B, "lr": LR}


@pytest.mark.parametrize(("rescale", "divide"), [("none", 1.0), ("one_plus_kappa", 1.5), ("one_plus_kappa2", 1.25)])
@pytest.mark.parametrize("weight", ["num_examples", "uniform"])
def test_rounds_are_those_by_hand(rescale, divide, weight):
    algorithm = build(
        "omg", WHERE.task, CohortOptions(size=5),
        of={**FEDAVG, "weight": weight}, kappa=0.5, rescale=rescale, server_lr=0.8,
    )  # fmt: skip
    names, z = BODY + HEAD, START
    given = T.map(torch.Tensor.double, WHERE.task.init(0))
    for t, record in enumerate(records(algorithm, WHERE, 3, z=given, policy=First(3))):
        key = rng.fold(rng.key(0), "client", t, 0)
        ends = [fit(z, rows_of(c, key, 0, ONCE)) for c in heard(record)]
        sizes = WHERE.population.num_examples(torch.tensor(heard(record))).double()
        w = torch.full((3,), 1 / 3, dtype=torch.float64) if weight == "uniform" else sizes / sizes.sum()
        updates = torch.stack([torch.cat([(e[n] - z[n]).flatten() for n in names]) for e in ends])
        gamma = mixture(updates @ updates.T, w, 0.5)
        move = 0.8 / divide * step_of(updates, w, gamma, 0.5)
        z = {n: z[n] + m.view_as(z[n]) for n, m in zip(names, move.split([z[n].numel() for n in names]), strict=True)}
        for n in names:
            torch.testing.assert_close(record.state.z["x"][n], z[n], rtol=1e-8, atol=1e-10)


AVERAGING = (
    "fedavg",
    "fedopt",
    "fedprox",
    "scaffold",
    "peravg",
    "ditto",
    "fedper",
    "lg_fedavg",
    "fedbn",
    "fedrep",
    "fedbabu",
    "fedrod",
    "fedsam",
    "mofedsam",
    "fediir",
    "fedpac",
    "fedas",
    "fedga",
    "irm",
    "vrex",
    "coral",
    "mmd",
    "fishr",
)


def world(name: str) -> World:
    net = {"model": "cnn_bn"} if name in ("fedbn", "cnn_bn") else NET
    return digits("classification", "dirichlet", net=net, alpha=1.0, min_size=8)


@pytest.mark.parametrize("name", slow_but(AVERAGING, "fedavg", "fedas", "fedbn", "fedrod"))
def test_without_a_radius_it_is_the_algorithm_and_near_none_near_it(name):
    where, cohort = world(name), CohortOptions(size=6)
    given: dict[str, Any] = {"steps": 3, "batch_size": 7}
    if name == "mmd":  # whose kernels of small widths make a difference of 1e-8 one of 0.4 in a round
        given["penalty"] = 1e-3
    plain = [flat(z) for z in play(build(name, where.task, cohort, **given), where, 3)]
    for kappa in (0.0, 1e-9):
        of = {"name": name, **given}
        run = list(records(build("omg", where.task, cohort, of=of, kappa=kappa), where, 3))
        view = build(name, where.task, cohort, **given).views["global"].params
        for a, record in zip(plain, run, strict=True):
            if kappa == 0:
                assert torch.equal(a, flat(view(record.state)))
            else:
                torch.testing.assert_close(a, flat(view(record.state)), rtol=2e-5, atol=2e-6)
    far = play(build("omg", where.task, cohort, of={"name": name, **given}, kappa=0.9), where, 3)
    assert float((flat(far[-1]) - plain[-1]).abs().max()) > 1e-3


def test_without_a_radius_the_servers_rate_still_counts():
    where, cohort, of = world("fedavg"), CohortOptions(size=6), {"name": "fedavg", "steps": 3, "batch_size": 7}
    start = flat(where.task.init(0))
    whole, half = (
        flat(play(build("omg", where.task, cohort, of=of, kappa=0.0, server_lr=lr), where, 1)[0]) - start
        for lr in (1.0, 0.5)
    )
    torch.testing.assert_close(half, whole / 2, rtol=1e-4, atol=1e-6)


def test_as_much_travels():
    where, cohort, given = world("fedavg"), CohortOptions(size=6), {"steps": 3, "batch_size": 7}
    plain = list(records(build("fedavg", where.task, cohort, **given), where, 2))
    matched = list(records(build("omg", where.task, cohort, of={"name": "fedavg", **given}), where, 2))
    for a, b in zip(plain, matched, strict=True):
        assert a.phases[0].counts == b.phases[0].counts


@pytest.mark.parametrize(("rescale", "grows"), [("none", 1.5), ("one_plus_kappa", 1.0), ("one_plus_kappa2", 1.2)])
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_equal_updates_have_the_closed_form_and_descend(name, rescale, grows):
    alike = World(Bowl(), rows(*[[(1.0, 4.0)]] * 3))
    given, cohort = {"steps": 2, "batch_size": 1, "lr": 0.1}, CohortOptions(size=3)
    (plain,) = play(build(name, alike.task, cohort, **given), alike, 1)
    (found,) = play(build("omg", alike.task, cohort, of={"name": name, **given}, rescale=rescale), alike, 1)
    delta = float(plain["x"]["w"]) - 1.0
    assert delta > 0  # towards 4
    assert float(found["x"]["w"]) == pytest.approx(1 + grows * delta, rel=1e-6)


@pytest.mark.parametrize("buffers", ["mean", "frozen"])
def test_statistics_are_averaged_or_stay_and_are_no_update(buffers):
    where, cohort = world("cnn_bn"), CohortOptions(size=4)
    given = {"steps": 2, "batch_size": 7}
    start = where.task.init(0)
    (plain,) = play(build("fedavg", where.task, cohort, **given), where, 1)
    (found,) = play(build("omg", where.task, cohort, of={"name": "fedavg", **given}, buffers=buffers), where, 1)
    for n, leaf in found["b"].items():
        torch.testing.assert_close(leaf, (plain if buffers == "mean" else start)["b"][n])
    assert float((flat({"x": found["x"]}) - flat({"x": plain["x"]})).abs().max()) > 1e-3
    (none,) = play(
        build("omg", where.task, cohort, of={"name": "fedavg", **given}, kappa=0.0, buffers=buffers), where, 1
    )
    torch.testing.assert_close(flat({"x": none["x"]}), flat({"x": plain["x"]}), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["cdma_nc", "fact", "afl", "qffl", "fedbuff"])
def test_what_takes_no_mean_of_models_is_refused(name):
    task = digits("two_heads" if name == "fact" else "auc" if name == "cdma_nc" else "classification").task
    with pytest.raises(ConfigError, match=rf"algorithm.of='{name}': the server does not take a mean of models"):
        build("omg", task, CohortOptions(size=2), of=name)


def test_the_search_takes_the_steps_of_torchs_sgd():
    """Of v, at the paper's rate and momentum, from the objective of updates brought to a mean norm of 1; the best is returned."""
    for seed, kappa in ((0, 0.25), (1, 0.5), (2, 0.9)):
        updates, w = drawn(seed, 6)
        gram = updates @ updates.T
        k = gram / gram.diagonal().sqrt().mean() ** 2
        v = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        rule, seen = torch.optim.SGD([v], lr=25.0, momentum=0.5), []
        for _ in range(21):
            gamma = v.softmax(0)
            value = objective(k, w, gamma, kappa)
            seen.append((float(value.detach()), gamma.detach()))
            rule.zero_grad()
            value.backward()
            rule.step()
        best = min(seen, key=lambda one: one[0])[1]
        torch.testing.assert_close(mixture(gram, w, kappa), best, rtol=1e-6, atol=1e-8)
        few = mixture(gram, w, kappa, updates=3)
        assert (
            float(objective(gram, w, mixture(gram, w, kappa), kappa)) <= float(objective(gram, w, few, kappa)) + 1e-12
        )


def test_what_layers_do_not_count_cannot_be_frozen():
    with pytest.raises(
        ConfigError, match=r"algorithm\.buffers='frozen': the net's layers keep count of nothing: leave it out"
    ):
        build("omg", world("fedavg").task, CohortOptions(size=2), buffers="frozen")
