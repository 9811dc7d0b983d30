"""The process that runs blocks of clients."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.errors import ClientError, one_line
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.cluster import R, loads, ray, share_tensors
from fedfleet.simulator.executors.fingerprint import LoadedModules, Place, of_process, to_load, unread
from fedfleet.simulator.executors.local_channel import Line, Offer
from fedfleet.simulator.executors.worker import prepare
from fedfleet.simulator.signals import deaf
from fedfleet.simulator.work import Message


class Ready(NamedTuple):
    """An actor is up: whether it has what the driver offers to those of its machine, and what else it has."""

    near: bool
    place: Place


class Done(NamedTuple):
    """What came of a task: its result, or where client code is at ``fault`` what that is, and the seconds it took.

    ``modules`` are the author's that were loaded meanwhile, by digest: client code may import some only as it is called.
    """

    result: Any
    fault: str | None
    seconds: float
    modules: Mapping[str, str]


class ClientActor:
    """A Ray actor that runs blocks, as calls of Ray's or, on the driver's machine, as calls by a line."""

    _loaded = LoadedModules()  # of the process, until there is a run

    def __init__(self, setup: list[Any], threads: int):
        share_tensors()
        prepare(threads)
        deaf()
        self._line: Line | None = None
        self._place = self._take(setup)

    def _take(self, setup: list[Any]) -> Place:
        """Take the setup of a run, and names of modules; where this node lacks something for it, what is returned says so."""
        node, mine, has = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), self._has()
        try:
            result: Setup = ray.get(setup[0])
        except R.RaySystemError as e:  # it cannot be read, as where a module is not there
            return Place(node, has, _cause(e), mine)
        self._loaded = LoadedModules()  # another driver knows of none
        has |= to_load(setup[1:])  # some only once client code is called
        has |= self._loaded.new()  # by now those that the setup names are loaded
        try:
            has |= result.read_here()
        except Exception as e:
            return Place(node, has, unread(e), mine)
        if result.device == "cuda":
            has["GPU"] = torch.cuda.get_device_name()
        self._setup = result.placed()
        return Place(node, has, id=mine)

    def _has(self) -> dict[str, str]:
        return dict(of_process())

    def renew(self, setup: list[Any]) -> Ready:
        """Take what another run needs; return as ``ready`` does."""
        self._place = self._take(setup)
        return Ready(self._line is not None, self._place)

    def ready(self, offer: Offer | None) -> Ready:
        """Return, once the actor is up, what it has."""
        try:
            self._line = None if offer is None else Line(offer)
        except (OSError, ValueError):
            self._line = None
        return Ready(self._line is not None, self._place)

    def run(self, job: Job, shared: Message, task: Any) -> Done:
        """Return what came of a task."""
        started = time.perf_counter()
        try:
            result, fault = job(self._setup, shared, task), None
        except ClientError as e:
            result, fault = None, e.told()
        return Done(result, fault, time.perf_counter() - started, self._loaded.new())

    def run_apart(self, job: Job, shared: Message, task: Any) -> tuple[Done, Any]:
        """Return what came of a task, and its result apart, as two objects of Ray's: a large result stays in this node's store."""
        done = self.run(job, shared, task)
        return done._replace(result=None), done.result

    def serve(self) -> None:
        """Run what comes by the line until the driver stops it."""
        line = self._line
        assert line is not None
        while (call := line.listen()) is not None:
            order, asked = call
            try:
                line.answer(order, self._run_near(line, asked))
            except Exception as e:
                line.answer(order, None, e)

    def _run_near(self, line: Line, asked: bytes) -> Done:
        """Run a call: its message lies in a buffer that all workers share, its task and then its result in another."""
        of_all, task, address = loads(asked)
        job, shared, at = loads(of_all)
        shared = replace(shared, send=line.buffer(at).unpack(shared.send))
        mine = line.buffer(address)
        done = self.run(job, shared, mine.unpack(task))
        return done._replace(result=mine.pack(done.result))


def _cause(error: Exception) -> str:
    """Return the last line of what Ray says of an object that could not be read: the error itself."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else type(error).__name__
