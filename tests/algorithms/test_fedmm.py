"""FedMM: the quadratic game's limits, the round in its two forms, and the identities that hold exactly for any nets."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import Game, World, build, digits, flat, play, point, records, rows, script, xy

from fedfleet.algorithms import fedmm
from fedfleet.algorithms.local import Local, local_training, proximal
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Algorithm, View
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Mean
from fedfleet.simulator.driver import simulate
from fedfleet.simulator.driver.simulate import start
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.work import Message, Phase
from fedfleet.tasks.adaptation import AdaptationOptions, DomainAdaptation
from fedfleet.tasks.options import DataShape

CLIENTS = np.array([[1.0, 1, 1, 2, -1], [3, -0.5, 2, -4, 3]])
GAME = World(Game(), rows(*([tuple(c)] for c in CLIENTS)))
SADDLE = (20 / 49, 36 / 49)
STEP = {"batch_size": 1, "lr": 0.05}
ADAPTATION = digits("domain_adaptation")
INVITE = CohortOptions(size=9)
LOCAL = {"steps": 4, "batch_size": 7, "lr": 0.05}


def constant(eta3):
    return {"eta3": {"kind": "constant", "value": eta3}}


def slope(client, x, y):
    a, b, c, p, q = client
    return a * x + b * y + p, b * x - c * y + q


@pytest.fixture
def stores(monkeypatch):
    """The clients' states of runs that are started from now on, by client."""
    kept = []

    def started(*args, **given):
        kept.append(start(*args, **given))
        return kept[-1]

    monkeypatch.setattr(simulate, "start", started)

    def states(like, clients):
        return kept[-1].memory.store.get(torch.arange(clients), lambda: T.zeros_like(like))

    return states


# -- the quadratic game


def limit(states):
    """Where a linear recurrence with constants is going, from a few of its states, and its largest root.

    Differences d_t of the states satisfy sum_j c_j d_{t+j} = 0 with the recurrence's minimal polynomial c, and so do their
    distances from the limit (minimal polynomial extrapolation).
    """
    s = np.array(states)
    d = np.diff(s, axis=0)
    rank = np.linalg.matrix_rank(d, tol=1e-12 * np.abs(d).max())
    c = np.append(np.linalg.lstsq(d[:rank].T, -d[rank], rcond=None)[0], 1.0)
    return c @ s[: rank + 1] / c.sum(), np.abs(np.roots(c[::-1])).max()


def trace(stores, rounds=9, z=(0.0, 0.0), world=GAME, **options):
    """(omega_0, psi_0, lambda_1, lambda_2, beta_1, beta_2) before and after each round."""
    found = [(*z, 0.0, 0.0, 0.0, 0.0)]
    for r in records(build("fedmm", world.task, **STEP, **options), world, rounds, z=point(*z)):
        client_state = stores(r.state.z, 2)
        found.append((*xy(r.state.z), *client_state["x"]["x"].tolist(), *client_state["y"]["y"].tolist()))
    return found


@pytest.mark.parametrize("eta3", [1.0, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("steps", [1, 5, 20, 25, 100])
@pytest.mark.slow
def test_the_limit_is_the_saddle_of_the_mean_whatever_the_steps(stores, eta3, steps):
    want = (*SADDLE, -22 / 7, 22 / 7, -65 / 49, 65 / 49)
    found, root = limit(trace(stores, steps=steps, **constant(eta3)))
    assert found.tolist() == pytest.approx(want, abs=2e-5)
    assert root < 1


@pytest.mark.parametrize(("eta3", "rounds"), [(1.0, 60), (0.5, 90)])
@pytest.mark.slow
def test_rounds_come_to_the_limit(stores, eta3, rounds):
    found = trace(stores, rounds, steps=20, **constant(eta3))
    assert found[-1] == pytest.approx((*SADDLE, -22 / 7, 22 / 7, -65 / 49, 65 / 49), abs=1e-7)
    for after, want in (({1.0: (20, 9e-6), 0.5: (20, 4e-3)}[eta3]),):
        assert math.dist(found[after][:2], SADDLE) == pytest.approx(want, rel=0.2)


def test_a_small_extrapolation_is_slow():
    algorithm = build("fedmm", GAME.task, steps=20, **STEP, **constant(0.1))
    assert math.dist(xy(play(algorithm, GAME, 20, z=point(0, 0))[-1]), SADDLE) == pytest.approx(0.20, abs=0.01)


@pytest.mark.parametrize(("z", "want"), [((0, 0), (52 / 225, 68 / 225)), ((1, -2), (0.8, -0.8))])
@pytest.mark.slow
def test_without_extrapolation_the_limit_is_anchored_where_it_began(stores, z, want):
    """There grad f = -mu (z - z^0) for the minimising player, and mu (z - z^0) for the other."""
    found = trace(stores, 80, z=z, steps=20, **constant(0.0))[-1]
    assert found[:2] == pytest.approx(want, abs=1e-9)
    mean = CLIENTS.mean(0)
    assert slope(mean, *found[:2])[0] == pytest.approx(-2 * (found[0] - z[0]), abs=1e-8)
    assert slope(mean, *found[:2])[1] == pytest.approx(2 * (found[1] - z[1]), abs=1e-8)


@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("fedavg_sgda", {"steps": 1}, SADDLE),
        ("fedsgda", {}, SADDLE),
        ("fedavg_sgda", {"steps": 5}, (0.339166, 0.526870)),
        ("fedavg_sgda", {"steps": 20}, (0.296306, 0.044287)),
        ("fedprox_sgda", {"steps": 20}, (0.313242, 0.242793)),
    ],
)
@pytest.mark.slow
def test_where_the_others_come_to(name, options, want):
    rounds = 500 if options.get("steps", 1) == 1 else 120
    found = xy(play(build(name, GAME.task, **STEP, **options), GAME, rounds, z=point(0, 0))[-1])
    assert found == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_the_limit_of_plain_averaging_is_that_of_the_clients_affine_maps(steps):
    eta, total, shift = 0.05, np.zeros((2, 2)), np.zeros(2)
    for a, b, c, p, q in CLIENTS:
        j = np.eye(2) - eta * np.array([[a, b], [-b, c]])
        total += np.linalg.matrix_power(j, steps) / 2
        shift += sum(np.linalg.matrix_power(j, k) @ [-eta * p, eta * q] for k in range(steps)) / 2
    want = np.linalg.solve(np.eye(2) - total, shift)
    found = [xy(z) for z in play(build("fedavg_sgda", GAME.task, steps=steps, **STEP), GAME, 12, z=point(0, 0))]
    assert limit([(0.0, 0.0), *found])[0].tolist() == pytest.approx(want.tolist(), abs=1e-7)


# -- the round by hand, with two penalties, two rates, and whoever is heard


def by_hand(cohorts, clients, z, mu, eta, eta3, steps):
    """Section by section as the paper has it, with the mean dual at the server: models, mean duals, duals."""
    n = len(clients)
    duals, mean_dual, found = [(0.0, 0.0)] * n, (0.0, 0.0), []
    for t, cohort in enumerate(cohorts):
        ends = []
        for i in cohort:
            w, p = z
            lam, beta = duals[i]
            for _ in range(steps):
                gw, gp = slope(clients[i], w, p)
                w, p = (
                    w - eta[0] * (gw + mu[0] * (w - z[0]) + lam),
                    p + eta[1] * (gp - mu[1] * (p - z[1]) - beta),
                )
            duals[i] = (lam + mu[0] * (w - z[0]), beta + mu[1] * (p - z[1]))
            ends.append((w, p))
        mean_dual = tuple(
            d + sum(m * (e[k] - z[k]) for e in ends) / n for k, (d, m) in enumerate(zip(mean_dual, mu, strict=True))
        )
        z = tuple(sum(e[k] for e in ends) / len(ends) + eta3(t) / mu[k] * mean_dual[k] for k in range(2))
        found.append((z, mean_dual, list(duals)))
    return found


THREE = [*map(tuple, CLIENTS), (2.0, 0.3, 1.0, 1.0, 0.5)]


@pytest.mark.parametrize("inner", ["serial", "batched"])
@pytest.mark.parametrize("cohorts", [[[0, 1, 2]] * 5, [[0], [1, 2], [0, 2], [1], [0, 1, 2]]])
def test_rounds_by_hand(monkeypatch, stores, cohorts, inner):
    script(monkeypatch, cohorts)
    world = World(Game(), rows(*([c] for c in THREE)))
    options = {
        **{"steps": 3, "batch_size": 1, "lr": 0.06, "dual_lr": 0.04, "mu1": 0.7, "mu2": 1.9},
        "eta3": {"value": 0.8, "decay": 1.3, "per": 2},
    }
    expected = by_hand(cohorts, THREE, (1.0, -2.0), (0.7, 1.9), (0.06, 0.04), lambda t: 0.8 * 1.3 ** (-t / 2), 3)
    run = records(build("fedmm", world.task, **options), world, 5, z=point(1, -2), inner=inner)
    for t, (r, (z, mean_dual, duals)) in enumerate(zip(run, expected, strict=True)):
        assert xy(r.state.z) == pytest.approx(z, abs=1e-12)
        assert xy(r.state.dual) == pytest.approx(mean_dual, abs=1e-12)
        client_state = stores(r.state.z, 3)
        assert list(zip(client_state["x"]["x"].tolist(), client_state["y"]["y"].tolist(), strict=True)) == [
            pytest.approx(d, abs=1e-12) for d in duals
        ]
        assert r.metrics == {"eta3": pytest.approx(0.8 * 1.3 ** (-t / 2))}


def test_the_extrapolation_of_the_released_code():
    default = fedmm.Extrapolation()
    assert default.at(0) == 1.0
    assert default.at(150) == pytest.approx(1.05**-1.5)
    assert [fedmm.Extrapolation(decay=d).at(t) for d, t in ((1.05, 15_000), (1.02, 30_000), (1.01, 50_000))] == [
        pytest.approx(want, rel=0.02) for want in (6.6e-4, 2.6e-3, 6.9e-3)
    ]
    assert fedmm.Extrapolation(kind="constant", value=0.3).at(7) == 0.3


# -- the paper's own form, on nets with minibatches


def as_printed(options, task, cohort) -> Algorithm:
    """Algorithm 1: clients send their final point with the extrapolated dual folded in, the server takes the mean."""

    def direction(ops, shared, local, batch, at, key):
        d, _ = ops.grad("train", local.z, batch, key)
        return {p: T.add(proximal(d, local.z, shared["z"], shared["mu"])[p], local.client_state[p]) for p in d}

    def client_final(shared, client_state, client_input, local: Local):
        new = {p: T.axpy(shared["mu"][p], T.sub(local.z[p], shared["z"][p]), client_state[p]) for p in client_state}
        return Message(send={"z": {p: T.axpy(shared["eta3"] / shared["mu"][p], new[p], local.z[p]) for p in new}}), new

    work = local_training(options.plan(), direction, client_final=client_final)
    client_state = lambda shared: T.zeros_like(shared["z"])  # noqa: E731
    train = Phase(name="train", work=work, reduce={"z": Mean()}, client_state=client_state)

    def round_(z, rnd):
        config = {
            "lr": options.rates(rnd.index, task.parts),
            "mu": options.mu(task.parts),
            "eta3": options.eta3.at(rnd.index),
        }
        return rnd.map_reduce(train, shared=Message({"z": z}, config), cohort=rnd.invite(cohort.size))["z"], {}

    return Algorithm(lambda z, key, problem: z, round_, (train,), {"global": View(lambda z: z)}, requires=("x", "y"))


FEW = digits("domain_adaptation", clients=9)
EVERYONE = CohortOptions(size=9)
MU = {"mu1": 0.5, "mu2": 1.5, "eta3": {"decay": 2.0, "per": 3}}


@pytest.mark.parametrize("batch_size", [7, 10_000])
def test_with_all_clients_it_is_the_papers_algorithm(batch_size):
    options = {**LOCAL, **MU, "batch_size": batch_size}
    given = fedmm.FedMmOptions(**options)
    p = FEW.population
    exact = World(FEW.task, replace(p, data={**p.data, "x": p.data["x"].double()}))
    ours, printed = (
        play(algorithm, exact, 4, inner="batched", z=T.map(torch.Tensor.double, FEW.task.init(0)))
        for algorithm in (build("fedmm", FEW.task, EVERYONE, **options), as_printed(given, FEW.task, EVERYONE))
    )
    for a, b in zip(ours, printed, strict=True):
        torch.testing.assert_close(flat(a), flat(b), rtol=1e-10, atol=1e-12)


def test_the_mean_dual_grows_with_the_model_in_every_round(stores):
    """(1 + eta3) dual' = dual + mu (z' - z), where all are heard."""
    z = FEW.task.init(0)
    options = fedmm.FedMmOptions(**LOCAL, **MU)
    dual, mu = T.zeros_like(z), {"x": 0.5, "y": 1.5}
    for t, r in enumerate(records(build("fedmm", FEW.task, EVERYONE, **LOCAL, **MU), FEW, 5, inner="batched")):
        left = T.scale(1 + options.eta3.at(t), r.state.dual)
        right = T.axpy(mu, T.sub(r.state.z, z), dual)
        torch.testing.assert_close(flat(left), flat(right), rtol=1e-4, atol=1e-6)
        client_state = stores(z, 9)
        torch.testing.assert_close(
            flat(T.map(lambda v: v.mean(0), client_state)), flat(r.state.dual), rtol=1e-4, atol=1e-6
        )
        assert float(flat(client_state).abs().max()) > 3 * float(flat(r.state.dual).abs().max())
        z, dual = r.state.z, r.state.dual


def test_the_servers_dual_is_the_mean_of_all_clients_whoever_is_heard(stores):
    algorithm = build("fedmm", ADAPTATION.task, INVITE, **LOCAL, **MU)
    for r in records(algorithm, ADAPTATION, 5, policy=Siwer(), inner="batched"):
        client_state = stores(r.state.z, ADAPTATION.population.size)
        mean = T.map(lambda v: v.mean(0), client_state)
        torch.testing.assert_close(flat(mean), flat(r.state.dual), rtol=1e-4, atol=1e-6)


def test_the_first_round_goes_further_along_what_the_proximal_method_finds():
    z0 = flat(FEW.task.init(0))
    (prox,) = play(build("fedprox_sgda", FEW.task, EVERYONE, **LOCAL, mu1=0.5, mu2=1.5), FEW, 1, inner="batched")
    for eta3 in (1.0, 0.3):
        (ours,) = play(
            build("fedmm", FEW.task, EVERYONE, **LOCAL, mu1=0.5, mu2=1.5, **constant(eta3)), FEW, 1, inner="batched"
        )
        torch.testing.assert_close(flat(ours), z0 + (1 + eta3) * (flat(prox) - z0), rtol=1e-5, atol=1e-6)


# -- special cases, to the bit


def same(first, second, rounds=3):
    (a, given), (b, other) = first, second
    ours = play(build(a, ADAPTATION.task, INVITE, **given), ADAPTATION, rounds, inner="batched", policy=Siwer())
    theirs = play(build(b, ADAPTATION.task, INVITE, **other), ADAPTATION, rounds, inner="batched", policy=Siwer())
    return all(torch.equal(flat(x), flat(y)) for x, y in zip(ours, theirs, strict=True))


def test_with_duals_held_at_zero_it_is_the_proximal_method(monkeypatch):
    penalties = {"mu1": 0.5, "mu2": 1.5}
    given = (("fedmm", {**LOCAL, **penalties, **constant(0.0)}), ("fedprox_sgda", {**LOCAL, **penalties}))
    assert not same(*given)
    monkeypatch.setattr(
        fedmm, "send_and_renew", lambda s, client_state, i, local: (Message(send={"z": local.z}), client_state)
    )
    assert same(*given)


def test_without_penalties_either_it_is_plain_averaging():
    free = {"mu1": 0.0, "mu2": 0.0}
    assert same(("fedmm", {**LOCAL, **free, **constant(0.0)}), ("local_sgda", LOCAL))
    assert same(("fedprox_sgda", {**LOCAL, **free}), ("fedavg_sgda", LOCAL))
    assert not same(("fedprox_sgda", {**LOCAL, "mu1": 0.0, "mu2": 0.5}), ("fedavg_sgda", LOCAL))


def test_with_one_step_plain_averaging_is_descent_ascent_on_the_mean():
    once = {**LOCAL, "steps": 1}
    assert same(("fedmm", {**once, "mu1": 0.0, "mu2": 0.0, **constant(0.0)}), ("fedsgda", once))
    assert same(("fedprox_sgda", once), ("fedsgda", once))  # its term is zero at the first step


def test_proximal_parts_have_penalties_of_their_own():
    """One local step more than one: x - x_0 and y - y_0 are then pulled by mu1 and by mu2."""
    world = World(Game(), rows([THREE[0]]))
    alone = CohortOptions(size=1)
    options = {"steps": 2, "batch_size": 1, "lr": 0.1, "dual_lr": 0.2, "mu1": 0.5, "mu2": 3.0}
    found = xy(play(build("fedprox_sgda", world.task, alone, **options), world, 1, z=point(1, -2))[0])
    w, p = 1.0, -2.0
    for _ in range(2):
        gw, gp = slope(THREE[0], w, p)
        w, p = w - 0.1 * (gw + 0.5 * (w - 1)), p + 0.2 * (gp - 3 * (p + 2))
    assert found == pytest.approx((w, p), abs=1e-12)


# -- symmetries


def test_clients_alike_have_duals_alike_and_go_as_one_alone(stores):
    one, many = (World(Game(), rows(*[[THREE[0]]] * n)) for n in (1, 3))
    alone = play(build("fedmm", one.task, CohortOptions(size=1), steps=4, **STEP), one, 5)
    cohort = CohortOptions(size=3)
    for z, r in zip(alone, records(build("fedmm", many.task, cohort, steps=4, **STEP), many, 5), strict=True):
        client_state = stores(r.state.z, 3)
        assert bool((client_state["x"]["x"] == client_state["x"]["x"][0]).all())
        assert bool((client_state["y"]["y"] == client_state["y"]["y"][0]).all())
        assert xy(r.state.z) == pytest.approx(xy(z), abs=1e-12)


def test_the_order_of_clients_does_not_matter():
    orders = ([0, 1, 2], [2, 0, 1])
    ends = []
    for order in orders:
        world = World(Game(), rows(*([THREE[i]] for i in order)))
        ends.append(
            xy(play(build("fedmm", world.task, CohortOptions(size=3), steps=4, **STEP), world, 6, z=point(1, 2))[-1])
        )
    assert ends[0] == pytest.approx(ends[1], abs=1e-12)


def test_the_game_turned_round_is_played_in_the_mirror():
    """-f with the players exchanged: a <-> c, and the signs of b, p, q with the places of p and q turned."""
    mirrored = [(c, -b, a, -q, -p) for a, b, c, p, q in THREE]
    runs = []
    for clients, mu, lr, z in (
        (THREE, (0.5, 2.0), (0.05, 0.08), (1, -2)),
        (mirrored, (2.0, 0.5), (0.08, 0.05), (-2, 1)),
    ):
        world = World(Game(), rows(*([c] for c in clients)))
        given = {"steps": 3, "batch_size": 1, "lr": lr[0], "dual_lr": lr[1], "mu1": mu[0], "mu2": mu[1]}
        runs.append(
            [xy(v) for v in play(build("fedmm", world.task, CohortOptions(size=3), **given), world, 6, z=point(*z))]
        )
    for (x, y), (v, u) in zip(*runs, strict=True):
        assert (x, y) == pytest.approx((u, v), abs=1e-12)


class Counting(Game):
    """The game, and a buffer that counts gradients."""

    parts = ("x", "y", "b")

    def _loss(self, z, batch, ctx, key):
        return super()._loss(z, batch, ctx, key)[0], {"b": {"n": z["b"]["n"] + 1}}


COUNTED = {"fedmm": 3, "fedprox_sgda": 3, "gt_gda": 3, "gt_hsgd": 1}
"""Gradients a round at points that are kept."""


@pytest.mark.parametrize("name", COUNTED)
def test_buffers_are_averaged_and_have_no_duals(name):
    world, options = World(Counting(), GAME.population), {**STEP, "steps": COUNTED[name]}
    plain = play(build(name, GAME.task, **options), GAME, 4, z=point(0, 0))
    z = {**point(0, 0), "b": {"n": torch.tensor(0.0, dtype=torch.float64)}}
    algorithm = build(name, world.task, **options)
    assert algorithm.buffers
    for t, (a, b) in enumerate(zip(play(algorithm, world, 4, z=z), plain, strict=True), 1):
        assert float(a["b"]["n"]) == COUNTED[name] * t
        assert xy(a) == xy(b)


# -- what travels, and what is refused


def test_a_client_sends_and_is_sent_one_model():
    """DANN on images of 3 x 28 x 28: 522,792 floats, 2,091,168 bytes, each way."""
    p = FEW.population
    images = torch.nn.functional.interpolate(p.data["x"].repeat_interleave(3, 1), size=28)
    task = DomainAdaptation(AdaptationOptions(model="conv2"), DataShape((3, 28, 28), 10))
    world = World(task, replace(p, data={**p.data, "x": images}))
    algorithm = build("fedmm", task, CohortOptions(size=2), steps=1, batch_size=2, lr=1e-3)
    (r,) = records(algorithm, world, 1)
    counts = r.phases[0].counts
    assert counts["floats_up"] == counts["floats_down"] == 2 * 522_792
    assert counts["bytes_up"] == 2 * 2_091_168
    assert 0 < counts["bytes_down"] - 2 * 2_091_168 <= 2 * 4 * 8  # two rates and two penalties


def test_a_client_whose_values_are_not_finite_is_named():
    p = FEW.population
    x = p.data["x"].clone()
    x[p.indices[p.offsets[4]]] = math.nan
    world = World(FEW.task, replace(p, data={**p.data, "x": x}))
    algorithm = build("fedmm", world.task, EVERYONE, **{**LOCAL, "batch_size": 1000})
    with pytest.raises(ClientError, match="client 4, phase 'train': it sends a value that is not finite"):
        play(algorithm, world, 1)


def test_clients_without_labels_alone_train_on():
    world = World(FEW.task, FEW.population.withholding(torch.ones(len(FEW.population.data["y"]), dtype=torch.bool)))
    (z,) = play(build("fedmm", world.task, EVERYONE, **LOCAL), world, 1)
    assert bool(torch.isfinite(flat(z)).all())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mu1": 0}, "mu1=0: eta3 / mu1 is then infinite: raise it, or take local_sgda"),
        ({"mu2": 0, **constant(0.1)}, "mu2=0: eta3 / mu2 is then infinite"),
        ({"mu1": -1}, "mu1"),
        ({"eta3": {"value": 1.5}}, "eta3"),
        ({"eta3": {"decay": 0.9}}, "eta3"),
        ({"eta3": {"kind": "constant", "per": 7.0}}, "per=7.0 is not for kind=constant: leave it out"),
        ({"eta3": {"kind": "constant", "decay": 1.1}}, "decay=1.1 is not for kind=constant: leave it out"),
    ],
)
def test_options_without_meaning_are_refused(options, line):
    with pytest.raises(ValueError, match=line):
        build("fedmm", GAME.task, **STEP, **options)
