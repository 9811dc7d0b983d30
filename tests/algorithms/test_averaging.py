"""FedAvg, FedOpt, FedProx, SCAFFOLD: golden rounds, limits, and what each is for."""

import math
import re

import pytest
import torch
from harness import Bowl, World, build, digits, flat, play, records, rows, script

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import tree as T

# (a, m): clients pull to -2 and 4 with curvatures 1 and 3; the mean objective is lowest at (1 * -2 + 3 * 4) / 4 = 2.5
PULL = World(Bowl(), rows([(1.0, -2.0)], [(3.0, 4.0)]))
OPTIMUM = 2.5
TWO = {"steps": 2, "batch_size": 1, "lr": 0.1}
DIGITS = digits("classification", clients=20)


def w(z) -> float:
    return float(z["x"]["w"])


def local(z: float, a: float, m: float, mu: float = 0.0) -> float:
    start = z
    for _ in range(2):
        z -= 0.1 * (a * (z - m) + mu * (z - start))
    return z


def test_fedavg_averages_two_local_steps():
    found = [w(z) for z in play(build("fedavg", PULL.task, **TWO), PULL, 2)]
    first = (local(1, 1, -2) + local(1, 3, 4)) / 2
    assert found == pytest.approx([first, (local(first, 1, -2) + local(first, 3, 4)) / 2], abs=1e-12)


def test_fedavg_weighs_clients_by_their_examples_unless_told_otherwise():
    uneven = World(Bowl(), rows([(1.0, -2.0)] * 3, [(3.0, 4.0)]))
    ends = local(1, 1, -2), local(1, 3, 4)
    by_size = w(play(build("fedavg", uneven.task, **TWO), uneven, 1)[0])
    alike = w(play(build("fedavg", uneven.task, weight="uniform", **TWO), uneven, 1)[0])
    assert by_size == pytest.approx(0.75 * ends[0] + 0.25 * ends[1], abs=1e-12)
    assert alike == pytest.approx(0.5 * ends[0] + 0.5 * ends[1], abs=1e-12)


def test_server_momentum_is_fedavgm():
    found = [w(z) for z in play(build("fedavg", PULL.task, server_optimizer={"momentum": 0.9}, **TWO), PULL, 2)]
    first = (local(1, 1, -2) + local(1, 3, 4)) / 2
    delta = (local(first, 1, -2) + local(first, 3, 4)) / 2 - first
    assert found == pytest.approx([first, first + 0.9 * (first - 1) + delta], abs=1e-12)


SECOND_MOMENTS = {
    "adagrad": lambda v, d: v + d**2,
    "adam": lambda v, d: 0.99 * v + 0.01 * d**2,
    "yogi": lambda v, d: v - 0.01 * d**2 * math.copysign(1, v - d**2),
}


@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_fedopt_takes_the_steps_of_reddi_et_al(name):
    """Algorithm 2, from v_{-1} = tau^2; a small tau would hide where v starts."""
    given = {"name": name, "lr": 0.1, "eps": 0.5, "beta1": 0.8}
    found = [w(z) for z in play(build("fedopt", PULL.task, server_optimizer=given, **TWO), PULL, 3)]
    z, m, v, expected = 1.0, 0.0, 0.25, []
    for _ in range(3):
        delta = (local(z, 1, -2) + local(z, 3, 4)) / 2 - z
        m, v = 0.8 * m + 0.2 * delta, SECOND_MOMENTS[name](v, delta)
        z += 0.1 * m / (v**0.5 + 0.5)
        expected.append(z)
    assert found == pytest.approx(expected, abs=1e-12)


def test_fedopt_is_fedadam_unless_told_otherwise():
    a, b = (play(build("fedopt", PULL.task, **given, **TWO), PULL, 2)[-1] for given in ({}, {"server_optimizer": ADAM}))
    assert w(a) == w(b)


ADAM = {"name": "adam", "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"server_optimizer": {"name": "adam", "momentum": 0.9}},
            "momentum=0.9 is not for adam: leave it out (options of adam: beta1, beta2, eps)",
        ),
        (
            {"server_optimizer": {"name": "adagrad", "beta2": 0.9}},
            "beta2=0.9 is not for adagrad: leave it out (options of adagrad: beta1, eps)",
        ),
        ({"server_optimizer": {"eps": 0.1}}, "eps=0.1 is not for sgd: leave it out (options of sgd: momentum)"),
        (
            {"client_optimizer": {"beta1": 0.5}},
            "beta1=0.5 is not for sgd: leave it out (options of sgd: momentum, nesterov)",
        ),
        ({"client_optimizer": {"name": "adam", "nesterov": True}}, "nesterov=True is not for adam"),
        (
            {"client_optimizer": {"name": "adagrad", "beta1": 0.5}},
            "beta1=0.5 is not for adagrad: leave it out (options of adagrad: eps)",
        ),
        ({"client_optimizer": {"nesterov": True}}, "nesterov looks ahead along momentum: set momentum"),
    ],
)
def test_options_that_an_optimiser_does_not_have_are_refused(given, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        build("fedavg", PULL.task, **given)


def test_fedprox_holds_clients_back():
    found = w(play(build("fedprox", PULL.task, mu=2.0, **TWO), PULL, 1)[0])
    assert found == pytest.approx((local(1, 1, -2, 2.0) + local(1, 3, 4, 2.0)) / 2, abs=1e-12)


def test_fedprox_without_its_term_is_fedavg_bit_for_bit():
    options = {"epochs": 1, "batch_size": 10, "client_optimizer": {"momentum": 0.5}}
    a, b = (
        play(build(name, DIGITS.task, **options, **extra), DIGITS, 3, inner="batched")
        for name, extra in (("fedavg", {}), ("fedprox", {"mu": 0}))
    )
    assert torch.equal(flat(a[-1]), flat(b[-1]))


def test_one_client_is_centralised_sgd_with_momentum():
    alone = digits("classification", "iid", clients=1)
    options = {"steps": 1, "batch_size": alone.population.indices.numel(), "client_optimizer": {"weight_decay": 0.1}}
    found = play(build("fedavg", alone.task, CohortOptions(size=1), lr=0.2, **options), alone, 5)[-1]
    z = T.map(lambda v: v.clone().requires_grad_(), alone.task.init(0))
    optimizer = torch.optim.SGD(T.leaves(z), lr=0.2, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            alone.task.logits(z, alone.population.data["x"]), alone.population.data["y"]
        ).backward()
        optimizer.step()
    torch.testing.assert_close(flat(found), flat(T.map(torch.detach, z)), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_scaffold_finds_the_optimum_that_fedavg_misses():
    ends = {name: w(play(build(name, PULL.task, **TWO), PULL, 300)[-1]) for name in ("fedavg", "scaffold")}
    assert ends["scaffold"] == pytest.approx(OPTIMUM, abs=1e-6)
    assert abs(ends["fedavg"] - OPTIMUM) > 0.05


def test_scaffold_starts_as_fedavg():
    a, b = (flat(play(build(n, PULL.task, **TWO), PULL, 1)[0]) for n in ("fedavg", "scaffold"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_scaffold_second_round_by_hand():
    # control variates after round 1: c_i = (x - y_i) / (K lr); c is their mean
    ends = local(1, 1, -2), local(1, 3, 4)
    control = [(1 - e) / 0.2 for e in ends]
    c, x = sum(control) / 2, sum(ends) / 2
    second = []
    for (a, m), c_i in zip(((1, -2), (3, 4)), control, strict=True):
        y = x
        for _ in range(2):
            y -= 0.1 * (a * (y - m) - c_i + c)
        second.append(y)
    states = [r.state for r in records(build("scaffold", PULL.task, **TWO), PULL, 2)]
    assert w(states[1].z) == pytest.approx(sum(second) / 2, abs=1e-12)
    assert w(states[0].c) == pytest.approx(c, abs=1e-12)


THREE = World(Bowl(), rows([(1.0, -2.0)] * 3, [(3.0, 4.0)] * 5, [(2.0, 1.0)]))


@pytest.mark.parametrize("weight", ["uniform", "num_examples"])
def test_scaffold_weighs_clients_by_hand_under_partial_participation(monkeypatch, weight):
    cohorts = [[0, 1], [2], [1, 2], [0]]
    script(monkeypatch, cohorts)
    curves, sizes = [(1, -2), (3, 4), (2, 1)], [3, 5, 1] if weight == "num_examples" else [1, 1, 1]
    x, c, client_state, expected = 1.0, 0.0, [0.0] * 3, []
    for cohort in cohorts:
        ends = {}
        for i in cohort:
            y, (a, m) = x, curves[i]
            for _ in range(2):
                y -= 0.1 * (a * (y - m) - client_state[i] + c)
            ends[i] = y
        for i, y in ends.items():
            client_state[i] += (x - y) / 0.2 - c
        x += 0.7 * sum(sizes[i] * (y - x) for i, y in ends.items()) / sum(sizes[i] for i in cohort)
        c = sum(s * o for s, o in zip(sizes, client_state, strict=True)) / sum(
            sizes
        )  # of all clients, whoever was heard
        expected.append((x, c))
    scaffold = build("scaffold", THREE.task, weight=weight, global_lr=0.7, **TWO)
    found = [(w(r.state.z), w(r.state.c)) for r in records(scaffold, THREE, 4)]
    assert found == [pytest.approx(want, abs=1e-12) for want in expected]


def test_scaffold_corrects_outside_momentum_and_decay_by_hand():
    """The variates are of the steps really taken, momentum in them, as in Li et al.'s benchmark (ICDE 2022)."""
    x, c, own, expected = 1.0, 0.0, [0.0, 0.0], []
    for _ in range(3):
        ends = []
        for (a, m), c_i in zip(((1, -2), (3, 4)), own, strict=True):
            y, v = x, 0.0
            for _ in range(2):
                v = 0.9 * v + a * (y - m) + 0.2 * y
                y -= 0.1 * (v - c_i + c)
            ends.append(y)
        own = [c_i + (x - y) / 0.2 - c for c_i, y in zip(own, ends, strict=True)]
        x, c = sum(ends) / 2, sum(own) / 2
        expected.append((x, c))
    options = {"client_optimizer": {"momentum": 0.9, "weight_decay": 0.2}, **TWO}
    found = [(w(r.state.z), w(r.state.c)) for r in records(build("scaffold", PULL.task, **options), PULL, 3)]
    assert found == [pytest.approx(want, abs=1e-12) for want in expected]


def test_scaffold_sends_two_vectors_each_way():
    d = len(flat(DIGITS.task.init(0)))
    for r in records(build("scaffold", DIGITS.task, CohortOptions(size=5), epochs=1), DIGITS, 2, inner="batched"):
        assert r.phases[0].counts["floats_up"] == r.phases[0].counts["floats_down"] == 5 * 2 * d


def test_learning_rate_schedules():
    from fedfleet.algorithms.options import Schedule

    assert Schedule().at(7) == 1
    assert Schedule(kind="power", exponent=0.5).at(3) == 0.5
    assert Schedule(kind="power", exponent=0.5, over=10).at(30) == 0.5
    assert [Schedule(kind="step", every=2, factor=0.1).at(t) for t in (1, 2, 4)] == pytest.approx([1, 0.1, 0.01])
    assert [Schedule(kind="cosine", rounds=10).at(t) for t in (0, 5, 10, 20)] == pytest.approx([1, 0.5, 0, 0])
    lifted = Schedule(kind="cosine", rounds=10, floor=0.2)
    assert [lifted.at(t) for t in (0, 5, 10, 20)] == pytest.approx([1, 0.6, 0.2, 0.2])
    with pytest.raises(ValueError, match="a cosine needs rounds"):
        Schedule(kind="cosine").at(0)
    slowed = build("fedavg", PULL.task, lr_schedule={"kind": "step", "every": 1, "factor": 0.5}, **TWO)
    first, second = (w(z) for z in play(slowed, PULL, 2))
    half = [first - 0.05 * (first + 2), first - 0.05 * 3 * (first - 4)]
    half = [half[0] - 0.05 * (half[0] + 2), half[1] - 0.05 * 3 * (half[1] - 4)]
    assert second == pytest.approx(sum(half) / 2, abs=1e-12)
