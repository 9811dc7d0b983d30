"""Clients that hide their examples: gradients by hand, how noise is spread, who has been heard how often, what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.privacy.gradients import Gradients, counted, private_examples
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.author import BatchPlan, LocalLoop, Phase
from fedfleet.simulator.driver.codec import decode, encode
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Federation, Outcome
from tests.algorithms.harness import Bowl, World, build, captured_to_the_bit, digits, flat, play, records, rows
from tests.middleware.compression.test_algorithms import case
from tests.parts import slow_but

BOWL = World(Bowl(), rows([(1, 4), (1, 1.5), (2, 0.8)], [(1, -1), (3, 2)]))
"""Of weights a and means m: from w = 1 the gradients are a (1 - m)."""


def private(
    algorithm: Algorithm, norm: float = 0.5, multiplier: float = 0.0, *, drawn: bool = False, **calls: int
) -> Algorithm:
    return private_examples(algorithm, Gradients(norm, multiplier, drawn, {(k, 0): n for k, n in calls.items()}))


def averaging(world: World = BOWL, **options: Any) -> Algorithm:
    given = {"lr": 1.0, "epochs": 1, "batch_size": 3, "weight": "uniform"}
    return build("fedavg", world.task, CohortOptions(size=2), **{**given, **options})


def asking(
    phase: Phase | None = None, draw: Any = lambda rnd: rnd.invite(2), steps: int | None = None, **options: Any
) -> Algorithm:
    """Averaging whose round is one exchange, of a phase and a cohort of its own."""
    algorithm = averaging(**options)
    asked = phase or algorithm.phases[0]

    def round(state, rnd):
        shared = algorithm.personal.message(state, 0)
        return state._replace(z=rnd.map_reduce(asked, shared=shared, cohort=draw(rnd), steps=steps)["z"]), {}

    return algorithm._replace(round=round, phases=(asked,))


def stepping(epochs: int = 1, **changes: Any) -> Phase:
    """The phase of averaging, with another stage."""
    phase = averaging(epochs=epochs).phases[0]
    return replace(phase, work=replace(phase.work, loops=(replace(phase.work.loops[0], **changes),)))


def w(z: Any) -> float:
    return float(z["x"]["w"])


def test_a_step_by_hand():
    """Gradients -3, -0.5 and 0.4 of the first client, and 2 and -3 of the second, each clipped to 0.5."""
    (z,) = play(private(averaging()), BOWL, 1)
    assert w(z) == pytest.approx(((1 + (0.5 + 0.5 - 0.4) / 3) + (1 + (-0.5 + 0.5) / 2)) / 2)
    (z,) = play(private(averaging(), norm=2.5), BOWL, 1)
    assert w(z) == pytest.approx(((1 + (2.5 + 0.5 - 0.4) / 3) + (1 + (-2 + 2.5) / 2)) / 2)


def test_a_drawn_batch_is_divided_by_what_it_has_on_average():
    """All of a client's examples where it has no more than a batch; nothing drawn is a step of noise alone."""
    (z,) = play(private(averaging(), drawn=True), BOWL, 1)
    assert w(z) == pytest.approx(((1 + 0.6 / 3) + 1) / 2)
    world = World(Bowl(), rows(*([[(1.0, 10.0)] * 8] * 40)))
    many = build("fedavg", world.task, CohortOptions(size=40), lr=1.0, steps=1, batch_size=2, weight="uniform")
    found = [w(z) - 1 for z in play(private(many, norm=1.0, drawn=True), world, 1)]
    assert 0 < found[0] != 1.0  # of eight with probability 1/4, over 2
    assert found[0] == pytest.approx(1.0, abs=5 * (8 * 0.25 * 0.75 / 4 / 40) ** 0.5)
    alone = World(Bowl(), rows([(1.0, 1e3)] * 8))
    one = build("fedavg", alone.task, CohortOptions(size=1), lr=1.0, steps=1, batch_size=2, weight="uniform")
    ends = [1.0, *(w(z) for z in play(private(one, norm=1.0, drawn=True), alone, 12))]
    steps = [2 * (after - before) for before, after in itertools.pairwise(ends)]  # a half of each that is drawn
    assert set(steps) > {1.0, 2.0, 3.0}
    assert set(steps) <= {*map(float, range(9))}
    (nothing,) = play(
        private(averaging(batch_size=1, steps=1, epochs=None), norm=1e-9, multiplier=1e9, drawn=True), BOWL, 1
    )
    assert w(nothing) != 1.0


@pytest.mark.parametrize(("drawn", "batch"), [(False, 4), (True, 2)])
def test_noise_is_of_the_norm_times_the_multiplier_over_the_batch(drawn, batch):
    """Of 4,000 clients that stand still but for it: over four, or over the two that are drawn of four on average."""
    size = 4000
    world = World(Bowl(), rows(*([[(1.0, 1.0)] * 4] * size)))
    many = build("fedavg", world.task, CohortOptions(size=size), lr=1.0, steps=1, batch_size=batch, weight="uniform")
    phase = many.phases[0]

    def round(state: Any, rnd: Any) -> Any:
        return state, {"end": float(rnd.map_reduce(phase, shared=many.personal.message(state, 0), cohort=rnd.invite(size))["z"]["x"]["w"])}  # noqa: E501  # fmt: skip

    there = private(many._replace(round=round), norm=0.5, multiplier=3.0, drawn=drawn)
    (record,) = records(there, world, 1, block_size=1000, inner="batched")
    std = 3.0 * 0.5 / batch / size**0.5
    assert 0 < abs(record.metrics["end"] - 1.0) < 5 * std
    # Each client's for itself: the mean of so many others is another number.
    more = [records(there, world, 1, block_size=1000, inner="batched", seed=s) for s in range(1, 25)]
    found = torch.tensor([next(r).metrics["end"] - 1.0 for r in more])
    assert float(found.std()) == pytest.approx(std, rel=0.5)


@pytest.mark.parametrize("drawn", slow_but([False, True], True))
@pytest.mark.parametrize(
    "name", slow_but(["fedavg", "scaffold", "cdma_ada", "fedprox", "gt_hsgd"], "fedavg", "cdma_ada")
)
def test_an_algorithm_is_the_same_one_client_at_a_time_and_many_at_once(name, drawn):
    world, algorithm = case(name)
    calls = {"cdma_ada": {"gradient": 2, "update": 2}, "gt_hsgd": {p.name: 2 for p in algorithm.phases}}.get(name, {})
    there = private(algorithm, 0.5, 0.8, drawn=drawn, **calls)
    given = {"federation": Federation(availability=Bernoulli(0.7))}
    one, many, factored = (flat(play(there, world, 2, inner=i, **given)[-1]) for i in ("serial", "batched", "factored"))
    torch.testing.assert_close(one, many, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(one, factored, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_captured_to_the_bit():
    world = digits("classification", clients=40)
    algorithm = build("fedavg", world.task, CohortOptions(size=8), steps=2, batch_size=4)
    captured_to_the_bit(private(algorithm, 0.5, 1.0, drawn=True), world)


def test_no_example_moves_a_client_by_more_than_its_share():
    """However far off it is."""
    ends = []
    for mean in (0.0, 1e6, -1e6):
        world = World(Bowl(), rows([(1, 4), (1, 1.5), (2, mean)], [(1, -1), (3, 2)]))
        ends.append(w(play(private(averaging(world), multiplier=0.3), world, 1)[-1]))
    assert max(ends) - min(ends) == pytest.approx(2 * 0.5 / 3 / 2)


def test_leaves_and_steps_have_noise_of_their_own():
    """Of a net whose gradients are zero: nothing but noise moves it."""
    world = digits("classification", clients=2, net={"model": "mlp", "hidden": (10,)})
    algorithm = build("fedavg", world.task, CohortOptions(size=1), lr=1.0, steps=1, batch_size=4)
    z = world.task.init(0)
    (end,) = play(private(algorithm, 1e-6, 1e6), world, 1, z=z)
    moved = {name: (a - b).flatten() for (name, a), (_, b) in zip(T.named_leaves(end), T.named_leaves(z), strict=True)}
    first, second = (moved[f"x.{i}.bias"] for i in (1, 3))
    assert len(first) == len(second) == 10
    assert not torch.allclose(first, second)
    assert 0.5 < float(torch.cat([first, second]).std() * 4) < 2.0


@pytest.mark.parametrize("drawn", [False, True])
def test_a_step_of_two_batches_is_never_drawn(drawn):
    world, algorithm = case("extra_step")
    there = private(algorithm, 0.5, 0.8, drawn=drawn, **{p.name: 2 for p in algorithm.phases})
    assert not any(stage.batches.drawn for p in there.phases for stage in p.work.loops)
    assert play(there, world, 1)


def test_a_client_heard_twice_in_an_exchange_is_counted_twice():
    drawing = asking(draw=lambda rnd: rnd.draw(5, lambda size, key: torch.tensor([1, 0, 1, 1, 0])))
    *_, last = records(private(drawing), BOWL, 2)
    answered = counted(last.state).phases["train"]
    assert dict(zip(answered.clients.tolist(), answered.times.tolist(), strict=True)) == {0: 4, 1: 6}


def test_two_gradients_of_a_step_have_noise_of_their_own():
    plan = BatchPlan(size=3, epochs=1, shuffle=False)
    phase = averaging().phases[0]

    def step(ops, shared, carry, batch, at, key):
        a, b = (ops.grad("train", carry.z, batch, key)[0]["x"]["w"] for _ in range(2))
        return carry._replace(z={"x": {"w": carry.z["x"]["w"] + (a - b)}})

    own = asking(replace(phase, work=replace(phase.work, loops=(LocalLoop(step=step, batches=plan),))))
    assert w(play(private(own, train=2), BOWL, 1)[0]) == 1.0
    assert w(play(private(own, multiplier=1.0, train=2), BOWL, 1)[0]) != 1.0
    with pytest.raises(ClientError, match="more gradients in a step"):
        play(private(own), BOWL, 1)


def test_exchanges_are_counted_by_client_and_phase_and_go_through_a_checkpoint():
    world, algorithm = case("cdma_ada")
    there = private(algorithm, gradient=2, update=2)
    heard: dict[str, dict[int, int]] = {p.name: {} for p in algorithm.phases}
    aborted = late = 0
    given = {"min_responses": 3, "attempts": 50}
    for record in records(
        there, world, 5, federation=Federation(availability=Bernoulli(0.5), policy=First(3)), **given
    ):
        for phase in record.phases:  # of aborted attempts, too
            aborted += phase.attempt < record.phases[-1].attempt
            late += phase.counts["late"]
            for c in phase.clients[phase.responses.outcome <= Outcome.LATE].tolist():
                heard[phase.phase][c] = heard[phase.phase].get(c, 0) + 1
    assert aborted > 0
    assert late > 0
    for state in (record.state, decode(*encode(record.state))):
        for name, answered in counted(state).phases.items():
            assert dict(zip(answered.clients.tolist(), answered.times.tolist(), strict=True)) == heard[name]
    assert max(heard["update"].values()) > 1


LOOKS = {
    "the loss of its examples": lambda ops, local, batch, key: ops.value("train", local.z, batch, key),
    "what the model says": lambda ops, local, batch, key: ops.apply("predict", local.z, batch),
    "own gradients": lambda ops, local, batch, key: ops.grads("train", local.z, batch, key),
    "looks at the loss of": lambda ops, local, batch, key: ops.grad("train", local.z, batch, key)[1]["loss"],
    "looks at the rows of": lambda ops, local, batch, key: ops.grad("train", local.z, batch, key)[1].get("rows"),
    "looks at the n of": lambda ops, local, batch, key: "n" in ops.grad("train", local.z, batch, key)[1],
    "looks at its examples": lambda ops, local, batch, key: batch.x,
    "counts the examples": lambda ops, local, batch, key: batch.count(),
}


def test_clients_see_of_their_examples_gradients_alone(subtests):
    for says, look in LOOKS.items():

        def step(ops, shared, local, batch, at, key, look=look):
            look(ops, local, batch, key)
            return local

        with subtests.test(says), pytest.raises(ClientError, match=says):
            play(private(asking(stepping(step=step)), drawn=True), BOWL, 1)


def test_the_number_of_rows_may_be_counted_where_it_is_no_secret():
    world, algorithm = case("gt_gda")  # a full gradient, in chunks
    assert play(private(algorithm, 0.5, 0.1, **{p.name: 2 for p in algorithm.phases}), world, 1)


def test_a_key_of_client_codes_own_leaves_the_noise_as_it_is():
    """Two steps with the same key, whose moves are far from alike all the same."""
    algorithm = averaging(epochs=2)
    phase = algorithm.phases[0]
    inner = phase.work.loops[0].step

    def step(ops, shared, local, batch, at, key):
        return inner(ops, shared, local, batch, at, rng.key(7))

    ends = [play(private(asking(p, epochs=2), multiplier=3.0), BOWL, 1) for p in (phase, stepping(epochs=2, step=step))]
    assert w(ends[0][0]) == w(ends[1][0])


def test_a_phase_comes_no_more_often_in_a_round_than_is_reckoned_with():
    algorithm = averaging()

    def round(state, rnd):
        for _ in range(2):
            state, _ = algorithm.round(state, rnd)
        return state, {}

    twice = algorithm._replace(round=round)
    with pytest.raises(FedfleetError, match="more often in a round"):
        play(private(twice), BOWL, 1)
    gradients = Gradients(0.5, 0.0, False, {}, {"train": 2})
    *_, last = records(private_examples(twice, gradients), BOWL, 2)
    assert counted(last.state).phases["train"].times.tolist() == [4, 4]


def test_examples_that_are_held_out_have_no_gradients():
    batches = replace(averaging().phases[0].work.loops[0].batches, held_out=True)
    world = World(Bowl(), rows([(1, 4)] * 8, [(1, -1)] * 8))
    with pytest.raises(ClientError, match="held out"):
        play(private(asking(stepping(batches=batches))), world, 1)


def test_other_numbers_of_steps_are_refused():
    with pytest.raises(FedfleetError, match="other numbers of steps"):
        play(private(asking(steps=3)), BOWL, 1)
