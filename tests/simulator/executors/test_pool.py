"""A pool of actors, one block at a time: what becomes of those that kill it, never end, or cannot be sent."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.chunk import Chunk
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.errors import ClientTimeout, FedfleetError
from fedfleet.simulator.executors import pool
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.executors.nodes import Nodes
from fedfleet.simulator.executors.pool import describe, why
from fedfleet.simulator.executors.ray import RayExecutor
from fedfleet.simulator.work import Message
from tests.refusals import refused
from tests.simulator.executors.killing import KILLED, die, once
from tests.simulator.executors.places import Places

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import tests


def blocks(count):
    key = rng.key(0)
    return [BlockTask("train", torch.arange(3 * i, 3 * i + 3), torch.zeros(3), key) for i in range(count)]


def first(setup, shared, task):
    return int(task.clients[0])


def poison(setup, shared, task):
    if int(task.clients[0]) == 6:
        die()
    return first(setup, shared, task)


def hang(setup, shared, task):
    if int(task.clients[0]) == 6:
        time.sleep(1000)
    return first(setup, shared, task)


def doze(setup, shared, task):
    time.sleep(2)


def no_room(setup, shared, task):
    raise ray.exceptions.OutOfDiskError


@dataclass(frozen=True)
class OnceTooMuch:
    folder: Path

    def __call__(self, setup, shared, task):
        if once(self.folder / "full"):
            raise ray.exceptions.OutOfDiskError
        return first(setup, shared, task)


class Nobody:
    """A population that a worker can hold, or dies of."""

    def __init__(self, kills=False):
        self.kills = kills

    def to(self, device):
        if self.kills:
            die()
        return self


SETUP = Setup(population=Nobody(), phases={}, objectives={}, functions={}, evaluation={}, inner="serial")


@pytest.fixture(scope="module")
def workers(cluster):
    executor = RayExecutor(2, cpus_per_actor=0.25)
    executor.start(SETUP)
    yield executor
    executor.close()


@pytest.mark.ray
@pytest.mark.slow
def test_a_block_that_kills_every_actor_is_named(workers):
    workers.events.clear()
    begins = (
        "executor: phase 'train', clients 6, 7, 8: lost 3 times on Ray actors, the last time because its process was"
    )
    refused(lambda: list(workers.map(poison, Message(), blocks(5))), begins, FedfleetError)
    assert len(workers.events) >= 3
    assert list(workers.map(first, Message(), blocks(5))) == [0, 3, 6, 9, 12]  # the pool is as good as new


@pytest.mark.ray
def test_a_block_that_never_ends_is_stopped_and_the_others_come(workers):
    workers.events.clear()
    running = workers.map(hang, Message(), blocks(6), timeout_s=1.0)
    assert [next(running), next(running)] == [0, 3]
    refused(lambda: next(running), "phase 'train', clients 6, 7, 8: not done after 1 s", ClientTimeout)
    assert list(running) == [9, 12, 15]
    assert workers.events == []


@pytest.mark.ray
def test_a_result_that_finds_no_room_is_made_again(workers, tmp_path):
    assert list(workers.map(OnceTooMuch(tmp_path), Message(), blocks(4))) == [0, 3, 6, 9]
    with pytest.raises(FedfleetError, match=r"clients 0, 1, 2: lost 3 times .* because the object store is full: if"):
        list(workers.map(no_room, Message(), blocks(1)))


LONG = "x" * 40_000  # a task that no line takes


def echo(setup, shared, task):
    return task[0]


@pytest.mark.ray
def test_long_calls_go_another_way_and_all_answers_come(workers):
    for tasks in ("sl", "ls", "slsl", "lssl", "ssslllsss"):
        found = workers.map(echo, Message(), [LONG if kind == "l" else "s" for kind in tasks])
        assert list(found) == ["x" if kind == "l" else "s" for kind in tasks]


@pytest.mark.ray
def test_a_large_message_does_not_make_answers_of_a_small_one_unheard(workers):
    small = workers.map(first, Message(), blocks(3), background=True)
    large = workers.map(first, Message(send={"z": torch.zeros(10**7)}), blocks(3))
    assert list(large) == [0, 3, 6]
    assert list(small) == [0, 3, 6]


class Unreadable:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return fail, (self.error,)


def fail(error):
    raise error("it cannot be read")


def unreadable(setup, shared, task):
    return Unreadable(task)


@pytest.mark.ray
@pytest.mark.parametrize("error", [ValueError, EOFError, FileNotFoundError])
def test_a_result_that_cannot_be_read_fails_alone(workers, error):
    workers.events.clear()
    with pytest.raises(error, match="it cannot be read"):
        list(workers.map(unreadable, Message(), [error] * 4))
    with pytest.raises(error, match="it cannot be read"):
        list(workers.map(echo, Message(), [Unreadable(error)]))
    assert list(workers.map(first, Message(), blocks(5))) == [0, 3, 6, 9, 12]
    assert workers.events == []


@dataclass(frozen=True)
class SlowThenDeadly:
    """The first block is answered, and the second kills the actor once, while the driver is busy with other things."""

    folder: Path

    def __call__(self, setup, shared, task):
        if int(task.clients[0]) == 3 and once(self.folder / "dead"):
            time.sleep(0.5)
            die()
        return os.getpid()


@pytest.mark.ray
@pytest.mark.slow
def test_what_was_answered_before_a_death_counts(cluster, tmp_path):
    executor = RayExecutor(1, cpus_per_actor=0.25)
    executor.start(SETUP)
    running = executor.map(SlowThenDeadly(tmp_path), Message(), blocks(2))
    until = time.monotonic() + 60
    while not (tmp_path / "dead").exists():
        assert time.monotonic() < until, "the second block has not begun"
        time.sleep(0.1)
    time.sleep(2)
    before, after = list(running)
    assert before != after
    assert [(e["event"], e["blocks"]) for e in executor.events] == [("worker_died", 1)]
    executor.close()


def nap(setup, shared, task):
    time.sleep(task)
    return task


@pytest.mark.slow
@pytest.mark.ray
def test_what_a_stopped_actor_had_at_hand_runs_again(workers):
    running = workers.map(nap, Message(), [0.6, 0.6, 0.0, 0.0, 0.0], timeout_s=0.4)
    for _ in range(2):
        with pytest.raises(ClientTimeout):
            next(running)
    assert list(running) == [0.0, 0.0, 0.0]


@pytest.mark.ray
def test_a_full_object_store_is_a_clear_error(workers, monkeypatch):
    def full(value):
        raise ray.exceptions.ObjectStoreFullError

    monkeypatch.setattr(ray, "put", full)
    assert list(workers.map(first, Message(send={"z": torch.zeros(10**6)}), blocks(2))) == [0, 3]  # not by the store
    large = Message(send={"z": torch.zeros(2 * 10**7)})
    refused(lambda: next(workers.map(first, large, blocks(2))), "executor: the object store is full", FedfleetError)


@pytest.mark.ray
def test_an_interruption_does_not_wait_for_a_block(workers):
    running = workers.map(doze, Message(), blocks(1))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert next(running) is None  # it was under way all the time


@pytest.mark.ray
@pytest.mark.slow
def test_actors_that_die_as_they_start_end_the_run(cluster):
    executor = RayExecutor(1, cpus_per_actor=0.25)
    begins = f"executor: no Ray actor is left, each died 3 times in a row, the last as it started ({KILLED})"
    refused(lambda: executor.start(replace(SETUP, population=Nobody(kills=True))), begins, FedfleetError)
    assert [e["event"] for e in executor.events] == [*["worker_died"] * 3, "worker_retired"]
    executor.close()


@pytest.mark.ray
def test_actors_without_room_are_not_waited_for_for_ever(cluster, monkeypatch):
    monkeypatch.setattr(pool, "PATIENCE_S", 0.5)
    executor = RayExecutor(2, cpus_per_actor=500)
    refused(lambda: executor.start(SETUP), "executor: no Ray actor could start within 0.5 s (free: ", FedfleetError)
    executor.close()


def test_who_waits_for_an_actor_is_told_once(monkeypatch):
    monkeypatch.setattr(pool, "CLUSTER_PATIENCE_S", 0.2)
    monkeypatch.setattr(pool, "QUIET_S", 0.05)
    monkeypatch.setattr(pool.ray, "available_resources", lambda: {"CPU": 2.0})
    nodes = Nodes({"a": 0}, {"a": "10.0.0.1"}, frozenset())
    places, said = Places(1, monkeypatch, nodes, next=None), []
    free = "(free: 2 CPUs, 0 GPUs)"
    refused(
        lambda: places.pool.start(said.append),
        f"executor: no Ray actor could start within 0.2 s {free}",
        FedfleetError,
    )
    assert said == [f"waiting for a Ray actor, 0.2 s at most {free}"]


def test_a_place_where_actors_keep_dying_is_given_up(monkeypatch):
    places = Places(2, monkeypatch)
    for _ in range(3):
        places.kill(0)
        places.come()
    assert places.made == 4
    died = {"event": "worker_died", "slot": 0, "node": "here", "blocks": 2, "why": KILLED}
    assert places.events == [died] * 3 + [{"event": "worker_retired", "slot": 0, "deaths": 3}]
    assert places.pool.idlest() is places.pool.slots[1]
    places.kill(1)
    assert places.pool.idlest() is None  # its replacement is not up yet
    places.kill(1)
    begins = "executor: no Ray actor is left, each died 3 times in a row, the last with phase 'train', clients 0, 1, 2"
    refused(lambda: places.kill(1), begins, FedfleetError)


E_ = ray.exceptions


CAUSES = [
    (E_.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory."), "memory ran out, and Ray"),
    (E_.ObjectStoreFullError(), "the object store is full"),
    (E_.ObjectReconstructionFailedError("ab"), "a result was lost with its node"),
    (E_.ActorUnavailableError("RPC error: Socket closed", None), "its node does not answer"),
    (E_.RayActorError(error_msg="x\nValueError: no data\n", actor_init_failed=True), "ValueError: no data"),
    (E_.ActorDiedError(), KILLED),
]


def test_the_cause_is_told_in_words():
    for error, says in CAUSES:
        assert why(error).startswith(says)


def test_tasks_are_named_as_users_know_them():
    many = blocks(1)[0]._replace(clients=torch.arange(12))
    assert describe(many) == "phase 'train', clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert describe(Chunk("predict", "test", 500, 700)) == "the evaluation of examples 500 to 700 of 'test'"


def test_nothing_happens_to_this_process():
    executor = LocalExecutor()
    executor.start(SETUP)
    assert list(executor.map(first, Message(), blocks(2), timeout_s=5.0)) == [0, 3]
    assert executor.events == []
    executor.close()
