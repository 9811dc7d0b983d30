"""A node that does not answer is known before Ray gives it up, and what its actors had at hand runs elsewhere."""

import threading
from types import SimpleNamespace

import pytest

import fedfleet
from fedfleet.simulator.executors import heartbeats
from fedfleet.simulator.executors import nodes as module
from fedfleet.simulator.executors.heartbeats import FIRST_S, Heartbeats
from fedfleet.simulator.executors.nodes import Need, Nodes, Watch
from fedfleet.simulator.work import Message
from tests.refusals import all_refused
from tests.simulator.executors.threads import threaded


class World:
    """Nodes whose sentries answer, or do not, or are dead; and a clock."""

    def __init__(self, monkeypatch):
        self.now, self.made = 100.0, []
        self.state = {}
        monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(heartbeats.ray, "kill", self.made.remove)
        self.sentries = Heartbeats(5.0, self.create, self.answered)

    def create(self, node):
        actor = SimpleNamespace(here=SimpleNamespace(remote=lambda: node))
        self.made.append(actor)
        return actor

    def answered(self, node):
        if self.state.get(node) == "dead":
            raise ValueError("it died")
        return self.state.get(node) == "up"

    def after(self, seconds, *nodes, **state):
        self.now += seconds
        self.state |= state
        return set(self.sentries.silent(nodes))


def test_who_answered_once_and_not_for_long_is_silent(monkeypatch):
    world = World(monkeypatch)
    assert world.after(0, "a", "b", a="up", b="starting") == set()
    assert world.after(1, "a", "b") == set()
    assert world.after(FIRST_S, "a", "b") == set()  # b has not come up, and a answers
    assert world.after(5, "a", "b", a="frozen", b="up") == set()
    assert world.after(0.1, "a", "b") == {"a"}
    assert world.after(1, "a", "b", a="up") == set()  # it was thawed
    assert len(world.made) == 2


def test_who_has_never_answered_is_silent_after_longer(monkeypatch):
    world = World(monkeypatch)
    assert world.after(0, "a", a="frozen") == set()
    assert world.after(FIRST_S + 5, "a") == set()
    assert world.after(0.1, "a") == {"a"}
    assert world.after(1, "a", a="up") == set()
    assert world.after(5.1, "a", a="frozen") == {"a"}


def test_sentries_are_there_before_the_first_look(monkeypatch):
    asked = threading.Event()
    sentries = SimpleNamespace(silent_s=400.0, silent=lambda nodes: asked.set() or frozenset(nodes), close=lambda: None)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "look", None)
    watch = Watch(Need(1, 0), Nodes({"there": 1, "here": 1}, {}), lambda found: None, sentries)  # pyright: ignore[reportArgumentType]
    assert asked.wait(module.LOOK_S / 2)
    watch.close()


def test_one_that_died_has_a_successor_and_nodes_that_are_gone_are_forgotten(monkeypatch):
    world = World(monkeypatch)
    world.after(0, "a", a="up")
    world.after(1, "a")
    assert world.after(9, "a", a="dead") == set()
    assert world.after(1, "a", a="starting") == set()
    assert len(world.made) == 2
    assert world.after(FIRST_S, "a") == set()
    assert world.after(1) == set()
    assert world.after(1, "a", a="up") == set()
    world.sentries.close()
    assert len(world.made) == 2  # those of places that are no more are let go by themselves


def work(setup, shared, task):
    if task == "stuck" and not done.is_set():
        begun.set()
        assert done.wait(60)
    return task


begun, done = threading.Event(), threading.Event()


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_silent_node_had_at_hand_runs_elsewhere(monkeypatch, others):
    begun.clear()
    done.clear()
    with threaded(1 + others, monkeypatch) as executor:
        running = executor.map(work, Message(), ["stuck", 1, 2, 3])
        assert begun.wait(30)
        here = Nodes({"": 1 + others}, {"": "10.0.0.2"})
        threading.Timer(0.2, done.set).start()  # the new actors find it so
        executor._heed(here._replace(silent=frozenset({""})))
        assert list(running) == ["stuck", 1, 2, 3]
        assert {e["event"] for e in executor.events} == {"node_joined", "node_silent"}
        told = [e for e in executor.events if e["event"] == "node_silent"]
        assert sum(e["blocks"] for e in told) == min(4, 2 * (1 + others))
        assert [e["slot"] for e in told] == list(range(1 + others))


def test_without_a_cluster_it_is_refused(subtests):
    rows = [({"node_silence_s": 5}, "executor.node_silence_s=5")]
    rows += [({"memory_per_actor_gb": 2}, "executor.memory_per_actor_gb=2")]
    all_refused(subtests, lambda given: fedfleet.Experiment(fedfleet.load({"executor": given})), rows)
