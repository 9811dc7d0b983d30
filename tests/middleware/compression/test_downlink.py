"""Transforms on the way down, with any algorithm, in every executor, whoever completes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfleet.middleware.compression.down import downward
from fedfleet.simulator.algorithm import Algorithm, Buffer
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.author import BatchPlan, CollectUploads, LocalLoop, LocalWork, Mean, Message, Phase, View
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.driver.codec import decode, encode
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.fleet.responses import Federation, Outcome
from tests.algorithms.harness import Bowl, World, digits, flat, play, records, rows
from tests.middleware.compression.test_algorithms import SEVERAL, case, largest, models, sending
from tests.middleware.compression.test_transforms import made
from tests.parts import slow_but

TOP = {"name": "random_k", "share": 0.3, "unbiased": False}
"""Drawn, not large: so that rounding, which differs a little, decides nothing."""


@pytest.mark.parametrize("name", slow_but(SEVERAL, "fedbuff", "fact", "cdma_ada"))
def test_an_algorithm_is_the_same_one_client_at_a_time_and_many_at_once(name):
    world, algorithm = case(name)
    late = algorithm.asynchronous is not None
    there = downward(algorithm, made("bf16" if late else TOP), memory=not late)
    one, many = (models(there, world, rounds=3, inner=inner)[-1] for inner in ("serial", "batched"))
    torch.testing.assert_close(one, many, rtol=2e-5, atol=2e-6)
    assert not torch.equal(one, models(algorithm, world, rounds=3)[-1]), "what is sent is what it was"


@pytest.mark.parametrize("name", ["scaffold", "omg", "cdma_ada"])
def test_factored_is_the_same(name):
    world, algorithm = case(name)
    there = sending(downward(algorithm, made(TOP), memory=True), world, {"name": "random_k", "share": 0.5})
    one, factored = (models(there, world, rounds=3, inner=inner)[-1] for inner in ("serial", "factored"))
    torch.testing.assert_close(one, factored, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", slow_but(["scaffold", "cdma_ada", "omg", "fedpac", "drfa"], "scaffold", "drfa"))
@pytest.mark.parametrize("memory", [False, True])
def test_all_of_it_sent_is_what_the_algorithm_does(name, memory):
    world, algorithm = case(name)
    all_of_it = made("rotation", {"name": "top_k", "share": 1.0})
    there = models(downward(algorithm, all_of_it, memory=memory), world, rounds=3)
    torch.testing.assert_close(there[-1], models(algorithm, world, rounds=3)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_captured_to_the_bit():
    world = digits("classification", clients=40)
    there = downward(case("fedavg")[1], made({"name": "top_k", "share": 0.2}), memory=True)
    captures = Captures(after=2)
    given = {"inner": "batched", "block_size": 8}
    found = [flat(play(there, world, 6, captures=c, **given)[-1]) for c in (Captures(None), captures)]
    assert captures.ready > 0
    assert torch.equal(*found)


CLIENTS, SIZE, KEPT, WHOLE = 6, 5, 2, 3
"""``WHOLE`` numbers are no floats, and go as they are."""
EACH = 8 * KEPT + 1  # bytes: two float64, and five places of a bit each


def vectors() -> World:
    return World(Bowl(), rows(*[[[float(c)]] for c in range(CLIENTS)]))


def moving(reduce: Any) -> Algorithm:
    """A server with a vector of whole numbers, which clients move, each by steps of its own, from what they were sent."""

    def begun(shared, client_state, client_input, key):
        return shared["z"]["v"] + shared["by"]

    def step(ops, shared, carry, batch, at, key):
        return carry + torch.arange(SIZE) * (batch.x * batch.weight[:, None]).sum()

    def client_final(shared, client_state, client_input, carry):
        return Message(send={"z": {"v": carry, "n": shared["z"]["n"]}, "seen": shared["z"]["v"]}), client_state

    work = LocalWork(
        client_init=begun, loops=(LocalLoop(step=step, batches=BatchPlan(size=1, steps=1)),), client_final=client_final
    )
    phase = Phase(name="move", work=work, reduce={"z": reduce, "seen": CollectUploads()})

    def round(state, rnd):
        z = {"v": state["v"] + 100.0 * torch.randn(SIZE, generator=torch.Generator().manual_seed(rnd.index)).round(),
             "n": torch.arange(WHOLE)}  # fmt: skip
        found = rnd.map_reduce(
            phase, shared=Message(send={"z": z}, config={"by": 1.0, "of": 2.0}), cohort=rnd.invite(4)
        )
        came = found["z"].stacked()["v"] if isinstance(reduce, CollectUploads) else found["z"]["v"]
        seen = found["seen"].stacked()
        v = came.mean(0).round() if isinstance(reduce, CollectUploads) else came.round()
        return {"v": v, "sent": z["v"], "clients": found.received, "seen": seen, "came": came}, {}

    nothing = torch.zeros(0)
    return Algorithm(
        lambda z, key, problem: {"v": torch.zeros(SIZE, dtype=torch.float64), **dict.fromkeys(("sent", "clients", "seen", "came"), nothing)},  # noqa: E501
        round,
        (phase,),
        {"global": View(lambda state: {"x": {"w": torch.zeros(())}})},
    )  # fmt: skip


@dataclass
class Told:
    """Devices that note how many bytes they were told they are sent."""

    bytes_down: list[Tensor] = field(default_factory=list)

    def times(self, key: Any, clients: Tensor, load: Load) -> Times:
        self.bytes_down.append(torch.as_tensor(load.bytes_down).expand(len(clients)))
        return Times(torch.ones(len(clients), dtype=torch.float64), torch.zeros(len(clients), dtype=torch.float64))


@pytest.mark.parametrize(("inner", "block"), [("serial", 4), ("batched", 3), ("factored", 1)])
@pytest.mark.parametrize("reduce", [Mean(), CollectUploads()])
def test_clients_have_what_differences_come_to_and_what_they_missed_is_sent_and_counted(inner, block, reduce):
    """By hand, round by round: half of the clients are offline, and some rounds are aborted and begin again."""
    devices = Told()
    there = downward(moving(reduce), made({"name": "top_k", "k": KEPT}), memory=True)
    given = {
        "federation": Federation(availability=Bernoulli(0.5), devices=devices),
        "min_responses": 2,
        "attempts": 50,
    }
    y: Tensor | None = None
    since: dict[int, int] = {}  # client -> the exchange that it answered last
    again = wholly = few = 0
    for t, record in enumerate(records(there, vectors(), 25, inner=inner, block_size=block, **given)):
        again += len(record.phases) - 1
        state = record.state.state
        sent, clients = state["sent"], state["clients"].tolist()
        y = sent if y is None else y + largest(sent - y)
        assert torch.equal(state["seen"], y.expand(len(clients), SIZE))
        moved = torch.stack([1.0 + torch.arange(SIZE) * float(c) for c in clients])
        came = sent + moved  # what clients moved by counts from the server's own
        torch.testing.assert_close(state["came"], came if isinstance(reduce, CollectUploads) else came.mean(0))
        told = devices.bytes_down[-len(record.phases) :]
        for phase, bytes_down in zip(record.phases, told, strict=True):
            expected = []
            for c in phase.clients.tolist():
                missed = t - since[c] if c in since else SIZE
                whole = missed * EACH >= 8 * SIZE
                wholly, few = wholly + whole, few + (not whole and missed > 1)
                expected.append((SIZE if whole else missed * KEPT, 8 * SIZE if whole else missed * EACH))
            assert bytes_down.tolist() == [b + 8 * WHOLE + 16 for _, b in expected]
            online = [outcome != Outcome.UNAVAILABLE for outcome in phase.responses.outcome.tolist()]
            assert phase.counts["floats_down"] == sum(
                f + WHOLE for (f, _), on in zip(expected, online, strict=True) if on
            )
            assert phase.counts["bytes_down"] == sum(b for b, on in zip(bytes_down.tolist(), online, strict=True) if on)
        since |= dict.fromkeys(clients, t)
    assert again > 0
    assert wholly > 10
    assert few > 10


def test_without_a_memory_each_message_is_coded_by_itself_and_all_get_the_same():
    devices = Told()
    there = downward(moving(Mean()), made({"name": "uniform", "levels": 3}), memory=False)
    draws = set()
    for record in records(there, vectors(), 4, federation=Federation(devices=devices)):
        state = record.state.state
        least, most = state["sent"].min(), state["sent"].max()
        assert torch.equal(state["seen"], state["seen"][:1].expand(4, SIZE))
        level = (state["seen"][0] - least) / (most - least) * 2
        torch.testing.assert_close(level, level.round())
        draws.add(tuple(level.tolist()))
        moved = torch.stack([1.0 + torch.arange(SIZE) * float(c) for c in state["clients"]])
        torch.testing.assert_close(state["came"], state["sent"] + moved.mean(0))
        assert devices.bytes_down[-1].tolist() == [-(-(SIZE * 2 + 128) // 8) + 8 * WHOLE + 16] * 4
        assert record.phases[0].counts["floats_down"] == 4 * (SIZE + 2 + WHOLE)
    assert len(draws) > 1


def test_a_state_goes_through_a_checkpoint():
    there = downward(moving(Mean()), made({"name": "top_k", "k": KEPT}), memory=True)
    *_, last = records(there, vectors(), 3)
    again = decode(*encode(last.state))
    assert type(again.phases["move"]) is type(last.state.phases["move"])
    assert torch.equal(again.phases["move"].last, last.state.phases["move"].last)


class Asked:
    """A round that only notes what it is to send."""

    def __init__(self, index: int):
        self.index, self.sent = index, []

    def buffered(self, phase, *, messages, **given):
        self.sent.append(messages)
        return []


def test_a_version_is_the_same_in_every_round_and_draws_apart_from_others():
    x = {"x": torch.linspace(-1, 1, 50)}
    phase = moving(Mean()).phases[0]

    def round(state, rnd):
        rnd.buffered(phase, messages={v: Message(send={"z": x}) for v in (3, 4)}, buffer=Buffer(concurrency=1))
        return state, {}

    there = downward(moving(Mean())._replace(round=round), made({"name": "qsgd", "levels": 2}), memory=False)
    state, rounds = there.init(None, rng.key(5), None), [Asked(4), Asked(5)]
    for r in rounds:
        there.round(state, r)
    (first,), (second,) = (r.sent for r in rounds)
    for v in (3, 4):
        assert torch.equal(first[v].send["z"]["x"], second[v].send["z"]["x"])
        assert first[v].size == (51, -(-(50 * 3 + 32) // 8))
    assert not torch.equal(first[3].send["z"]["x"], first[4].send["z"]["x"])


def test_exchanges_draw_apart():
    """The same model, sent twice."""
    world, algorithm = case("fedavg")

    def round(state, rnd):
        found = [rnd.map_reduce(phase, shared=Message(send={"z": z, "n": {}}), cohort=rnd.invite(2)) for _ in range(2)]
        return {"seen": [f["seen"].stacked()[0] for f in found]}, {}

    z = {"v": torch.linspace(-1, 1, 50).double(), "n": torch.arange(2)}

    def client_final(shared, client_state, client_input, carry):
        return Message(send={"seen": shared["z"]["v"]}), client_state

    step = LocalLoop(step=lambda ops, shared, carry, batch, at, key: carry, batches=BatchPlan(size=1, steps=1))
    work = LocalWork(
        client_init=lambda shared, client_state, client_input, key: torch.zeros(()),
        loops=(step,),
        client_final=client_final,
    )
    phase = Phase(name="look", work=work, reduce={"seen": CollectUploads()})
    looking = algorithm._replace(init=lambda z, key, problem: {"seen": []}, round=round, phases=(phase,), views={"global": View(lambda s: {})})  # noqa: E501  # fmt: skip
    there = downward(looking, made({"name": "qsgd", "levels": 2}), memory=False)
    seen = [x for record in records(there, world, 2) for x in record.state.state["seen"]]
    assert len({tuple(x.tolist()) for x in seen}) == 4
