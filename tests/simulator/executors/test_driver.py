"""The driver beside its workers: tasks that cannot be sent, and actors that stop in the middle of an answer."""

import os
import threading
from typing import Any

import pytest

from fedfleet.simulator.errors import ClientTimeout, FedfleetError
from fedfleet.simulator.executors import local_channel, pool
from fedfleet.simulator.work import Message
from tests.simulator.executors.threads import FREEZE, Freezing, threaded

here = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")
LOCK = threading.Lock()  # which cannot be pickled
CANNOT = "cannot pickle '_thread.lock' object"


def echo(setup: Any, shared: Message, task: Any) -> Any:
    return task


@pytest.fixture(params=[pytest.param("near", marks=here), "far"])
def worker(request, monkeypatch):
    """One worker, called by its line or as one of another machine."""
    if request.param == "far":
        monkeypatch.setattr(pool, "offered", lambda slabs: None)
    with threaded(1, monkeypatch) as executor:
        yield executor


def test_a_task_that_cannot_be_sent_is_told_to_whoever_takes_it(worker):
    wrong = worker.map(echo, Message(), [0, 1, 2, LOCK, 4])  # of which the worker has two at hand
    assert list(worker.map(echo, Message(), [5, 6])) == [5, 6]
    assert [next(wrong) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TypeError, match=CANNOT):
        next(wrong)
    assert list(worker.map(echo, Message(), [7])) == [7]


def test_a_message_that_cannot_be_sent_is_told_to_whoever_takes_its_results(worker):
    first = worker.map(echo, Message(), [0, 1])
    wrong = worker.map(echo, Message(config={"lock": LOCK}), [2, 3])
    assert list(first) == [0, 1]
    with pytest.raises(TypeError, match=CANNOT):
        next(wrong)
    assert list(worker.map(echo, Message(), [4])) == [4]


class Interrupts:
    """A task in whose sending the user interrupts, once."""

    def __init__(self) -> None:
        self.done = False

    def __reduce__(self):
        if not self.done:
            self.done = True
            raise KeyboardInterrupt
        return str, ("sent",)


def test_an_interruption_in_the_middle_of_sending_loses_no_task(worker):
    first = worker.map(echo, Message(), [0, 1, Interrupts(), 3])
    second = worker.map(echo, Message(), [4])
    with pytest.raises(KeyboardInterrupt):
        next(second)
    assert list(first) == [0, 1, "sent", 3]


@here
@pytest.mark.parametrize("written", [3, local_channel.ANSWER.size, local_channel.ANSWER.size + 5])
def test_an_actor_frozen_in_an_answer_holds_up_nobody_and_its_tasks_run_again(monkeypatch, written):
    monkeypatch.setattr(Freezing, "written", written)
    with threaded(2, monkeypatch) as executor:
        held = executor.map(echo, Message(), [FREEZE, 1, 2], background=True)
        for _ in range(3):
            assert list(executor.map(echo, Message(), ["a", "b", "c"])) == ["a", "b", "c"]
        assert Freezing.freezes.wait(10)
        assert executor.events == []
        monkeypatch.setattr(local_channel, "FROZEN_S", 0.0)  # patience is at its end
        for slot in executor._pool.slots:
            slot.near.frozen_at = slot.near.frozen_at and 0.0
        assert list(held) == [FREEZE, 1, 2]
    assert [(e["event"], e["why"]) for e in executor.events] == [
        ("worker_died", "it stopped in the middle of an answer")
    ]


@here
def test_what_freezes_every_actor_is_named(monkeypatch):
    monkeypatch.setattr(Freezing, "written", 7)
    monkeypatch.setattr(local_channel, "FROZEN_S", 0.0)
    monkeypatch.setattr(Freezing.freezes, "is_set", lambda: False)
    with threaded(1, monkeypatch) as executor:
        with pytest.raises(
            FedfleetError, match=r"a task: lost 3 times .* because it stopped in the middle of an answer"
        ):
            list(executor.map(echo, Message(), [FREEZE, 1]))
        assert [e["blocks"] for e in executor.events if e["event"] == "worker_died"] == [2, 2, 2]


@here
def test_an_actor_frozen_in_an_answer_is_stopped_in_time(monkeypatch):
    monkeypatch.setattr(Freezing, "written", 20)
    with threaded(1, monkeypatch) as executor:
        running = executor.map(echo, Message(), [FREEZE, 1], timeout_s=0.1)
        with pytest.raises(ClientTimeout, match=r"a task: not done after 0\.1 s"):
            next(running)
        assert list(running) == [1]
        assert executor.events == []
