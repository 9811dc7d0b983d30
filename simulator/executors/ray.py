"""Run blocks on a pool of Ray actors, each hosting as many virtual clients as come its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, Unpack

import torch

from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.errors import ClientError, ClientTimeout, FedfleetError
from fedfleet.simulator.executors.base import Host, How, Job, unsaid
from fedfleet.simulator.executors.batch import Batch, Held, Part, Results, Run, failure
from fedfleet.simulator.executors.cluster import send_whole, share_tensors, start_ray, stop_ray
from fedfleet.simulator.executors.fingerprint import Fingerprint, of_process
from fedfleet.simulator.executors.heartbeats import Heartbeats
from fedfleet.simulator.executors.messages import Messages
from fedfleet.simulator.executors.node_reducer import NodeReducers
from fedfleet.simulator.executors.nodes import Need, Nodes, Watch, look
from fedfleet.simulator.executors.pool import DIED, FIX, LOST, NO_ROOM, TRIES, Frozen, Pool, Slot, Unlike, describe, why
from fedfleet.simulator.executors.pool_spec import PoolSpec
from fedfleet.simulator.executors.store import full, put
from fedfleet.simulator.executors.vital import Vitals
from fedfleet.simulator.signals import put_off
from fedfleet.simulator.work import Message

MOMENT_S = 0.05  # how long what is done may be on its way


class RayExecutor:
    """A pool of ``ClientActor``s. Results come back in task order, so the number of actors never changes a bit.

    A block whose actor dies, or whose result is lost with a node, runs again elsewhere; blocks are pure, so that changes no bit.
    Without a number of actors there are as many as the nodes of a cluster have room for, more as others join.
    """

    def __init__(
        self,
        actors: int | None,
        cpus_per_actor: float = 1.0,
        gpus_per_actor: float = 0.0,
        threads: int = 1,
        address: str | None = None,
        cpus: int | None = None,
        allow_differences: bool = False,
        silent_s: float | None = None,
        memory_gb: float | None = None,
    ):
        need = Need(cpus_per_actor, gpus_per_actor, round((memory_gb or 0.0) * 1e9))
        self.events: list[dict[str, Any]] = []
        self.pool_spec, self._silent_s = PoolSpec(actors, need, threads), silent_s
        self._address, self._node_cpus, self._allow = address, cpus, allow_differences
        self._likeness = Fingerprint({}, self.events, allow=False)
        self._opened: Pool | None = None
        self._watch: Watch | None = None
        self._setup: Any = None  # in the object store
        self._batches, self._running = list[Batch](), dict[int, Run]()  # by the order of dispatch
        when = lambda *given: self._pool.event_queue.when(*given)  # noqa: E731
        self._joins = NodeReducers(when, self._not_joined, lambda place: self._pool.check(place))
        self._messages, self._order, self._started_ray = Messages(), count(), False

    @property
    def _pool(self) -> Pool:
        assert self._opened is not None, "start the executor first"
        return self._opened

    @property
    def put_s(self) -> float:
        """The seconds spent so far on making messages ready."""
        return self._messages.put_s

    @property
    def hosts(self) -> list[Host]:
        """The nodes that have worked."""
        return [] if self._opened is None else self._opened.hosts

    def start(self, setup: Setup, say: Callable[[str], None] = unsaid) -> None:
        """Put the setup once, and bring the actors up; those of an earlier run go on. Ray is started on loopback, or joined.

        Raises FedfleetError naming the node where a worker is not like this process, or has other data.
        """
        torch.set_num_threads(1)
        with put_off():  # or whoever closes this would not know that there is a Ray to stop
            if self._opened is None:
                self._started_ray = start_ray(self._address, self._node_cpus)
        with put_off():  # nor of actors
            share_tensors()
            send_whole()
            self._setup, self._batches = put(setup), []
            self._likeness = Fingerprint({**of_process(), **setup.read_here()}, self.events, allow=self._allow)
            if self._opened is None:
                self._opened = self._new_pool()
            else:
                self._pool.renew(lambda actor: actor.renew.remote(self._given()))
                self._joins.renew()
        self._pool.start(say)

    def _given(self) -> list[Any]:
        """Return what an actor is given: the setup, and the names of the author's modules that other processes have loaded."""
        return [self._setup, *self._likeness.modules()]

    def _new_pool(self) -> Pool:
        nodes = None if self._address is None else look(self.pool_spec.need)
        watched = Vitals() if self._started_ray else None
        fault = lambda place: self._likeness.fault(place)  # noqa: E731, which another run has another of
        pool = self.pool_spec.pool(self._given, self.events, fault, watched, nodes)
        if nodes is not None:
            sentries = None if self._silent_s is None else Heartbeats(self._silent_s)
            tell = lambda result: pool.event_queue.ring(partial(self._heed, result))  # noqa: E731
            self._watch = Watch(self.pool_spec.need, nodes, tell, sentries)
        return pool

    def _heed(self, nodes: Nodes) -> None:
        """Take note of how the cluster has changed. What actors of a silent node have at hand runs again elsewhere."""
        self._pool.heed(nodes)
        self._joins.gone(nodes.silent)
        for batch in self._batches:
            batch.gone(nodes.silent)
        for slot in self._pool.slots:
            if slot.up and slot.node in nodes.silent:
                blocks = self._take_back(slot.actor)
                told = {"node": nodes.address[slot.node], "slot": slot.number, "blocks": blocks}
                self.events.append({"event": "node_silent", **told})
                self._pool.replace(slot)
        self._dispatch()

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Unpack[How]) -> Iterator[Any]:
        """Put the shared trees once for all workers and start; yield results in task order.

        Tasks in the background run where no others wait. Raises ClientError, ClientTimeout, and FedfleetError where a task kills
        every actor, none is left, or the driver has loaded another module than workers had.
        """
        if (fault := self._likeness.late_fault()) is not None:
            raise Unlike(fault)
        batch = Batch(job, shared, tasks, **how)
        if batch.kind is not None:
            self._pool.begin(batch.kind)
        self._batches = sorted([*self._batches, batch], key=lambda b: b.background)
        try:
            self._dispatch()
        except BaseException:
            self.forget(batch)
            raise
        return Results(batch, self.take, self.forget)

    def take(self, batch: Batch) -> Any:
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
        result = batch.done.pop(batch.front)
        batch.front += 1
        self._dispatch()
        if isinstance(result, Exception):
            if not isinstance(result, ClientTimeout):
                self.forget(batch)
            raise result
        return result

    def forget(self, batch: Batch) -> None:
        """Start no more tasks of a batch."""
        self._batches = [b for b in self._batches if b is not batch]

    def _dispatch(self) -> None:
        """Give every actor that has room its next task. Where one cannot be sent, whoever takes its result is told."""
        for batch in self._batches:
            while batch.ready and (slot := self._pool.idlest(batch.kind, len(batch.waiting))) is not None:
                part = batch.next(slot.node)
                try:
                    self._send(batch, part, slot)
                except Exception as e:
                    batch.fail(part.number, e)

    def _send(self, batch: Batch, part: Part, slot: Slot) -> None:
        """Hand a part that waits to an actor.

        By the line where there is one, with its own tensors and the message in shared buffers, else by Ray.
        """
        order, near, when = next(self._order), slot.near, self._pool.event_queue.when
        message = self._messages.near(batch, self._needed()) if near is not None and near.free else None
        call = near.call(order, message, part.task) if near is not None and message is not None else None
        far = self._messages.far(batch) if call is None else None
        with put_off():
            mine, held = None, None
            if near is not None and call is not None:
                mine = near.free.pop()
                if not near.serving:
                    when(slot.actor.serve.remote(), partial(self._ended, slot, slot.actor))
                near.serving = True
                near.send(call)
            else:
                slot.pause()
                try:
                    if batch.alone(part):
                        reference = slot.actor.run.remote(batch.job, far, part.task)
                    else:
                        both = slot.actor.run_apart.options(num_returns=2).remote(batch.job, far, part.task)
                        reference, held = both[0], Held(both[1], slot.node)
                except NO_ROOM as e:
                    raise full(e) from e
                when(reference, partial(self._settle, order))
            batch.begun(part)
            if not slot.load:
                slot.since = time.monotonic()
            slot.load += 1
            self._running[order] = Run(order, batch, part, slot, slot.actor, mine, held)

    def _needed(self) -> Iterator[Batch]:
        """Yield the batches whose message is yet to be read."""
        yield from (b for b in self._batches if b.waiting)
        yield from (run.batch for run in self._running.values())

    def _receive(self) -> None:
        """Wait for a task to end, or for an actor to come up or die."""
        pool = self._pool
        assert pool is not None
        if not self._running and not self._joins and not pool.starting:
            raise FedfleetError("executor: no Ray actor is left")
        due_s, stop = self._next_due()
        came = pool.heard(due_s if self._running else pool.patience_s)
        if came is None:
            pool.check_patience()
            if stop is not None:
                with put_off():
                    stop()
            return
        with put_off():
            if isinstance(came, Slot):
                self._hear(came)
            else:
                came.answer()

    def _hear(self, slot: Slot) -> None:
        """Take what has come by a line. Everything answered is settled before a FedfleetError is raised."""
        assert slot.near is not None
        try:
            answers = slot.near.hear()
        except (OSError, EOFError):  # Ray will tell what became of the actor
            slot.hang_up()
            return
        fatal = None
        for order, result in answers:
            fatal = failure(self._settle, order, result) or fatal
        if fatal is not None:
            raise fatal

    def _ended(self, slot: Slot, actor: Any, future: Future[Any]) -> None:
        """Take note that an actor serves its line no more: it was told to stop, or is dead, and what it had at hand with it.

        Everything it had is settled before a FedfleetError is raised.
        """
        if actor is not slot.actor:  # it was replaced, and nobody hears what it answers
            self._take_back(actor)
            return
        error = future.exception()
        fatal = failure(self._hear, slot) if slot.near is not None else None  # what it answered before it ended
        for run in self._at_hand(actor) if error is not None else []:
            fatal = failure(self._settle, run.order, future) or fatal
        if fatal is not None:
            raise fatal
        if error is not None and actor is slot.actor:
            slot.hang_up()
            if isinstance(error, DIED):  # with nothing at hand
                self._pool.died(slot, error, 0, None)

    def _at_hand(self, actor: Any) -> list[Run]:
        """Return what an actor has to do, the first to be begun first."""
        return [run for run in self._running.values() if run.actor is actor]

    def _take_back(self, actor: Any) -> int:
        """Let what an actor has to do run again, elsewhere; return how many tasks that were."""
        mine = self._at_hand(actor)
        for run in mine:
            del self._running[run.order]
            run.batch.again(run.part)
        return len(mine)

    def _settle(self, order: int, future: Future[Any]) -> None:
        """Take the result of a task, or what became of it."""
        run = self._running.pop(order, None)
        if run is None:  # it was stopped, or runs again already
            return
        current = run.actor is run.slot.actor
        if current:
            run.slot.load -= 1
            run.slot.since = time.monotonic()
            if run.buffer is not None and run.slot.near is not None:
                run.slot.near.free.append(run.buffer)
        try:
            result, fault, seconds, modules = future.result()
            if run.buffer is not None:
                result = run.buffer.unpack(result)
        except LOST as e:
            self._lost(run, e, current)
        except Exception as e:
            self._took(run, e)
        else:
            self._took(run, ClientError(fault) if fault is not None else run.held or result)
            if current:
                self._pool.took(run.slot, run.part.task, seconds)
            if run.slot.place is not None:
                self._pool.check(run.slot.place._replace(has=modules))

    def _took(self, run: Run, result: Any) -> None:
        """Take what came of a part; once all parts of its task are there, they are joined."""
        whole = run.batch.settle(run.part, result)
        if whole is not None:
            self._joins.join(run.batch, run.part.number, whole)

    def _not_joined(self, batch: Batch, number: int, error: Exception) -> None:
        """Let a task run again whose parts were lost before they were joined. Raises FedfleetError where that was too often."""
        if (fatal := self._count(batch, batch.all_again(number), error)) is not None:
            raise fatal from error

    def _lost(self, run: Run, error: Exception, current: bool) -> None:
        """Let a task run again. Raises FedfleetError where it was lost too often, or no actor is left."""
        run.batch.again(run.part)
        fatal = None
        if not isinstance(error, DIED):
            fatal = self._count(run.batch, run.part, error)
        elif current:  # what else it had at hand comes back in the same way, and is not counted
            mine = [run, *self._at_hand(run.actor)]
            first = min(mine, key=lambda r: r.order)
            fatal = self._count(first.batch, first.part, error)
            try:
                self._pool.died(run.slot, error, len(mine), first.part.task)
            except FedfleetError as e:
                fatal = fatal or e
        if fatal is not None:
            raise fatal from error

    def _count(self, batch: Batch, part: Part, error: Exception) -> FedfleetError | None:
        """Count that a part was lost; return the error that ends the run where that was too often."""
        batch.lost[part.number, part.of] += 1
        if batch.lost[part.number, part.of] < TRIES:
            return None
        self.forget(batch)
        return FedfleetError(
            f"executor: {describe(part.task)}: lost {TRIES} times on Ray actors, the last time because {why(error)}: {FIX}; else "
            f"its code ends the process, as os._exit does, which drops no client: look for that with executor.kind=local"
        )

    def _next_due(self) -> tuple[float | None, Callable[[], None] | None]:
        """Return the seconds until an actor has taken too long, and what is then to be done; (None, None) where none can."""
        lines = ((s, s.near.frozen_at) for s in self._pool.slots if s.near is not None)
        due: list[tuple[float, Callable[[], None]]]
        due = [(at, partial(self._give_up, slot)) for slot, at in lines if at is not None]
        if any(batch.timeout_s is not None for batch in self._batches):
            due.extend(self._limits())
        if not due:
            return None, None
        at, stop = min(due, key=lambda d: d[0])
        return max(MOMENT_S, at - time.monotonic()), stop

    def _limits(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield of each actor when its task has run too long, and what is then to be done."""
        seen: set[Slot] = set()
        for run in self._running.values():  # of what an actor has at hand, the first is what runs
            if run.actor is run.slot.actor and run.slot not in seen:
                seen.add(run.slot)
                if run.batch.timeout_s is not None:
                    yield run.slot.since + run.batch.timeout_s, partial(self._stop, run)

    def _stop(self, run: Run) -> None:
        """Stop an actor whose task runs too long; what else it has at hand runs again."""
        del self._running[run.order]
        self._pool.replace(run.slot)
        limit = run.batch.timeout_s
        run.batch.done[run.part.number] = ClientTimeout(
            f"{describe(run.part.task)}: not done after {limit:g} s: look for a loop without end, or raise faults.client_timeout_s"
        )

    def _give_up(self, slot: Slot) -> None:
        """Take an actor for dead that does not go on with the answer it has begun."""
        dead: Future[Any] = Future()
        dead.set_exception(Frozen())
        self._settle(self._at_hand(slot.actor)[0].order, dead)

    def close(self) -> None:
        """Stop the actors, and Ray if this executor started it."""
        with put_off():
            if self._watch is not None:
                self._watch.close()
            dead = self._opened is not None and self._opened.dead
            if self._opened is not None:
                self._opened.close()
            self._joins.close()
            self._watch, self._opened, self._setup, self._batches = None, None, None, []
            self._running, self._messages = {}, Messages()
            if self._started_ray:
                stop_ray(dead=dead)
                self._started_ray = False
