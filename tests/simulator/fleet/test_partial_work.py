"""Partial work: what a slow client sends under a deadline is what a client with fewer local steps would have sent."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.simulator.algorithm import Cohort, Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.driver.memory import Memory
from fedfleet.simulator.driver.round import Conditions, EngineRound
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.fleet.policies import Deadline, First
from fedfleet.simulator.fleet.responses import Federation, Outcome, respond
from fedfleet.simulator.fleet.selection import Uniform
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import BatchPlan, LocalLoop, LocalWork, Message, Objective, Phase
from tests.parts import slow_but

FEATURES, K = 16, 6  # rows of 64 bytes: the last bit of a product may depend on where in memory its factors begin
INNERS = ("serial", "batched", "factored")
PLAN = BatchPlan(size=2, steps=K)
SHARED = Message(send={"z": {"x": {"w": 0.1 * rng.normal(rng.key(2), (4, FEATURES)), "b": torch.zeros(4)}}})


def loss(z: Any, batch: Any, ctx: Any, key: Any) -> Any:
    out = F.linear(batch.x, z["x"]["w"]) + z["x"]["b"]
    return batch.mean((out.tanh().sum(1) - batch.y) ** 2), {}


def population(sizes: tuple[int, ...]) -> InMemoryPopulation:
    x = rng.normal(rng.key(1), (sum(sizes), FEATURES))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    domain = torch.zeros(len(sizes), dtype=torch.int64)
    return InMemoryPopulation({"x": x, "y": x.sum(1)}, rng.permutation(rng.key(3), sum(sizes)), offsets, domain)


PEOPLE = population((9, 4, 7, 1, 12, 3, 8, 5))
CLIENTS = torch.arange(PEOPLE.size)


def train(*plans: BatchPlan, divisible: bool = True) -> Phase:
    """Stages with rates of their own, so that it matters which of them was cut short."""

    def stage(s: int) -> Any:
        def step(ops: Any, shared: Any, z: Any, batch: Any, at: Any, key: Any) -> Any:
            return ops.step("train", z, 0.05 * (s + 1), ops.grad("train", z, batch, key)[0])

        return step

    work = LocalWork(
        client_init=lambda shared, client_state, client_input, key: shared["z"],
        loops=tuple(LocalLoop(step=stage(s), batches=plan) for s, plan in enumerate(plans)),
        client_final=lambda shared, client_state, client_input, z: (Message(send={"z": z}), client_state),
        divisible=divisible,
    )
    return Phase(name="train", work=work, reduce={"z": CollectUploads()})


@dataclass
class Slow:
    """Client i takes ``fixed`` seconds and ``step[i]`` a step."""

    step: Tensor
    fixed: float = 0.0
    seen: list[Load] = field(default_factory=list)

    def times(self, key: rng.Key, clients: Tensor, load: Load) -> Times:
        self.seen.append(load)
        return Times(torch.full((len(clients),), self.fixed, dtype=torch.float64), self.step[clients])


def go(
    phase: Phase, inner: str, federation: Federation, block_size: int = 3, clients: Tensor = CLIENTS
) -> tuple[dict[int, Any], Any]:
    """Run the phase in a round of the engine; return what each heard client sent, and the record."""
    setup = Setup(
        population=PEOPLE,
        phases={"train": phase},
        objectives={"train": Objective(loss=loss, sign={"x": 1})},
        functions={},
        evaluation={},
        inner=inner,
    )
    executor = LocalExecutor(None)
    executor.start(setup)
    conditions = Conditions(seed=4, federation=federation, block_size=block_size)
    turn = EngineRound(
        0, 0, 0.0, Problem(PEOPLE.size, 6.0, PEOPLE.num_examples), conditions, executor, Memory(Uniform())
    )
    reduced = turn.map_reduce(phase, shared=SHARED, cohort=Cohort(clients, torch.zeros_like(clients)))
    sent = T.concat(reduced["z"].blocks)
    return {c: T.index(sent, i) for i, c in enumerate(reduced.received.tolist())}, turn.records[0]


def cut(m: int) -> Phase:
    return train(BatchPlan(size=2, steps=m))


def same(a: Any, b: Any, *, exactly: bool) -> None:
    for x, y in zip(T.leaves(a), T.leaves(b), strict=True):
        assert torch.equal(x, y) if exactly else torch.allclose(x, y, rtol=1e-5, atol=1e-6)


SECONDS = torch.tensor([1.0, 2.0, 0.5, 4.0, 10.0, 1.7, 0.1, 11.0], dtype=torch.float64)


def in_time(deadline_s: float) -> dict[int, int]:
    return {c: min(K, int(deadline_s / s)) for c, s in enumerate(SECONDS.tolist()) if s <= deadline_s}


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("block_size", slow_but([1, 3, 8], 3))
def test_a_slow_client_sends_what_one_with_fewer_steps_sends(inner, block_size):
    federation = Federation(devices=Slow(SECONDS), policy=Deadline(10.0), partial_work=True)
    sent, record = go(train(PLAN), inner, federation, block_size)
    done = in_time(10.0)
    assert done == {0: 6, 1: 5, 2: 6, 3: 2, 4: 1, 5: 5, 6: 6}
    assert set(sent) == set(done)
    for m in sorted(set(done.values())):  # everybody with m steps, in the same blocks
        expected, _ = go(cut(m), inner, Federation(), block_size, torch.tensor(sorted(done)))
        for client in (c for c in done if done[c] == m):
            # the factored executor multiplies all inputs of a block at once, which are more beside a client with more steps
            same(sent[client], expected[client], exactly=inner != "factored" or block_size == 1)
    outcomes = record.responses.outcome.tolist()
    assert [c for c in range(8) if outcomes[c] == Outcome.COMPLETED] == sorted(done)
    assert outcomes[7] == Outcome.LATE
    assert record.counts["client_steps"] == sum(done.values())
    assert record.responses.seconds[:7].max() <= 10.0
    assert record.responses.duration_s == 10.0


@pytest.mark.parametrize("inner", INNERS)
def test_a_block_of_clients_cut_alike_is_one_of_fewer_steps_to_the_bit(inner):
    federation = Federation(devices=Slow(torch.full((8,), 3.0).double()), policy=Deadline(10.0), partial_work=True)
    sent, record = go(train(PLAN), inner, federation)
    expected, _ = go(cut(3), inner, Federation())
    assert set(sent) == set(expected) == set(range(8))
    for client in sent:
        same(sent[client], expected[client], exactly=True)
    assert record.counts["client_steps"] == 24


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_steps_are_counted_over_the_stages(inner, steps):
    """Two stages of 3 steps: the limit goes to the first before the second."""
    two = train(BatchPlan(size=2, steps=3), BatchPlan(size=3, steps=3))
    every = torch.full((8,), 10.0 / steps, dtype=torch.float64) * (1 - 1e-9)
    sent, record = go(
        two, inner, Federation(devices=Slow(every), policy=Deadline(10.0), partial_work=True), block_size=8
    )
    assert record.counts["client_steps"] == 8 * steps
    plans = [BatchPlan(size=2, steps=min(3, steps))] + ([BatchPlan(size=3, steps=steps - 3)] if steps > 3 else [])
    expected, _ = go(train(*plans), inner, Federation(), block_size=8)
    for client in CLIENTS.tolist():
        same(sent[client], expected[client], exactly=inner != "factored")  # a step not taken leaves pairs behind


@pytest.mark.parametrize("inner", INNERS)
def test_passes_over_local_data_are_cut_too(inner):
    """Steps of an epochs plan differ from client to client: batches of 2 of 9, 4, 7, 1, 12, 3, 8, 5 examples, twice."""
    whole = torch.tensor([10, 4, 8, 2, 12, 4, 8, 6])
    federation = Federation(devices=Slow(torch.full((8,), 2.0).double()), policy=Deadline(10.0), partial_work=True)
    phase = train(BatchPlan(size=2, epochs=2))
    sent, record = go(phase, inner, federation)
    assert record.counts["client_steps"] == int(whole.clamp(max=5).sum())
    for m in (2, 4, 5):
        expected, _ = go(cut(m), inner, Federation())
        for client in (whole.clamp(max=5) == m).nonzero().flatten().tolist():
            same(sent[client], expected[client], exactly=inner != "factored")


def test_work_that_is_not_divisible_is_done_whole_or_not_at_all():
    federation = Federation(devices=Slow(SECONDS), policy=Deadline(10.0), partial_work=True)
    sent, record = go(train(PLAN, divisible=False), "serial", federation)
    assert sorted(sent) == [c for c in range(8) if K * SECONDS[c] <= 10.0] == [0, 2, 6]
    assert record.counts["client_steps"] == 3 * K


@example(
    deadline_s=0.9, fixed=0.3, step=0.2, steps=9, early=False
)  # (0.9 - 0.3) / 0.2 rounds to 3, but 0.3 + 3 * 0.2 > 0.9
@given(
    deadline_s=st.floats(1e-3, 1e6),
    fixed=st.floats(0, 1e3),
    step=st.floats(1e-9, 1e4),
    steps=st.integers(1, 10**6),
    early=st.booleans(),
)
def test_a_client_does_all_the_steps_that_fit_and_is_never_late_for_one_too_many(deadline_s, fixed, step, steps, early):
    clients = torch.zeros(1, dtype=torch.int64)
    policy = Deadline(deadline_s, First(1)) if early else Deadline(deadline_s)
    models = Federation(
        devices=Slow(torch.tensor([step], dtype=torch.float64), fixed), policy=policy, partial_work=True
    )
    found = respond(
        models, clients, clients, Load(torch.tensor([steps]), torch.tensor([1])), 0.0, rng.key(0), rng.key(0)
    )
    mine = int(found.steps)
    if found.outcome[0] == Outcome.COMPLETED:
        assert fixed + step * mine <= deadline_s
        assert mine == steps or fixed + step * (mine + 1) > deadline_s * (1 - 1e-12)
    else:
        assert found.outcome[0] == Outcome.LATE
        assert mine == steps
        assert fixed + step > deadline_s


def test_clients_with_most_steps_come_first(monkeypatch):
    """Of 9, 4, 7, 1, 12, 3, 8, 5 examples; clients 0, 2 and 6 take 6 steps, 1 and 5 take 5, 3 takes 2, 4 one, 7 none in time."""
    blocks, run = [], LocalExecutor.map

    def watched(self, job, shared, tasks, **options):
        blocks.extend(task.clients.tolist() for task in tasks)
        return run(self, job, shared, tasks, **options)

    monkeypatch.setattr(LocalExecutor, "map", watched)
    go(train(PLAN), "batched", Federation(devices=Slow(SECONDS), policy=Deadline(10.0), partial_work=True))
    assert blocks == [[0, 6], [2, 1], [5, 3], [4]]
    blocks.clear()
    go(train(PLAN), "batched", Federation())  # the same number of steps: by their examples
    assert blocks == [[4, 0], [6, 2], [7, 1], [5, 3]]
