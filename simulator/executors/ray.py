"""Run blocks on a pool of Ray actors, each hosting as many virtual clients as come its way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from fedfleet.simulator import tree as T
from fedfleet.simulator.block import Setup
from fedfleet.simulator.errors import ClientError, ClientTimeout, FedfleetError
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.cluster import DIRECT_BYTES, cloudpickle, ray, share_tensors, start_ray
from fedfleet.simulator.executors.pool import DIED, LOST, MEND, NO_ROOM, TRIES, Pool, Slot, describe, why
from fedfleet.simulator.executors.slab import SLAB_BYTES, Slab, joined, own
from fedfleet.simulator.executors.worker import prepare
from fedfleet.simulator.work import Message

# To other machines, shared trees of so many bytes, or of so many for all tasks together, travel with each task: faster than a put.
INLINE_BYTES, TOGETHER_BYTES = 1 << 16, DIRECT_BYTES
SLABS, ROOM_BYTES = 16, SLAB_BYTES // 2  # for messages to this machine: how many at a time, and how large one may be
AHEAD = 64  # blocks dispatched beyond the merge front, which bounds the driver's memory


class ClientActor:
    """A worker process that runs blocks of clients."""

    def __init__(self, setup: list[Any], threads: int):
        share_tensors()
        prepare(threads)
        found: Setup = ray.get(setup[0])
        self._setup = found.placed()

    def ready(self, slabs: list[tuple[str, bytes]]) -> bool:
        """Return, once the actor is up, whether it shares memory with the driver: whether it found these there."""
        try:
            found = {address: joined(address) for address, _ in slabs}
        except (OSError, ValueError):
            return False
        if any(found[address].secret != secret for address, secret in slabs):
            return False
        self._slabs = found
        return True

    def run(self, job: Job, shared: Message, task: Any) -> tuple[Any, str | None]:
        """Return ``(result, None)``, or ``(None, message)`` where client code is at fault."""
        try:
            return job(self._setup, shared, task), None
        except ClientError as e:
            return None, e.told()

    def run_near(self, of_all: bytes, of_task: tuple[Any, str]) -> tuple[Any, str | None]:
        """Run with what lies in two slabs: the message in one that is all workers', the task, and then the result, in another."""
        job, shared, address = cloudpickle.loads(of_all)
        shared = replace(shared, send=self._slab(address).unpack(shared.send))
        task, address = of_task
        mine = self._slab(address)
        result, fault = self.run(job, shared, mine.unpack(task))
        return mine.pack(result), fault

    def _slab(self, address: str) -> Slab:
        if address not in self._slabs:
            self._slabs[address] = joined(address)
        return self._slabs[address]


class _Batch:
    """The tasks of one call of ``map``: those that wait, and the results, or errors, of those that are done.

    Job and shared message are ``near`` as bytes that go with every call, the tensors in a slab, for workers of this machine;
    ``far`` is the message as Ray takes it, for others. Each is made when it is first needed. ``lost`` counts by task how often
    an actor died of it, or its result did not come.
    """

    def __init__(self, job: Job, shared: Message, tasks: Iterable[Any], background: bool, timeout_s: float | None):
        self.job, self.shared, self.background, self.timeout_s = job, shared, background, timeout_s
        self.slab: Slab | None = None
        self.near: bytes | None = None
        self.tried_near = False
        self.far: Any = None
        self.waiting = deque(enumerate(tasks))
        self.size, self.front = len(self.waiting), 0
        self.done: dict[int, Any] = {}
        self.lost: Counter[int] = Counter()

    @property
    def ready(self) -> bool:
        """Whether a task waits that is not too far ahead of the merge front."""
        return bool(self.waiting) and self.waiting[0][0] - self.front < AHEAD

    def again(self, number: int, task: Any) -> None:
        """Let a task wait once more."""
        self.waiting = deque(sorted([*self.waiting, (number, task)], key=itemgetter(0)))


class _Run(NamedTuple):
    """A task on an actor; ``order`` is that of dispatch."""

    order: int
    batch: _Batch
    number: int
    task: Any
    slot: Slot
    actor: Any
    slab: Slab | None


class _Results:
    """The results of a batch in the order of its tasks. After a ClientTimeout it goes on with the next task."""

    def __init__(self, executor: RayExecutor, batch: _Batch):
        self._executor, self._batch = executor, batch

    def __iter__(self) -> _Results:
        return self

    def __next__(self) -> Any:
        return self._executor.take(self._batch)

    def __del__(self) -> None:
        self._executor.forget(self._batch)


class RayExecutor:
    """A pool of ``ClientActor``s. Results come back in task order, so the number of actors never changes a bit.

    A block whose actor dies, or whose result is lost with a node, runs again elsewhere; blocks are pure, so that changes no bit.
    """

    def __init__(
        self,
        actors: int,
        cpus_per_actor: float = 1.0,
        gpus_per_actor: float = 0.0,
        threads: int = 1,
        address: str | None = None,
        cpus: int | None = None,
    ):
        self.actors, self.cpus, self.gpus, self.threads = actors, cpus_per_actor, gpus_per_actor, threads
        self.events: list[dict[str, Any]] = []
        self.put_s = 0.0
        self._address, self._node_cpus = address, cpus
        self._pool: Pool | None = None
        self._batches: list[_Batch] = []
        self._running: dict[Any, _Run] = {}
        self._slabs: list[Slab] = []
        self._order = count()
        self._started_ray = False

    def start(self, setup: Setup) -> None:
        """Start Ray (on loopback, unless an address is given), put the setup once, and bring the actors up."""
        torch.set_num_threads(1)
        self._started_ray = start_ray(self._address, self._node_cpus)
        share_tensors()
        # Ray's own account of every task would grow with the rounds.
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "enable_task_events": False}
        remote = ray.remote(ClientActor).options(**options)  # pyright: ignore
        reference = _put(setup)
        self._pool = Pool(self.actors, lambda: remote.remote([reference], self.threads), self.events)
        self._pool.start()

    def map(
        self,
        job: Job,
        shared: Message,
        tasks: Iterable[Any],
        *,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Put the shared trees once for all workers and start; yield results in task order.

        Tasks in the background run where no others wait. Raises ClientError, ClientTimeout, and FedfleetError where a task kills
        every actor, or none is left.
        """
        batch = _Batch(job, shared, tasks, background, timeout_s)
        self._batches = sorted([*self._batches, batch], key=lambda b: b.background)
        try:
            self._dispatch()
        except BaseException:
            self.forget(batch)
            raise
        return _Results(self, batch)

    def take(self, batch: _Batch) -> Any:
        """Return the result of the next task of a batch. Raises StopIteration after the last one."""
        if batch.front == batch.size:
            self.forget(batch)
            raise StopIteration
        try:
            while batch.front not in batch.done:
                self._receive()
                self._dispatch()
        except BaseException:
            self.forget(batch)
            raise
        found = batch.done.pop(batch.front)
        batch.front += 1
        self._dispatch()
        if isinstance(found, Exception):
            if not isinstance(found, ClientTimeout):
                self.forget(batch)
            raise found
        return found

    def forget(self, batch: _Batch) -> None:
        """Start no more tasks of a batch."""
        self._batches = [b for b in self._batches if b is not batch]

    def _dispatch(self) -> None:
        """Give every actor that has room its next task."""
        assert self._pool is not None, "start the executor first"
        for batch in self._batches:
            while batch.ready and (slot := self._pool.idlest()) is not None:
                number, task = batch.waiting.popleft()
                mine = slot.free.pop() if slot.free and self._near(batch) else None
                try:
                    reference = self._send(batch, task, slot, mine)
                except BaseException as e:
                    if mine is not None:
                        slot.free.append(mine)
                    if isinstance(e, NO_ROOM):
                        raise _full(e) from e
                    raise
                if not slot.load:
                    slot.since = time.monotonic()
                slot.load += 1
                self._running[reference] = _Run(next(self._order), batch, number, task, slot, slot.actor, mine)

    def _send(self, batch: _Batch, task: Any, slot: Slot, mine: Slab | None) -> Any:
        """Hand a task to an actor, with the message that suits it; return the reference to what comes of it."""
        if mine is None:
            return slot.actor.run.remote(batch.job, self._far(batch), task)
        return slot.actor.run_near.remote(batch.near, (mine.pack(task), mine.address))

    def _near(self, batch: _Batch) -> bool:
        """Write the shared message for workers of this machine, if that is still to do; return whether it found room."""
        if not batch.tried_near and T.num_bytes(dict(batch.shared.send)) <= ROOM_BYTES:
            started = time.perf_counter()
            batch.slab = self._unused()
            if batch.slab is not None:
                packed = replace(batch.shared, send=batch.slab.pack(batch.shared.send))
                batch.near = cloudpickle.dumps((batch.job, packed, batch.slab.address))  # pyright: ignore[reportPrivateImportUsage]
            self.put_s += time.perf_counter() - started
        batch.tried_near = True
        return batch.near is not None

    def _unused(self) -> Slab | None:
        """Return a slab that no batch needs any more; None where that would take too many."""
        waiting = (b for b in self._batches if b.waiting)
        used = {id(b.slab) for b in [*waiting, *(r.batch for r in self._running.values())]}
        for slab in self._slabs:
            if id(slab) not in used:
                return slab
        new = own(1) if len(self._slabs) < SLABS else []
        self._slabs += new
        return new[0] if new else None

    def _far(self, batch: _Batch) -> Any:
        """Return the shared message as it goes to other machines: small ones along with each task, others put once."""
        if batch.far is None:
            size, started = T.num_bytes(dict(batch.shared.send)), time.perf_counter()
            small = size <= INLINE_BYTES or size * batch.size <= TOGETHER_BYTES
            batch.far = batch.shared if small else _put(batch.shared)
            self.put_s += time.perf_counter() - started
        return batch.far

    def _receive(self) -> None:
        """Wait for a task to end, or for an actor to come up."""
        pool = self._pool
        assert pool is not None
        due_s, overdue = self._next_due()
        wanted = [*self._running, *pool.starting]
        if not wanted:
            raise FedfleetError("executor: no Ray actor is left")
        ready, _ = ray.wait(wanted, num_returns=1, timeout=due_s if self._running else pool.patience_s)
        if not ready:
            pool.check_patience()
            if overdue is not None and not ray.wait([overdue], timeout=0, fetch_local=False)[0]:
                self._stop(self._running.pop(overdue))
        elif ready[0] in pool.starting:
            pool.settle(ready[0])
        else:
            self._settle(ready[0])

    def _settle(self, reference: Any) -> None:
        """Take the result of a task, or what became of it."""
        run = self._running.pop(reference)
        current = run.actor is run.slot.actor
        if current:
            run.slot.load -= 1
            run.slot.since = time.monotonic()
            if run.slab is not None:
                run.slot.free.append(run.slab)
        try:
            result, fault = ray.get(reference)
            if run.slab is not None:
                result = run.slab.unpack(result)
        except LOST as e:
            self._lost(run, e, current)
        except Exception as e:
            run.batch.done[run.number] = e
        else:
            run.batch.done[run.number] = result if fault is None else ClientError(fault)
            if current:
                run.slot.deaths = 0

    def _lost(self, run: _Run, error: Exception, current: bool) -> None:
        """Let a task run again. Raises FedfleetError where it was lost too often, or no actor is left."""
        run.batch.again(run.number, run.task)
        fatal = None
        if not isinstance(error, DIED):
            fatal = self._count(run, error)
        elif current:  # what else it had at hand comes back in the same way, and is not counted
            mine = [run, *(r for r in self._running.values() if r.actor is run.actor)]
            first = min(mine, key=lambda r: r.order)
            fatal = self._count(first, error)
            assert self._pool is not None
            try:
                self._pool.died(run.slot, error, len(mine), first.task)
            except FedfleetError as e:
                fatal = fatal or e
        if fatal is not None:
            raise fatal from error

    def _count(self, run: _Run, error: Exception) -> FedfleetError | None:
        """Count that a task was lost; return the error that ends the run where that was too often."""
        run.batch.lost[run.number] += 1
        if run.batch.lost[run.number] < TRIES:
            return None
        self.forget(run.batch)
        return FedfleetError(
            f"executor: {describe(run.task)}: lost {TRIES} times on Ray actors, the last time because {why(error)}: {MEND}; "
            f"else see whether it kills the process with executor.kind=local"
        )

    def _next_due(self) -> tuple[float | None, Any]:
        """Return the seconds until the first task has run too long, and its reference; (None, None) where none can."""
        for batch in self._batches:
            if batch.timeout_s is not None:
                break
        else:
            return None, None
        first: dict[Any, tuple[float, Any]] = {}
        for reference, run in self._running.items():  # of what an actor has at hand, the first is what runs
            limit = run.batch.timeout_s
            if run.actor is run.slot.actor and run.slot not in first:
                first[run.slot] = (float("inf") if limit is None else run.slot.since + limit, reference)
        due, reference = min(first.values(), key=itemgetter(0), default=(float("inf"), None))
        return (None, None) if due == float("inf") else (max(0.0, due - time.monotonic()), reference)

    def _stop(self, run: _Run) -> None:
        """Stop an actor whose task runs too long; what else it has at hand runs again."""
        assert self._pool is not None
        self._pool.replace(run.slot)
        limit = run.batch.timeout_s
        run.batch.done[run.number] = ClientTimeout(
            f"{describe(run.task)}: not done after {limit:g} s: look for a loop without end, or raise faults.client_timeout_s"
        )

    def close(self) -> None:
        """Stop the actors, and Ray if this executor started it."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._batches, self._running, self._slabs = None, [], {}, []
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False


def _put(value: Any) -> Any:
    try:
        return ray.put(value)
    except NO_ROOM as e:
        raise _full(e) from e


def _full(error: Exception) -> FedfleetError:
    return FedfleetError(
        f"executor: {why(error)}, and so is the disk it spills to: free some space, lower cohort.invite, or take a smaller model"
    )
