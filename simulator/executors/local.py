"""Run everything in this process: the simplest executor, and the one to debug with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

import torch

from fedfleet.simulator.arithmetic import vmap_internals
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.executors.base import Host, How, Job, unsaid
from fedfleet.simulator.executors.worker import prepare
from fedfleet.simulator.signals import put_off
from fedfleet.simulator.work import Message


def _whole(job: Job, setup: Setup, shared: Message, task: Any) -> Any:
    """Run a task to its end before an interruption takes effect; a second one takes effect at once."""
    with vmap_internals.left_as_they_were(), put_off(insist=True):
        return job(setup, shared, task)


class LocalExecutor:
    """One worker: the calling process, with a fixed number of torch threads while it runs; None takes it as it is."""

    def __init__(self, threads: int | None = 1):
        self.threads = threads
        self.events: list[dict[str, Any]] = []  # nothing ever happens to this process
        self.put_s = 0.0  # and nothing has to be sent
        self.hosts = [Host("this process")]
        self._setup: Setup | None = None
        self._threads_before = torch.get_num_threads()

    def start(self, setup: Setup, say: Callable[[str], None] = unsaid) -> None:
        """Pin the threads and move the data to the device."""
        if self.threads is not None:
            prepare(self.threads)
        self._setup = setup.placed()

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Unpack[How]) -> Iterator[Any]:
        """Run the tasks one after another."""
        assert self._setup is not None, "start the executor first"
        for task in tasks:
            started = time.perf_counter()
            result = _whole(job, self._setup, shared, task)
            here = self.hosts[0]
            self.hosts = [here._replace(tasks=here.tasks + 1, busy_s=here.busy_s + time.perf_counter() - started)]
            yield result

    def close(self) -> None:
        """Restore the threads."""
        torch.set_num_threads(self._threads_before)
        self._setup = None
