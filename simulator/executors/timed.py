"""Time what an executor does, without changing it: where the driver is held up, and what the workers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Unpack

from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.executors.base import Executor, Host, How, Job, TaskSharding, unsaid
from fedfleet.simulator.work import Message


@dataclass
class Tally:
    """What was measured of one phase, or of evaluation.

    Attributes:
        tasks, clients: that came back.
        put_s: of the driver, in ``map``, to make the message ready once for all workers.
        dispatch_s: of the driver, in ``map``, for the rest.
        wait_s: of the driver, until the next result was there; without workers that is the work itself.
        merge_s: of the driver, between a result and the question for the next one.
        compute_s: of the workers, together, from the start of a task to its end.
        put_bytes: of the tensors in shared messages, each counted once, and in tasks.
        returned_bytes: of the tensors in results.

    """

    tasks: int = 0
    clients: int = 0
    put_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    merge_s: float = 0.0
    compute_s: float = 0.0
    put_bytes: int = 0
    returned_bytes: int = 0


@dataclass(frozen=True)
class Clocked:
    """A job that also returns the seconds it took on its worker."""

    job: Job

    def __call__(self, setup: Setup, shared: Message, task: Any) -> tuple[Any, float]:
        """Run the job on the clock."""
        started = perf_counter()
        result = self.job(setup, shared, task)
        return result, perf_counter() - started


@dataclass(frozen=True)
class ClockedSharding:
    """How tasks are shared whose results come with the seconds they took."""

    sharding: TaskSharding

    def split(self, task: Any) -> list[Any]:
        """Split as without a clock."""
        return self.sharding.split(task)

    def bare(self, part: Any) -> Any:
        """Leave out what is left out without a clock."""
        return self.sharding.bare(part)

    def join(self, parts: Sequence[Any], results: Sequence[tuple[Any, float]]) -> tuple[Any, float]:
        """Join the results, and add the seconds."""
        return self.sharding.join(parts, [result for result, _ in results]), sum(seconds for _, seconds in results)


class TimedExecutor:
    """Another executor, timed. Its results are passed on as they are."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.reset()

    def reset(self) -> None:
        """Forget what was measured. What is under way counts from here on, when it comes back."""
        self.phases: dict[str, Tally] = {}
        self.evaluation = Tally()
        self._before = self._executor.hosts

    @property
    def hosts(self) -> list[Host]:
        """The executor's, with what they have done since."""
        before = {h.address: h for h in self._before}
        none = Host("")
        return [
            h._replace(tasks=h.tasks - b.tasks, busy_s=h.busy_s - b.busy_s)
            for h in self._executor.hosts
            for b in [before.get(h.address, none)]
        ]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The executor's."""
        return self._executor.events

    @property
    def put_s(self) -> float:
        """The executor's."""
        return self._executor.put_s

    def start(self, setup: Setup, say: Callable[[str], None] = unsaid) -> None:
        """Start the executor."""
        self._executor.start(setup, say)

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Unpack[How]) -> Iterator[Any]:
        """Map with the executor, on the clock."""
        tasks = list(tasks)
        tally = self._of(tasks[0]) if tasks else Tally()
        tally.put_bytes += _bytes(dict(shared.send)) + sum(_bytes(task) for task in tasks)
        started, put_s = perf_counter(), self._executor.put_s
        sharding = how.get("sharding")
        how["sharding"] = None if sharding is None else ClockedSharding(sharding)
        results = self._executor.map(Clocked(job), shared, tasks, **how)
        put_s = self._executor.put_s - put_s
        tally.put_s += put_s
        tally.dispatch_s += perf_counter() - started - put_s
        return self._results(tasks, results)

    def _results(self, tasks: list[Any], results: Iterator[Any]) -> Iterator[Any]:
        pairs = zip(tasks, results, strict=True)
        while True:
            started = perf_counter()
            found = next(pairs, None)
            if found is None:
                return
            task, (result, seconds) = found
            tally = self._of(task)
            tally.wait_s += perf_counter() - started
            tally.tasks += 1
            tally.clients += len(task.clients) if isinstance(task, BlockTask) else 0
            tally.compute_s += seconds
            tally.returned_bytes += _bytes(result)
            started = perf_counter()
            yield result
            tally.merge_s += perf_counter() - started

    def _of(self, task: Any) -> Tally:
        return self.phases.setdefault(task.phase, Tally()) if isinstance(task, BlockTask) else self.evaluation

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in T.leaves(tree) if isinstance(leaf, Tensor))
