"""Algorithms of a user: stored uploads, uplink transforms, client inputs, client scalars as weights, random K."""

import pytest
import torch
from harness import Bowl, World, build, flat, play, records, rows

from fedfleet.algorithms.local import local_training
from fedfleet.simulator.author import (
    Algorithm,
    BatchPlan,
    ByDomainMean,
    CollectUploads,
    Encoding,
    LocalWork,
    Mean,
    Message,
    Phase,
    T,
    Total,
    View,
    rng,
)
from fedfleet.simulator.block.side_effects import Impure
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation

PULLS = [-2.0, 4.0, 0.5, 100.0, 3.0]
WORLD = World(Bowl(), rows(*([(1.0, m)] for m in PULLS)))
STEP = BatchPlan(size=1, steps=1)
STARTS_AT = 1.0


def algorithm(phase: Phase, server, *, client_input=None, steps=None) -> Algorithm:
    def round_(z, rnd):
        shared = Message(send={"z": z}, config={"lr": {"x": 0.5}})
        cohort = rnd.invite(len(PULLS))
        mail = None if client_input is None else client_input(cohort)
        return server(z, rnd.map_reduce(phase, shared=shared, cohort=cohort, client_input=mail, steps=steps)), {}

    return Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)})


def w(z) -> float:
    return float(z["x"]["w"])


@pytest.mark.parametrize("inner", ["serial", "batched"])
def test_a_robust_server_ignores_the_outlier(inner):
    phase = Phase(name="train", work=local_training(STEP), reduce={"z": CollectUploads()})
    ends = sorted(STARTS_AT - 0.5 * (STARTS_AT - m) for m in PULLS)
    for aggregate, want in (
        (lambda s: s.median(), ends[2]),
        (lambda s: s.trimmed_mean(0.2), sum(ends[1:4]) / 3),
        (lambda s: s.mean(), sum(ends) / 5),
    ):
        found = play(algorithm(phase, lambda z, r, f=aggregate: f(r["z"])), WORLD, 1, inner=inner, block_size=2)
        assert w(found[0]) == pytest.approx(want, abs=1e-12)
    krum = play(algorithm(phase, lambda z, r: r["z"].krum(1)), WORLD, 1, inner=inner, block_size=2)
    assert w(krum[0]) in [pytest.approx(e) for e in ends[:-1]]


class Clip:
    error_feedback = False

    def encode(self, send, key, shared):
        return Encoding(T.map(lambda v: v.clamp(max=1.0), send), lambda residual: residual)


class Noise:
    error_feedback = False

    def encode(self, send, key, shared):
        return Encoding(
            T.map(lambda v: v + rng.uniform(key, (), torch.float64) * 1e-3, send), lambda residual: residual
        )


def test_uplink_transforms_change_what_arrives_of_the_difference_and_only_that():
    clipped = Phase(name="train", work=local_training(STEP), reduce={"z": Mean()}, uplink=(Clip(),))
    ends = [STARTS_AT + min(1.0, -0.5 * (STARTS_AT - m)) for m in PULLS]
    assert w(play(algorithm(clipped, lambda z, r: r["z"]), WORLD, 1)[0]) == pytest.approx(sum(ends) / 5, abs=1e-12)
    noisy = Phase(name="train", work=local_training(STEP), reduce={"z": Mean()}, uplink=(Clip(), Noise()))
    a, b = (play(algorithm(noisy, lambda z, r: r["z"]), WORLD, 1, inner=i)[0] for i in ("serial", "batched"))
    assert w(a) == pytest.approx(w(b), abs=1e-12)
    assert 0 < w(a) - sum(ends) / 5 < 1e-3


def test_a_mailbox_brings_each_client_its_own():
    def client_final(shared, client_state, client_input, carry):
        return Message(send={"back": {"v": client_input["v"] * 2}}), client_state

    work = LocalWork(
        client_init=lambda shared, client_state, client_input, key: (), loops=(), client_final=client_final
    )
    phase = Phase(name="post", work=work, reduce={"back": Total()})
    one = algorithm(
        phase, lambda z, r: {"x": {"w": r["back"]["v"]}}, client_input=lambda c: {"v": c.clients.double() + 1}
    )
    (record,) = records(one, WORLD, 1, inner="batched", block_size=2)
    assert w(record.state) == 2 * (1 + 2 + 3 + 4 + 5)
    assert record.phases[0].counts["floats_down"] == 5 * (1 + 1)  # z and one float of mail each
    assert record.phases[0].train_loss is None


def test_clients_may_say_their_own_weight_and_domains_are_averaged_apart():
    def client_final(shared, client_state, client_input, carry):
        return Message(
            send={"z": carry.z, "seen": carry.z}, config={"trust": (carry.z["x"]["w"] < 10).double()}
        ), client_state

    work = local_training(STEP, client_final=client_final)
    phase = Phase(name="train", work=work, reduce={"z": Mean(), "seen": ByDomainMean()}, weight="trust")
    population = WORLD.population.__class__(
        WORLD.population.data, WORLD.population.indices, WORLD.population.offsets, torch.tensor([0, 7, 0, 7, 7])
    )
    seen = {}

    def server(z, r):
        seen.update(zip(r["seen"].domain.tolist(), r["seen"].value["x"]["w"].tolist(), strict=True))
        return r["z"]

    ends = [STARTS_AT - 0.5 * (STARTS_AT - m) for m in PULLS]
    found = play(algorithm(phase, server), World(WORLD.task, population), 1, inner="batched", block_size=2)
    assert w(found[0]) == pytest.approx(sum(e for e in ends if e < 10) / 4)
    assert seen == pytest.approx({0: (ends[0] + ends[2]) / 2, 7: (ends[1] + ends[4]) / 2})


def test_the_number_of_steps_can_be_drawn_each_round():
    phase = Phase(name="train", work=local_training(STEP), reduce={"z": Mean()})
    (record,) = records(algorithm(phase, lambda z, r: r["z"], steps=3), WORLD, 1, inner="batched")
    ends = [m + (STARTS_AT - m) * 0.5**3 for m in PULLS]
    assert w(record.state) == pytest.approx(sum(ends) / 5)
    assert record.phases[0].counts["client_steps"] == 15


def test_cohorts_with_replacement_run_a_client_once_a_copy():
    phase = Phase(name="train", work=local_training(STEP), reduce={"z": Mean()})

    def round_(z, rnd):
        cohort = rnd.invite(40, replace=True)
        assert sorted(cohort.copies[cohort.clients == cohort.clients[0]].tolist())[:2] == [0, 1]
        return rnd.map_reduce(phase, shared=Message(send={"z": z}, config={"lr": {"x": 0.5}}), cohort=cohort)["z"], {}

    one = Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)})
    (record,) = records(one, WORLD, 1, inner="batched", block_size=16)
    assert record.phases[0].counts["completed"] == 40


def test_algorithms_do_not_see_each_other():
    first = flat(play(build("fedavg", WORLD.task, steps=1, batch_size=1), WORLD, 1)[0])
    play(build("scaffold", WORLD.task, steps=1, batch_size=1), WORLD, 1)
    assert torch.equal(first, flat(play(build("fedavg", WORLD.task, steps=1, batch_size=1), WORLD, 1)[0]))


def test_a_void_attempt_leaves_nothing_in_the_model():
    """Neither in its tensors nor in the mapping that holds them."""

    def trained(s, rnd, phase):
        shared = Message(send={"z": s["z"]}, config={"lr": {"x": 0.5}})
        return rnd.map_reduce(phase, shared=shared, cohort=rnd.invite(2))["z"]

    def in_place(s, rnd, first, second):
        s["z"] = trained(s, rnd, first)
        return {"z": trained(s, rnd, second)}, {}

    def anew(s, rnd, first, second):
        return {"z": trained({"z": trained(s, rnd, first)}, rnd, second)}, {}

    work = local_training(STEP)
    phases = tuple(Phase(name=name, work=work, reduce={"z": Mean()}) for name in ("first", "second"))
    made = {
        f: Algorithm(
            lambda z, key, problem: {"z": z},
            lambda s, rnd, f=f: f(s, rnd, *phases),
            phases,
            {"global": View(lambda s: s["z"])},
        )
        for f in (in_place, anew)
    }
    given = {"seed": 1, "min_responses": 2, "attempts": 20, "federation": Federation(availability=Bernoulli(0.6))}
    (record,) = records(made[anew], WORLD, 1, **given)
    assert {"second"} < {p.phase for p in record.phases if p.attempt < record.phases[-1].attempt}  # which was aborted
    with pytest.raises(Impure, match="the algorithm's round changed 'z'"):
        list(records(made[in_place], WORLD, 1, **given))
