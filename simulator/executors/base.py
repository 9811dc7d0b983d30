"""The protocol of executors: what the driver asks of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.work import Message

Job = Callable[[Setup, Message, Any], Any]
"""A module-level function ``(setup, shared, task) -> result`` that runs on a worker."""


class Host(NamedTuple):
    """A machine with workers: its address, how many are up, and the tasks they have done so far, with the seconds these took."""

    address: str
    workers: int = 1
    tasks: int = 0
    busy_s: float = 0.0


class TaskSharding(Protocol):
    """How the workers of a node may share a task: each takes parts of it, whose results are joined where they are."""

    def split(self, task: Any) -> list[Any]:
        """Return the parts of a task."""
        ...

    def bare(self, part: Any) -> Any:
        """Return what joining has to know of a part."""
        ...

    def join(self, parts: Sequence[Any], results: Sequence[Any]) -> Any:
        """Return the result of a task from those of its parts, which are told ``bare``."""
        ...


def unsaid(text: str) -> None:
    """Say nothing."""


class How(TypedDict, total=False):
    """Options of ``map``.

    Tasks run in the ``background`` while no others wait, for ``timeout_s`` seconds at most. Workers of a node share one
    task by ``sharding``.
    """

    background: bool
    timeout_s: float | None
    sharding: TaskSharding | None


class Executor(Protocol):
    """Start, map many times, perhaps start again for another run, close."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened to the workers and changes no bit, such as "worker_died"; the caller may take it out."""
        ...

    @property
    def put_s(self) -> float:
        """The seconds spent so far on making messages ready for the workers, once for all of them."""
        ...

    @property
    def hosts(self) -> list[Host]:
        """Where the work has been done since the start, by address."""
        ...

    def start(self, setup: Setup, say: Callable[[str], None] = unsaid) -> None:
        """Give the workers what they need for a run, the first or another; ``say`` is told what is waited for.

        A setup holds functions of authors, closures among them, which plain pickle cannot send; cloudpickle does.
        """
        ...

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Unpack[How]) -> Iterator[Any]:
        """Yield ``job(setup, shared, task)`` in the order of the tasks, wherever and whenever they ran.

        An executor with workers starts at the call. In the ``background``, tasks run where no others wait.
        A worker is stopped whose task takes longer than ``timeout_s``; in the place of its result, ClientTimeout is raised, and
        the iterator then goes on. This process cannot be stopped so.
        """
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...
