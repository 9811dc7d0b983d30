"""Tasks of one call of ``map`` that are under way, and which actor has which."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import Job, TaskSharding
from fedfleet.simulator.executors.pool import Slot
from fedfleet.simulator.executors.shared_buffer import SharedBuffer
from fedfleet.simulator.work import Message

AHEAD = 64  # blocks dispatched beyond the merge front, which bounds the driver's memory


class Part(NamedTuple):
    """What one actor has to do: part ``of`` of the task of a ``number``, or all of it where there are no others."""

    number: int
    of: int
    task: Any


class Held(NamedTuple):
    """What came of a part and lies in the object store of a node: Ray's reference to it, and the node's id."""

    reference: Any
    node: str


class Batch:
    """The tasks of one call of ``map``: those that wait, and the results, or errors, of those that are done.

    For workers of this machine ``near`` is the job and the shared message, as bytes that go with every call; the
    tensors lie in a shared buffer. For others ``far`` is the message as Ray takes it. Each is made when it is first
    needed. ``lost`` counts by part how often an actor died of it, or its result did not come. ``kind`` is the phase of
    its blocks, None for other tasks. A task that is shared by ``sharding`` belongs to the node whose actor had its
    first part, until others have nothing else to do.
    """

    def __init__(
        self,
        job: Job,
        shared: Message,
        tasks: Iterable[Any],
        background: bool = False,
        timeout_s: float | None = None,
        sharding: TaskSharding | None = None,
    ):
        self.job, self.shared, self.background, self.timeout_s, self.sharding = (
            job,
            shared,
            background,
            timeout_s,
            sharding,
        )
        self.buffer: SharedBuffer | None = None
        self.near: bytes | None = None
        self.tried_near = False
        self.far: Any = None
        self._parts = [self._cut(number, task) for number, task in enumerate(tasks)]
        self.waiting = deque(part for parts in self._parts for part in parts)
        first = self.waiting[0].task if self.waiting else None
        self.kind = first.phase if isinstance(first, BlockTask) else None
        self.size, self.front = len(self._parts), 0
        self.done: dict[int, Any] = {}
        self.lost: Counter[tuple[int, int]] = Counter()
        self._owner: dict[int, str] = {}
        self._found: dict[int, dict[int, Any]] = {}

    def _cut(self, number: int, task: Any) -> list[Part]:
        parts = [task] if self.sharding is None else self.sharding.split(task)
        return [Part(number, i, part) for i, part in enumerate(parts)]

    @property
    def ready(self) -> bool:
        """Whether a part waits that is not too far ahead of the merge front."""
        return bool(self.waiting) and self.waiting[0].number - self.front < AHEAD

    def next(self, node: str) -> Part:
        """Return what an actor of a node is to have: of a task of the node's, or of nobody's, or else of the last one."""
        if self.sharding is None:
            return self.waiting[0]
        free = None
        for part in self.waiting:
            owner = self._owner.get(part.number)
            if owner == node:
                return part
            if owner is None and free is None and part.number - self.front < AHEAD:
                free = part
        if free is not None:
            self._owner[free.number] = node
            return free
        return max(self.waiting, key=lambda part: (part.number - self.front < AHEAD, part.number, part.of))

    def alone(self, part: Part) -> bool:
        """Say whether a part is all of its task."""
        return len(self._parts[part.number]) == 1

    def begun(self, part: Part) -> None:
        """Take note that an actor has a part to do."""
        if part is self.waiting[0]:
            self.waiting.popleft()
        else:
            self.waiting = deque(other for other in self.waiting if other is not part)

    def settle(self, part: Part, result: Any) -> list[Any] | None:
        """Take what came of a part, a value, one that is ``Held`` or an error; return what came of all of its task, once it has."""
        if self.alone(part):
            self.done[part.number] = result
            return None
        mine, parts = self._found.setdefault(part.number, {}), self._parts[part.number]
        mine[part.of] = result
        if len(mine) < len(parts):
            return None
        del self._found[part.number]
        return [mine[i] for i in range(len(parts))]

    def bare(self, number: int) -> list[Any]:
        """Return what joining has to know of the parts of a task."""
        assert self.sharding is not None
        return [self.sharding.bare(part.task) for part in self._parts[number]]

    def fail(self, number: int, error: Exception) -> None:
        """Let a task have an error for a result; it ends the batch in its turn, so none that waits behind it is begun."""
        self.done[number] = error
        self.waiting = deque(part for part in self.waiting if part.number < number)

    def again(self, *parts: Part) -> None:
        """Let parts wait once more."""
        self.waiting = deque(sorted([*self.waiting, *parts], key=lambda part: (part.number, part.of)))

    def all_again(self, number: int) -> Part:
        """Let all parts of a task wait once more, since what came of them is lost; return what stands for them all in ``lost``."""
        self._owner.pop(number, None)
        self.again(*self._parts[number])
        return self._parts[number][0]._replace(of=-1)

    def gone(self, nodes: Collection[str]) -> None:
        """Let the parts wait once more whose results nodes have that do not answer, and give their tasks to others."""
        for number, mine in self._found.items():
            lost = [i for i, result in mine.items() if isinstance(result, Held) and result.node in nodes]
            self.again(*(self._parts[number][i] for i in lost))
            for i in lost:
                del mine[i]
        self._owner = {number: owner for number, owner in self._owner.items() if owner not in nodes}


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
    """A part on an actor.

    ``order`` is that of dispatch. ``buffer`` is where its tensors are, if it went by the local channel. ``held`` is
    where its result will be, if that stays on the node.
    """

    order: int
    batch: Batch
    part: Part
    slot: Slot
    actor: Any
    buffer: SharedBuffer | None
    held: Held | None


def failure(action: Callable[..., None], *given: Any) -> FedfleetError | None:
    """Do something, and return the error that ends the run."""
    try:
        action(*given)
    except FedfleetError as e:
        return e
    return None
