"""A pool on a cluster: it grows with the nodes, and leaves those that leave."""

import sys
import threading
import time

import pytest
import ray
from ray.core.generated import autoscaler_pb2

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.executors import nodes as module
from fedfleet.simulator.executors import pool
from fedfleet.simulator.executors.cluster import ray_worker
from fedfleet.simulator.executors.nodes import Need, Nodes, Watch, visit
from fedfleet.simulator.executors.ray import RayExecutor
from fedfleet.simulator.work import Message
from tests.simulator.executors.places import Places, block

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import tests


def there(room, leaving=()):
    return Nodes(room, {node: f"10.0.0.{node}" for node in room}, frozenset(leaving))


def test_a_node_has_room_for_what_its_resources_allow_unless_it_leaves():
    for need, resources, room in (
        (Need(1, 0), {"CPU": 4.0}, 4),
        (Need(0.1, 0), {"CPU": 1.0}, 10),
        (Need(3, 0), {"CPU": 8.0, "GPU": 1.0}, 2),
        (Need(1, 0.25), {"CPU": 3.0, "GPU": 1.0}, 3),
        (Need(1, 0.25), {"CPU": 16.0, "GPU": 1.0}, 4),
        (Need(1, 1), {"CPU": 16.0}, 0),
        (Need(1, 0), {}, 0),
        (Need(1, 0, 3 * 10**9), {"CPU": 8.0, "memory": 1e10}, 3),
        (Need(1, 0, 3 * 10**9), {"CPU": 2.0, "memory": 1e10}, 2),
    ):
        assert need.fits(resources) == room
    assert there({"1": 4, "2": 3}, leaving="1").total == 3


def test_actors_are_spread_evenly_as_far_as_there_is_room():
    for room, actors, expected in (
        ({"1": 4, "2": 4}, 3, {"1": 2, "2": 1}),
        ({"1": 1, "2": 4, "3": 2}, 6, {"1": 1, "2": 3, "3": 2}),
        ({"1": 1, "2": 2}, 9, {"1": 1, "2": 2}),
        ({"1": 0, "2": 2}, 1, {"1": 0, "2": 1}),
        ({}, 2, {}),
    ):
        assert there(room).spread(actors) == expected
        assert there({**room, "leaves": 5}, leaving=["leaves"]).spread(actors) == expected


def test_a_visit_ends_whatever_is_found(monkeypatch):
    left, joined = [], [True]
    monkeypatch.setattr(module, "start_ray", lambda address, cpus: joined[0])
    monkeypatch.setattr(module, "stop_ray", lambda: left.append(1))
    monkeypatch.setattr(module, "look", lambda need: need)
    assert visit("10.0.0.1:6379", Need(1, 0)) == Need(1, 0)
    assert len(left) == 1
    monkeypatch.setattr(module, "look", lambda need: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        visit("10.0.0.1:6379", Need(1, 0))
    assert len(left) == 2
    joined[0] = False  # this process had joined before
    with pytest.raises(ZeroDivisionError):
        visit("10.0.0.1:6379", Need(1, 0))
    assert len(left) == 2


@pytest.mark.ray
def test_a_visit_finds_the_room_of_a_cluster_and_leaves_it_joined(cluster):
    found = visit(cluster.address, Need(1, 0))
    head = cluster.head_node.node_id
    assert (found.room[head], found.address[head]) == (16, cluster.head_node.node_ip_address)
    assert ray.is_initialized()


def test_a_pool_grows_with_its_cluster_and_says_so(monkeypatch):
    places = Places(2, monkeypatch, there({"1": 2}), elastic=True, next="1")
    places.pool.start()
    places.next = "2"
    places.pool.heed(there({"1": 2, "2": 3}))
    places.come()
    assert places.at == ["1", "1", "2", "2", "2"]
    assert places.events == [{"event": "node_joined", "node": "10.0.0.2", "room": 3}]
    places.pool.heed(there({"2": 3}))  # one that is gone takes its actors along, of which Ray tells
    assert places.made == 5
    places.pool.heed(there({"2": 3, "3": 9}))
    assert places.made == 12  # the two that died with their node come up there too


def test_a_pool_of_a_given_size_does_not_grow_but_fills_up(monkeypatch):
    places = Places(0, monkeypatch, there({"1": 2}), next="1")
    places.pool._grow(2)
    places.next = None  # Ray has no room for the others
    places.pool._grow(2)
    places.pool.start()  # and does not wait for them
    assert places.at == ["1", "1"]
    places.pool.heed(there({"1": 2, "2": 8}))
    assert places.made == 4
    assert places.pool.starting
    places.next = "2"
    for slot in places.pool.slots[2:]:
        slot.actor.up.set_result(places.create().up.result())
    places.come()
    assert places.at == ["1", "1", "2", "2"]


def test_a_busy_cluster_is_waited_for_for_a_while(monkeypatch):
    monkeypatch.setattr(pool, "GRACE_S", 0.2)
    places = Places(1, monkeypatch, there({"1": 9}), next="1")
    places.next = None  # others have taken what it has
    places.pool._grow(2)
    started = time.monotonic()
    places.pool.start()
    assert places.at == ["1"]
    assert time.monotonic() - started >= 0.2


def test_a_node_that_leaves_ends_what_it_has_and_gets_no_more(monkeypatch):
    places = Places(1, monkeypatch, there({"1": 1, "2": 2}), next="1")
    places.next = "2"
    places.pool._grow(2)
    places.pool.start()
    first, second, third = places.pool.slots
    first.load = 1
    places.pool.heed(there({"1": 1, "2": 2}, leaving="1"))
    assert places.events == [{"event": "node_leaves", "node": "10.0.0.1"}]
    assert places.at == ["1", "2", "2"]
    second.load = third.load = 1
    assert places.pool.idlest() is second
    first.load = 0
    places.pool.took(first, block(), 1.0)
    places.come()
    assert places.at == ["2", "2", "2"]
    assert [tuple(h) for h in places.pool.hosts] == [("1", 0, 1, 1.0), ("2", 3, 0, 0.0)]


def test_where_all_leave_they_work_to_the_end(monkeypatch):
    places = Places(2, monkeypatch, there({"1": 2}), next="1")
    places.pool.start()
    places.pool.heed(there({"1": 2}, leaving="1"))
    assert places.made == 2
    assert places.pool.idlest() is places.pool.slots[0]


def test_paces_are_of_a_phase_and_of_an_actor(monkeypatch):
    places = Places(2, monkeypatch)
    fast, slow = places.pool.slots
    for slot, seconds in ((fast, 1.0), (slow, 9.0)):
        places.pool.took(slot, block("train", 3), seconds)
    assert (fast.paces, slow.paces) == ({"train": 1 / 3}, {"train": 3.0})
    fast.load = 2
    assert places.pool.idlest("train", 2) is None
    assert places.pool.idlest("train", 9) is slow
    assert places.pool.idlest("look", 2) is slow
    places.pool.begin("train")
    assert slow.paces == {"train": 3.0}  # it had a block
    places.pool.begin("train")
    assert slow.paces["train"] == pytest.approx(3 - 0.03 * (3 - 1 / 3))
    places.pool.replace(slow)
    assert slow.paces == {}


def test_the_watch_tells_of_changes_only_and_survives_a_head_that_does_not_answer(monkeypatch):
    one, two = there({"1": 1}), there({"1": 1, "2": 1})
    answers = [one, OSError(), one, two, two]
    told, done = [], threading.Event()

    def answer(need):
        found = answers.pop(0)
        if not answers:
            done.set()
            answers.append(found)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "look", answer)
    watch = Watch(Need(1, 0), one, told.append)
    assert done.wait(30)
    watch.close()
    assert told == [two]


class Nobody:
    """A population that a worker can hold."""

    def to(self, device):
        return self


SETUP = Setup(population=Nobody(), phases={}, objectives={}, functions={}, evaluation={}, inner="serial")  # pyright: ignore[reportArgumentType]


def where(setup, shared, task):
    time.sleep(0.05)
    return ray.get_runtime_context().get_node_id()


def workers(executor):
    return sum(h.workers for h in executor.hosts)


def until(done, executor):
    """Let the executor work until something is true of the nodes of its blocks."""
    end = time.monotonic() + 60
    while not done(list(executor.map(where, Message(), [block() for _ in range(8)]))):
        assert time.monotonic() < end, (executor.events, executor.hosts)


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_takes_as_many_actors_as_its_memory(cluster):
    node = cluster.add_node(num_cpus=4, num_gpus=4, memory=10**9)
    executor = RayExecutor(None, cpus_per_actor=0.01, gpus_per_actor=1.0, address="auto", memory_gb=0.4)
    try:
        executor.start(SETUP)
        until(lambda found: node.node_id in found, executor)
        assert workers(executor) == 1 + 2  # the head has a GPU
    finally:
        executor.close()
        cluster.remove_node(node, allow_graceful=False)


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_that_joins_is_used_and_one_that_drains_is_left(cluster, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.2)
    end = time.monotonic() + 60
    while sum(n["Alive"] for n in ray.nodes()) > 1:  # one that an earlier test took away is not yet known to be dead
        assert time.monotonic() < end
        time.sleep(0.1)
    executor = RayExecutor(None, cpus_per_actor=0.01, gpus_per_actor=0.5, address="auto")
    executor.start(SETUP)
    node = None
    try:
        assert workers(executor) == 2
        node = cluster.add_node(num_cpus=1, num_gpus=1)
        until(lambda found: node.node_id in found and workers(executor) == 4, executor)
        address = cluster.head_node.node_ip_address
        assert executor.events == [{"event": "node_joined", "node": address, "room": 2}]
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int(1000 * (time.time() + 600))
        assert ray_worker.global_worker.gcs_client.drain_node(node.node_id, reason, "it is needed elsewhere", deadline)[
            0
        ]  # pyright: ignore
        until(lambda _: workers(executor) == 2, executor)
        found = list(executor.map(where, Message(), [block() for _ in range(8)]))
        assert len(found) == 8
        assert node.node_id not in found
        assert executor.events[1:] == [{"event": "node_leaves", "node": address}]
    finally:
        executor.close()
        if node is not None:
            cluster.remove_node(node, allow_graceful=False)
