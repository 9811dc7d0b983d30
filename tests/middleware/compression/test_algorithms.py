"""Algorithms whose clients' messages pass transforms: whatever the algorithm, however clients are computed, whoever is heard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.middleware.compression.up import transformed
from fedfleet.middleware.trial import tried
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.author import (
    BatchPlan,
    CollectUploads,
    Encoding,
    LocalLoop,
    LocalWork,
    Message,
    Phase,
    Total,
    View,
)
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.policies import Siwer
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.cases import CASES, INVITE, MODEL
from tests.algorithms.harness import NET, Bowl, World, as_asked, build, digits, flat, play, records, rows
from tests.middleware.compression.test_transforms import made
from tests.parts import slow_but

OWED = {"name": "random_k", "share": 0.3, "error_feedback": True}
"""Sends what is drawn, not what is large: so that rounding, which differs a little, changes nothing of it."""
WITHOUT = {"fedbuff", "fedasync", "drfa", "afl"}  # late answers, and clients asked twice

SEVERAL = ("fedavg", "fedbuff", "fedpac", "fediir", "fact", "gt_hsgd", "drfa", "cdma_ada")
"""Of one slot, several, phases with states, without what is sent, of differences; the others do as these."""


def sending(algorithm: Algorithm, world: World, *names: Any) -> Algorithm:
    """The algorithm with transforms, as an experiment makes it."""
    world = as_asked(algorithm, world)
    setup = Setup.of(algorithm, world.task, world.population, "serial")
    return transformed(algorithm, made(*names), tried(algorithm, world.task.init(0), problem(world.population), setup))


def case(name: str) -> tuple[World, Algorithm]:
    task, options = CASES[name]
    world = digits(task, "quantity_skew", net={"model": MODEL[name]} if name in MODEL else NET, alpha=1.0, min_size=2)
    return world, build(name, world.task, CohortOptions(size=INVITE.get(name, 8)), **options)


def models(algorithm: Algorithm, world: World, rounds: int = 2, **options: Any) -> list[Tensor]:
    return [flat(z) for z in play(algorithm, world, rounds, policy=Siwer(), **options)]


@pytest.mark.parametrize("name", slow_but(SEVERAL, "fedbuff", "fact", "cdma_ada"))
def test_an_algorithm_is_the_same_one_client_at_a_time_and_many_at_once(name):
    world, algorithm = case(name)
    up = [{"name": "random_k", "share": 0.3}] if name in WITHOUT else [OWED]
    there = sending(algorithm, world, *up)
    one, many = (models(there, world, inner=inner) for inner in ("serial", "batched"))
    torch.testing.assert_close(one[-1], many[-1], rtol=2e-5, atol=2e-6)
    assert not torch.equal(one[-1], models(algorithm, world)[-1]), "what is sent is what it was"


UPS = {
    "top_k": [{"name": "top_k", "share": 0.2, "error_feedback": True}],
    "sign": [{"name": "sign", "error_feedback": True}],
    "turned": ["rotation", {"name": "uniform", "levels": 1 << 20}],
    "in a row": [OWED, {"name": "qsgd", "levels": 1 << 20}],
    "bf16": ["bf16"],
    "thin": [{"name": "low_rank", "rank": 1, "error_feedback": True}],
}


@pytest.mark.parametrize(
    ("name", "up"),
    [
        ("fedavg", "top_k"),
        ("scaffold", "sign"),
        ("cdma_ada", "turned"),
        ("omg", "in a row"),
        ("scaffold", "bf16"),
        ("fedavg", "thin"),
    ],
)
def test_factored_is_the_same_but_for_what_rounding_decides(name, up):
    """Which of two numbers is larger, or on which side of a level: of hardly any."""
    world, algorithm = case(name)
    there = sending(algorithm, world, *UPS[up])
    one, factored = (models(there, world, inner=inner)[-1] for inner in ("serial", "factored"))
    assert torch.isclose(one, factored, rtol=1e-3, atol=1e-4).double().mean() > 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    "up",
    [
        [{"name": "top_k", "share": 0.2, "error_feedback": True}, {"name": "qsgd", "levels": 3}],
        [{"name": "low_rank", "rank": 1, "error_feedback": True}],
    ],
)
def test_captured_to_the_bit(up):
    world = digits("classification", clients=40)
    algorithm = build("fedavg", world.task, CohortOptions(size=8), steps=1, batch_size=4)
    there = sending(algorithm, world, *up)
    captures = Captures(after=2)
    given = {"inner": "batched", "block_size": 8}
    found = [flat(play(there, world, 6, captures=c, **given)[-1]) for c in (Captures(None), captures)]
    assert captures.ready > 0
    assert torch.equal(*found)


@pytest.mark.parametrize("name", slow_but(["scaffold", "cdma_one", "omg", "fedpac"], "scaffold"))
def test_all_of_it_sent_is_what_the_algorithm_does(name):
    world, algorithm = case(name)
    for up in (
        [{"name": "top_k", "share": 1.0, "error_feedback": True}],
        ["rotation", {"name": "top_k", "share": 1.0}],
        [{"name": "random_k", "share": 1.0}],
    ):
        there = sending(algorithm, world, *up)
        torch.testing.assert_close(models(there, world)[-1], models(algorithm, world)[-1], rtol=1e-4, atol=1e-5)


def test_without_transforms_an_algorithm_is_itself_to_the_bit():
    world, algorithm = case("scaffold")
    assert torch.equal(models(sending(algorithm, world), world)[-1], models(algorithm, world)[-1])


CLIENTS, SIZE, KEPT = 6, 5, 2


def vectors() -> World:
    """Clients with three vectors each, of small whole numbers, so that sums are exact."""
    gen = torch.Generator().manual_seed(3)
    return World(Bowl(), rows(*torch.randint(-9, 10, (CLIENTS, 3, SIZE), generator=gen).tolist()))


def posting(reduce: Any, *uplink: Any) -> Algorithm:
    """An algorithm that collects what clients send: the sum of two of their vectors, drawn anew each round."""

    def begun(shared, client_state, client_input, key):
        return torch.zeros(SIZE, dtype=torch.float64)

    def step(ops, shared, carry, batch, at, key):
        return carry + (batch.x * batch.weight[:, None]).sum(0)

    def client_final(shared, client_state, client_input, carry):
        return Message(send={"v": carry, "whole": carry.long()}), client_state

    work = LocalWork(
        client_init=begun, loops=(LocalLoop(step=step, batches=BatchPlan(size=1, steps=2)),), client_final=client_final
    )
    phase = Phase(name="post", work=work, reduce={"v": reduce, "whole": CollectUploads()}, uplink=uplink)

    def round(state, rnd):
        found = rnd.map_reduce(phase, shared=Message(), cohort=rnd.invite(4))
        v = found["v"].stacked() if isinstance(reduce, CollectUploads) else found["v"]
        return {"clients": found.received, "sent": found["whole"].stacked(), "v": v}, {}

    nothing = torch.zeros(0)
    return Algorithm(
        lambda z, key, problem: {"clients": nothing, "sent": nothing, "v": nothing},
        round,
        (phase,),
        {"global": View(lambda state: {"x": {"w": torch.zeros(())}})},
    )


def largest(x: Tensor) -> Tensor:
    """What is sent of a vector: its largest numbers, of equal ones the first."""
    kept = torch.argsort(x.abs(), descending=True, stable=True)[:KEPT]
    return torch.zeros_like(x).scatter(0, kept, x[kept])


@pytest.mark.parametrize(("inner", "block"), [("serial", 4), ("batched", 3), ("factored", 1)])
@pytest.mark.parametrize("reduce", [Total(), CollectUploads()])
def test_a_client_owes_what_it_did_not_send_and_one_not_heard_owes_what_it_did(inner, block, reduce):
    """By hand, round by round: half of the clients are offline, and some rounds are aborted and begin again."""
    world = vectors()
    there = sending(posting(reduce), world, {"name": "top_k", "k": KEPT, "error_feedback": True})
    given = {"federation": Federation(availability=Bernoulli(0.5)), "min_responses": 2, "attempts": 50}
    owed = {c: torch.zeros(SIZE, dtype=torch.float64) for c in range(CLIENTS)}
    again, carried = 0, 0
    for record in records(there, world, 12, inner=inner, block_size=block, **given):
        again += len(record.phases) - 1
        sent = {}
        for c, v in zip(record.state["clients"].tolist(), record.state["sent"].double(), strict=True):
            carried += bool(owed[c].any())
            sent[c] = largest(v + owed[c])
            owed[c] = v + owed[c] - sent[c]
        came = torch.stack(list(sent.values()))
        assert torch.equal(record.state["v"], came if isinstance(reduce, CollectUploads) else came.sum(0))
        last = record.phases[-1]
        assert len(sent) == last.counts["completed"] < 4 or last.counts["unavailable"] == 0
        assert last.counts["floats_up"] == len(sent) * (KEPT + SIZE)  # whole numbers go as they are
        assert last.counts["bytes_up"] == len(sent) * (8 * KEPT + 1 + 8 * SIZE)  # five places, a bit each
    assert again > 0
    assert carried > 10


class Halved:
    """A transform of an algorithm's own."""

    error_feedback = False

    def encode(self, send, key, shared):
        return Encoding(T.scale(0.5, send), lambda rest: rest)


def test_configured_transforms_come_after_the_algorithms_own():
    world = vectors()
    there = sending(posting(CollectUploads(), Halved()), world, {"name": "top_k", "k": KEPT})
    for record in records(there, world, 2):
        assert torch.equal(record.state["v"], torch.stack([largest(v / 2) for v in record.state["sent"].double()]))


def test_memories_of_phases_and_slots_are_apart():
    world, algorithm = case("cdma_ada")
    there = sending(algorithm, world, {"name": "top_k", "share": 0.1, "error_feedback": True})
    made_of = [p.client_state({}) for p in there.phases if p.client_state]
    assert [T.structure(m) for m in made_of] == [T.structure(made_of[0])] * 2
    assert set(made_of[0].memory) == {"gradient", "update"}
    assert {slot for m in made_of[0].memory.values() for slot in m["0"]} == {"r", "z"}
    world, algorithm = case("scaffold")
    (phase,) = sending(algorithm, world, {"name": "sign", "error_feedback": True}).phases
    state = phase.client_state({"z": world.task.init(0)})
    assert set(state.memory["train"]["0"]) == {"dz", "dc"}
    assert not any(leaf.any() for leaf in T.leaves(state))
