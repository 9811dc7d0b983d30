"""What is under way: the tasks of one call of ``map``, and which actor has which."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.pool import Slot
from fedfleet.simulator.executors.slab import Slab
from fedfleet.simulator.work import Message

AHEAD = 64  # blocks dispatched beyond the merge front, which bounds the driver's memory


class Batch:
    """The tasks of one call of ``map``: those that wait, and the results, or errors, of those that are done.

    Job and shared message are ``near`` as bytes that go with every call, the tensors in a slab, for workers of this machine;
    ``far`` is the message as Ray takes it, for others. Each is made when it is first needed. ``lost`` counts by task how often
    an actor died of it, or its result did not come. ``kind`` is the phase of its blocks, None for other tasks.
    """

    def __init__(self, job: Job, shared: Message, tasks: Iterable[Any], background: bool, timeout_s: float | None):
        self.job, self.shared, self.background, self.timeout_s = job, shared, background, timeout_s
        self.slab: Slab | None = None
        self.near: bytes | None = None
        self.tried_near = False
        self.far: Any = None
        self.waiting = deque(enumerate(tasks))
        first = self.waiting[0][1] if self.waiting else None
        self.kind = first.phase if isinstance(first, BlockTask) else None
        self.size, self.front = len(self.waiting), 0
        self.done: dict[int, Any] = {}
        self.lost: Counter[int] = Counter()

    @property
    def ready(self) -> bool:
        """Whether a task waits that is not too far ahead of the merge front."""
        return bool(self.waiting) and self.waiting[0][0] - self.front < AHEAD

    def fail(self, number: int, error: Exception) -> None:
        """Let a task have an error for a result; it ends the batch in its turn, so none that waits behind it is begun."""
        self.done[number] = error
        self.waiting = deque(item for item in self.waiting if item[0] < number)

    def again(self, number: int, task: Any) -> None:
        """Let a task wait once more."""
        self.waiting = deque(sorted([*self.waiting, (number, task)], key=itemgetter(0)))


class Results:
    """The results of a batch in the order of its tasks, by ``take``. After a ClientTimeout it goes on with the next task.

    Tasks of one that nobody holds any more are not begun (``forget``).
    """

    def __init__(self, batch: Batch, take: Callable[[Batch], Any], forget: Callable[[Batch], None]):
        self._batch, self._take, self._forget = batch, take, forget

    def __iter__(self) -> Results:
        return self

    def __next__(self) -> Any:
        return self._take(self._batch)

    def __del__(self) -> None:
        self._forget(self._batch)


class Run(NamedTuple):
    """A task on an actor; ``order`` is that of dispatch, ``slab`` where its tensors are, if it went by the line."""

    order: int
    batch: Batch
    number: int
    task: Any
    slot: Slot
    actor: Any
    slab: Slab | None


def failure(action: Callable[..., None], *given: Any) -> FedfleetError | None:
    """Do something, and return the error that ends the run."""
    try:
        action(*given)
    except FedfleetError as e:
        return e
    return None
