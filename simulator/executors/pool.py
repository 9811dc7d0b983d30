"""A pool of Ray actors: one that dies is replaced, and a place where they keep dying is given up.

On a cluster it grows as nodes join, and gives no more blocks to actors of a node that is about to go while there are others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from fedfleet.simulator.block.chunk import Chunk
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.errors import FedfleetError, one_line
from fedfleet.simulator.executors.actor import Ready
from fedfleet.simulator.executors.base import Host, unsaid
from fedfleet.simulator.executors.cluster import R, ray
from fedfleet.simulator.executors.event_queue import EventQueue
from fedfleet.simulator.executors.fingerprint import Place
from fedfleet.simulator.executors.local_channel import STOP, LocalChannel, offered
from fedfleet.simulator.executors.nodes import Nodes
from fedfleet.simulator.executors.throughput import Worker, choose, forgotten, paced
from fedfleet.simulator.executors.vital import Vitals


class Frozen(Exception):
    """An actor does not go on with an answer it has begun."""


class Unlike(FedfleetError):
    """An actor has other things than the driver, and its blocks might have other bits."""


DIED = (R.RayActorError, R.OutOfMemoryError, R.NodeDiedError, R.WorkerCrashedError, Frozen)
NO_ROOM = (R.ObjectStoreFullError, R.OutOfDiskError)
LOST = (*DIED, *NO_ROOM, R.ObjectLostError)
"""What becomes of a block that is to run again: its actor died, or its result found no room or went with a node."""

TRIES = 3  # deaths in a row in one place, and runs of one block, until it is given up
IN_FLIGHT = 2  # blocks an actor has at hand, so that it never waits for the driver
PATIENCE_S, CLUSTER_PATIENCE_S = (
    300.0,
    1200.0,
)  # how long to wait for an actor where there is none at all; a node may take minutes
QUIET_S = 60.0  # until somebody is told that an actor is waited for
GRACE_S = 30.0  # how long to wait for another one, on a cluster whose nodes have other things to do
FIX = "if memory ran out, lower executor.actors or executor.block_size"
NAMED = 10  # clients of a block in a message, at most


@dataclass(eq=False)
class Slot:
    """A place for an actor.

    Attributes:
        number: of the place.
        actor: the one that is there, None where the place was given up.
        starting: whether it is not up yet.
        load: blocks at hand.
        deaths: in a row, with no block finished in between.
        since: when the first of the blocks at hand was begun, as far as the driver knows; by the monotonic clock.
        place: what the actor told of its node; None before it came up.
        paces: seconds a client takes it, by phase; ``used`` are the phases in which it had a block lately.
        near: what it shares with the driver; None on another machine, or where it cannot.

    """

    number: int
    actor: Any = None
    starting: bool = False
    load: int = 0
    deaths: int = 0
    since: float = 0.0
    near: LocalChannel | None = None
    place: Place | None = None
    paces: dict[str, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @property
    def up(self) -> bool:
        """Whether the actor takes blocks."""
        return self.actor is not None and not self.starting

    @property
    def node(self) -> str:
        """The id of the node of an actor that is up."""
        assert self.place is not None
        return self.place.id

    def pause(self) -> None:
        """Let the actor come back from its line, so that it hears what comes by way of Ray."""
        if self.near is not None and self.near.serving:
            self.near.send(STOP)
            self.near.serving = False

    def hang_up(self) -> None:
        """Share nothing any more."""
        if self.near is not None:
            self.near.close()
        self.near = None


class Pool:
    """The actors of ``create()``, which returns at once. What happens to them goes to ``events``.

    ``fault`` says why an actor with what it has is not to be taken, None where it is. ``vitals`` are Ray's
    own processes. ``nodes`` are those of a cluster; of an ``elastic`` pool ``size`` is what they have
    room for, and it grows with them: one that is not gets the actors that found no room as nodes join.
    """

    def __init__(
        self,
        size: int,
        create: Callable[[], Any],
        events: list[dict[str, Any]],
        fault: Callable[[Place], str | None] = lambda place: None,
        vitals: Vitals | None = None,
        nodes: Nodes | None = None,
        elastic: bool = False,
    ):
        self._create, self._events, self._fault, self._vitals = create, events, fault, vitals
        self._nodes, self._elastic = nodes, elastic
        self._patience_s = PATIENCE_S if nodes is None else CLUSTER_PATIENCE_S
        self._done: dict[str, Host] = {}
        self._under_way = False
        self.slots: list[Slot] = []
        self.event_queue = EventQueue()
        self._none_up_since = time.monotonic()
        self._grow(size)

    def _grow(self, count: int) -> None:
        new = [Slot(len(self.slots) + i) for i in range(count)]
        self.slots += new
        for slot in new:
            self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        slot.actor, slot.load, slot.starting = self._create(), 0, True
        slot.near = offered(IN_FLIGHT)  # not the last actor's buffers, to which it may yet be writing
        reference = slot.actor.ready.remote(None if slot.near is None else slot.near.offer)
        self.event_queue.when(reference, partial(self._settle, slot, slot.actor))

    def renew(self, give: Callable[[Any], Any]) -> None:
        """Give actors what another run needs, by ``give(actor)``; put fresh ones for those still at work and those given up."""
        self._under_way = False
        for slot in self.slots:
            slot.deaths = 0
            if slot.actor is None:
                self._fill(slot)
            elif slot.load or slot.starting:
                self.replace(slot)
            else:
                slot.pause()
                slot.starting = True
                self.event_queue.when(give(slot.actor), partial(self._renewed, slot, slot.actor))

    def _renewed(self, slot: Slot, actor: Any, future: Future[Ready]) -> None:
        """Take note that an actor has what another run needs; a fresh one tells why it could not have it."""
        if slot.actor is actor and isinstance(future.exception(), Exception):
            self.replace(slot)
        else:
            self._settle(slot, actor, future)

    def start(self, say: Callable[[str], None] = unsaid) -> None:
        """Wait until all actors are up; go on with those there are where others have found no room after a while.

        ``say`` is told once if none has come up and nothing has happened for ``QUIET_S`` seconds.
        Raises Unlike where one is not like the driver. One that comes later, for one that died, is given up as if it had died too.
        """
        until = time.monotonic() + self._patience_s
        told = False
        while not self._enough and (left := until - time.monotonic()) > 0:
            pause = left if told or self._up else min(left, QUIET_S)
            if not self._wait([], pause):
                if pause == left:
                    break
                told = True
                say(f"waiting for a Ray actor, {self._patience_s:g} s at most ({_free()})")
                continue
            up = self._up
            self.event_queue.answer()
            if self._nodes is not None and self._up > up:
                until = time.monotonic() + GRACE_S
        if not self._up:
            raise self._none_came()
        self._under_way = True

    @property
    def _up(self) -> int:
        return sum(s.up for s in self.slots)

    @property
    def _enough(self) -> bool:
        """Whether no more actors are to be waited for: others have room only once nodes have joined."""
        room = len(self.slots) if self._nodes is None else self._nodes.total
        return not self.starting or 0 < room <= self._up

    def heed(self, nodes: Nodes) -> None:
        """Take note of how the cluster has changed."""
        before, self._nodes = self._nodes, nodes
        joined = nodes.room.keys() - (before.room.keys() if before is not None else ())
        there = sum(s.actor is not None for s in self.slots)
        if self._elastic:
            self._grow(max(0, min(sum(nodes.room[node] for node in joined), nodes.total - there)))
        for node in sorted(joined):
            self._events.append({"event": "node_joined", "node": nodes.address[node], "room": nodes.room[node]})
        for node in sorted(nodes.leaving - (before.leaving if before is not None else frozenset())):
            self._events.append({"event": "node_leaves", "node": nodes.address[node]})
        for slot in self.slots:
            self.rest(slot)

    def rest(self, slot: Slot) -> None:
        """Let an actor go that has nothing at hand and whose node leaves, where others are up: a new one comes up elsewhere."""
        if slot.up and not slot.load and self._leaves(slot) and any(s.up and not self._leaves(s) for s in self.slots):
            self.replace(slot)

    def _leaves(self, slot: Slot) -> bool:
        return self._nodes is not None and slot.place is not None and slot.place.id in self._nodes.leaving

    def heard(self, timeout_s: float | None) -> EventQueue | Slot | None:
        """Wait for what rings, or an actor that answers by its line; return it, None where there was nothing in time.

        Raises FedfleetError where Ray is dead.
        """
        lines = {s.near.fileno(): s for s in self.slots if s.near is not None}
        ready = self._wait(list(lines), timeout_s)
        return None if not ready else lines.get(ready[0], self.event_queue)

    def _wait(self, lines: list[int], timeout_s: float | None) -> list[Any]:
        """Wait for the event queue, and for lines; return which are ready. Raises FedfleetError where Ray is dead."""
        vital = [] if self._vitals is None else self._vitals.descriptors
        ready = list[Any](wait([self.event_queue.fileno(), *lines, *vital], timeout_s))
        if self._vitals is not None:
            self._vitals.check(ready)
        return ready

    def _settle(self, slot: Slot, actor: Any, future: Future[Ready]) -> None:
        """Take note that an actor is up, or that it could not start. Raises FedfleetError where none is left."""
        if slot.actor is not actor:
            return
        try:
            ready = future.result()
        except DIED as e:
            self.died(slot, e, 0, None)
            return
        if (fault := self._fault(ready.place)) is not None:
            if not self._under_way:
                raise Unlike(fault)
            self.died(slot, Unlike(fault), 0, None)
            return
        slot.starting, slot.place = False, ready.place
        if slot.near is not None and ready.near:
            slot.near.taken()
        else:
            slot.hang_up()

    def idlest(self, kind: str | None = None, waiting: int = 1) -> Slot | None:
        """Return the slot that is to have the next of so many blocks, of a phase; None where those with room are to wait."""
        up = [s for s in self.slots if s.up]
        if self._nodes is not None and self._nodes.leaving:
            up = [s for s in up if not self._leaves(s)] or up
        result = choose([Worker(s.load, None if kind is None else s.paces.get(kind)) for s in up], IN_FLIGHT, waiting)
        return None if result is None else up[result]

    def took(self, slot: Slot, task: Any, seconds: float) -> None:
        """Take note of how long a task took on an actor, which now has one less at hand."""
        slot.deaths = 0
        assert slot.place is not None
        at = self._done.get(slot.place.node, Host(slot.place.node, 0))
        self._done[at.address] = at._replace(tasks=at.tasks + 1, busy_s=at.busy_s + seconds)
        if isinstance(task, BlockTask):
            slot.paces[task.phase] = paced(slot.paces.get(task.phase), seconds, len(task.clients))
            slot.used.add(task.phase)
        self.rest(slot)

    def check(self, place: Place) -> None:
        """Compare what a process of a node has just loaded. Raises Unlike where other processes have other modules."""
        if place.has and (fault := self._fault(place)) is not None:
            raise Unlike(fault)

    @property
    def hosts(self) -> list[Host]:
        """Who has done what, by the address of the node."""
        up = Counter(s.place.node for s in self.slots if s.up and s.place is not None)
        return [self._done.get(a, Host(a))._replace(workers=up[a]) for a in sorted({*self._done, *up})]

    def begin(self, kind: str) -> None:
        """Take note that blocks of a phase are about to come."""
        known = [s.paces[kind] for s in self.slots if kind in s.paces]
        for slot in self.slots:
            if kind in slot.paces and kind not in slot.used:
                slot.paces[kind] = forgotten(slot.paces[kind], min(known))
            slot.used.discard(kind)

    def died(self, slot: Slot, error: Exception, blocks: int, task: Any) -> None:
        """Replace an actor that died with so many ``blocks`` at hand, ``task`` the first of them; or give the place up.

        Raises FedfleetError where none is left.
        """
        slot.deaths += 1
        at = {"node": slot.place.node} if slot.up and slot.place is not None else {}
        self._events.append({"event": "worker_died", "slot": slot.number, **at, "blocks": blocks, "why": why(error)})
        if slot.deaths < TRIES:
            self.replace(slot)
            return
        self._remove(slot)
        self._events.append({"event": "worker_retired", "slot": slot.number, "deaths": slot.deaths})
        if all(s.actor is None for s in self.slots):
            if isinstance(error, Unlike):
                raise error
            at = "as it started" if task is None else f"with {describe(task)} at hand"
            raise FedfleetError(
                f"executor: no Ray actor is left, each died {TRIES} times in a row, the last {at} ({why(error)}): {FIX}"
            )

    def replace(self, slot: Slot) -> None:
        """Put a fresh actor in the place of another; it takes blocks once it is up."""
        self._remove(slot)
        self._fill(slot)
        if not any(s.up for s in self.slots):
            self._none_up_since = time.monotonic()

    def _remove(self, slot: Slot) -> None:
        ray.kill(slot.actor)  # one that only does not answer may come back
        slot.hang_up()
        slot.actor, slot.starting, slot.load = None, False, 0
        slot.paces.clear()

    @property
    def starting(self) -> bool:
        """Whether an actor is on its way."""
        return any(s.starting for s in self.slots)

    @property
    def patience_s(self) -> float | None:
        """The seconds left for an actor to come up where none is; None where one is."""
        if any(s.up for s in self.slots):
            return None
        return max(0.0, self._none_up_since + self._patience_s - time.monotonic())

    def _none_came(self) -> FedfleetError:
        return FedfleetError(
            f"executor: no Ray actor could start within {self._patience_s:g} s ({_free()}): lower executor.cpus_per_actor or "
            f"executor.gpus_per_actor, or add nodes"
        )

    def check_patience(self) -> None:
        """Raise FedfleetError where no actor is up and none has come for long."""
        if self.patience_s == 0.0:
            raise self._none_came()

    @property
    def dead(self) -> bool:
        """Whether Ray itself is, as far as is known."""
        return self._vitals is not None and self._vitals.dead

    def close(self) -> None:
        """Let all actors go."""
        for slot in self.slots:
            if slot.actor is not None:
                self._remove(slot)
        self.event_queue.close()
        if self._vitals is not None:
            self._vitals.close()


def _free() -> str:
    """Say what room is left for actors."""
    free = ray.available_resources()
    return "free: " + ", ".join(f"{free.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU"))


def why(error: Exception) -> str:
    """Say in a few words what an actor died of, or how a result was lost."""
    text = one_line(error)
    if isinstance(error, R.OutOfMemoryError) or "low on memory" in text:
        return "memory ran out, and Ray stopped it"
    if isinstance(error, Unlike):
        return text
    if isinstance(error, Frozen):
        return "it stopped in the middle of an answer"
    if isinstance(error, NO_ROOM):
        return "the object store is full"
    if isinstance(error, R.ObjectLostError):
        return "a result was lost with its node"
    if isinstance(error, R.RayActorError) and error.actor_init_failed:
        return one_line(str(error).rstrip().splitlines()[-1])
    if isinstance(error, R.ActorUnavailableError | R.NodeDiedError) or "node has died" in text:
        return "its node does not answer"
    return "its process was killed or crashed, as where memory runs out"


def describe(task: Any) -> str:
    """Name a task as a user knows it."""
    if isinstance(task, BlockTask):
        clients = task.clients.tolist()
        more = f" and {len(clients) - NAMED} more" if len(clients) > NAMED else ""
        return f"phase {task.phase!r}, clients {', '.join(map(str, clients[:NAMED]))}{more}"
    if isinstance(task, Chunk):
        return f"the evaluation of examples {task.start} to {task.stop} of {task.split!r}"
    return "a task"
