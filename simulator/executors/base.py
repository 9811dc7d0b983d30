"""What the driver asks of an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from fedfleet.simulator.block import Setup
from fedfleet.simulator.work import Message

Job = Callable[[Setup, Message, Any], Any]
"""A module-level function ``(setup, shared, task) -> result`` that runs on a worker."""


class Executor(Protocol):
    """Start once, map many times, close."""

    def start(self, setup: Setup) -> None:
        """Give the workers what they need for the whole run."""
        ...

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], *, background: bool = False) -> Iterator[Any]:
        """Yield ``job(setup, shared, task)`` in the order of the tasks, wherever and whenever they ran.

        An executor with workers starts at the call. In the ``background``, tasks run where no others wait.
        """
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...
