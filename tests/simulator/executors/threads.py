"""Actors made up of threads, for a pool without Ray: calls are pickled as they are made, and come in their order."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fedfleet.simulator.executors import actor, node_reducer, pool
from fedfleet.simulator.executors.cluster import dumps, loads
from fedfleet.simulator.executors.fingerprint import Place
from fedfleet.simulator.executors.local_channel import ANSWER, Line
from fedfleet.simulator.executors.node_reducer import NodeReducer
from fedfleet.simulator.executors.pool import Pool
from fedfleet.simulator.executors.ray import RayExecutor

FREEZE, FROZEN_AT_MOST_S = "freeze", 20.0


class Freezing(Line):
    """A line that stops once in the middle of an answer that says so, after ``written`` bytes of it, until it is thawed."""

    written = 0
    freezes, thawed = threading.Event(), threading.Event()

    def answer(self, order: int, found: Any, error: Exception | None = None) -> None:
        if found is None or found[:2] != (FREEZE, None) or self.freezes.is_set():
            super().answer(order, found, error)
            return
        self.freezes.set()
        answer = dumps((found, error))
        whole, to = ANSWER.pack(order, len(answer)) + answer, self._answers.fileno()
        os.write(to, whole[: self.written])
        self.thawed.wait(FROZEN_AT_MOST_S)
        os.write(to, whole[self.written :])


class ThreadActor:
    """A handle as Ray's, of an actor that is a thread."""

    def __init__(self) -> None:
        self._actor = object.__new__(actor.ClientActor)
        self._actor._setup, self._actor._place = SimpleNamespace(), Place("here", {})
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._outstanding: list[Future[Any]] = []
        for name in ("ready", "run", "serve"):
            setattr(self, name, SimpleNamespace(remote=lambda *given, name=name: self._call(name, dumps(given))))
        apart = SimpleNamespace(remote=lambda *given: self._apart(dumps(given)))
        self.run_apart = SimpleNamespace(options=lambda num_returns: apart)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _apart(self, given: bytes) -> list[SimpleNamespace]:
        """Return references to each of what comes in twos."""
        both, each = self._call("run_apart", given).future(), [Future[Any](), Future[Any]()]

        def told(found: Future[Any]) -> None:
            for i, one in enumerate(each):
                error = found.exception()
                one.set_result(found.result()[i]) if error is None else one.set_exception(error)

        both.add_done_callback(told)
        return [SimpleNamespace(future=lambda one=one: one) for one in each]

    def _call(self, name: str, given: bytes) -> SimpleNamespace:
        future: Future[Any] = Future()
        self._outstanding.append(future)
        self._calls.put((future, lambda: getattr(self._actor, name)(*loads(given))))
        return SimpleNamespace(future=lambda: future)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            try:
                found = work()
            except Exception as e:
                self._settle(future, e)
            else:
                self._settle(future, found)

    def _settle(self, future: Future[Any], found: Any) -> None:
        if not future.done():
            (future.set_exception if isinstance(found, Exception) else future.set_result)(found)

    def kill(self) -> None:
        """Break off what is under way; a thread that is frozen ends once it is thawed."""
        self._calls.put(None)
        for future in self._outstanding:
            self._settle(future, ray.exceptions.ActorDiedError())


def reducer() -> NodeReducer:
    """Return a node reducer that is no actor of Ray's, in a process that has told all it has loaded."""
    made = object.__new__(NodeReducer)
    made._node = "here"
    made.renew()
    made._loaded.new()
    return made


def joining(monkeypatch: pytest.MonkeyPatch, lose: int = 0) -> list[int]:
    """Have results joined at once, where Ray would have an actor do it; return how many each time. The first few are lost."""
    asked: list[int] = []

    def join(sharding: Any, parts: list[Any], *references: Any) -> SimpleNamespace:
        future: Future[Any] = Future()
        asked.append(len(references))
        if len(asked) <= lose:
            future.set_exception(ray.exceptions.ActorDiedError())
        else:
            results = [reference.future().result() for reference in references]
            future.set_result(reducer().join(sharding, parts, *results))
        return SimpleNamespace(future=lambda: future)

    made = SimpleNamespace(join=SimpleNamespace(remote=join), kill=lambda: None)
    monkeypatch.setattr(node_reducer, "_joiner", lambda node: made)
    return asked


@contextmanager
def threaded(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayExecutor]:
    """Start an executor on so many threads instead of Ray's actors."""
    monkeypatch.setattr(pool.ray, "kill", lambda actor: actor.kill())
    monkeypatch.setattr(actor, "Line", Freezing)
    Freezing.freezes.clear()
    Freezing.thawed.clear()
    made: list[ThreadActor] = []

    def create() -> ThreadActor:
        made.append(ThreadActor())
        return made[-1]

    executor = RayExecutor(count)
    executor._opened = Pool(count, create, executor.events)
    executor._pool.start()
    try:
        yield executor
    finally:
        executor.close()
        Freezing.thawed.set()
        for one in made:
            one.thread.join(10)
            assert not one.thread.is_alive()
