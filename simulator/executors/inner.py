"""Compute blocks in another way than the setup says, so that several ways can take turns on the same workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.executors.base import Executor, Host, How, Job, unsaid
from fedfleet.simulator.work import Message


@dataclass(frozen=True)
class As:
    """A job that sees a setup with another ``inner``."""

    job: Job
    inner: str

    def __call__(self, setup: Setup, shared: Message, task: Any) -> Any:
        """Run the job."""
        return self.job(replace(setup, inner=self.inner), shared, task)


class InnerExecutor:
    """Another executor, already started, that computes blocks as ``inner`` says. To close it does nothing."""

    def __init__(self, executor: Executor, inner: str):
        self._executor, self._inner = executor, inner

    @property
    def events(self) -> list[dict[str, Any]]:
        """The executor's."""
        return self._executor.events

    @property
    def put_s(self) -> float:
        """The executor's."""
        return self._executor.put_s

    @property
    def hosts(self) -> list[Host]:
        """The executor's."""
        return self._executor.hosts

    def start(self, setup: Setup, say: Callable[[str], None] = unsaid) -> None:
        """Do nothing."""

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Unpack[How]) -> Iterator[Any]:
        """Map with the executor."""
        return self._executor.map(As(job, self._inner), shared, tasks, **how)

    def close(self) -> None:
        """Do nothing."""
