"""The process that runs blocks of clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.cluster import loads, ray, share_tensors
from fedfleet.simulator.executors.near import Line, Offer
from fedfleet.simulator.executors.worker import prepare
from fedfleet.simulator.work import Message


class ClientActor:
    """A Ray actor that runs blocks, as calls of Ray's or, on the driver's machine, as calls by a line."""

    def __init__(self, setup: list[Any], threads: int):
        share_tensors()
        prepare(threads)
        self._line: Line | None = None
        self.renew(setup)

    def renew(self, setup: list[Any]) -> bool:
        """Take what another run needs; return as ``ready`` does."""
        found: Setup = ray.get(setup[0])
        self._setup = found.placed()
        return self._line is not None

    def ready(self, offer: Offer | None) -> bool:
        """Return, once the actor is up, whether it has what the driver offers to those of its machine."""
        try:
            self._line = None if offer is None else Line(offer)
        except (OSError, ValueError):
            return False
        return self._line is not None

    def run(self, job: Job, shared: Message, task: Any) -> tuple[Any, str | None]:
        """Return ``(result, None)``, or ``(None, message)`` where client code is at fault."""
        try:
            return job(self._setup, shared, task), None
        except ClientError as e:
            return None, e.told()

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

    def _run_near(self, line: Line, asked: bytes) -> tuple[Any, str | None]:
        """Run with what lies in two slabs: the message in one that is all workers', the task, and then the result, in another."""
        of_all, task, address = loads(asked)
        job, shared, at = loads(of_all)
        shared = replace(shared, send=line.slab(at).unpack(shared.send))
        mine = line.slab(address)
        result, fault = self.run(job, shared, mine.unpack(task))
        return mine.pack(result), fault
