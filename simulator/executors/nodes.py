"""The nodes of a cluster while a run is on: how many actors each has room for, and which are about to go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from fedfleet.simulator.executors.cluster import ray, ray_worker, start_ray, stop_ray
from fedfleet.simulator.executors.heartbeats import Heartbeats

LOOK_S = 5.0  # between two looks at the cluster
SLACK = 1e-6  # 0.1 CPUs go ten times into one


class Need(NamedTuple):
    """What an actor takes of its node."""

    cpus: float
    gpus: float
    memory_bytes: int = 0

    def fits(self, resources: Mapping[str, float]) -> int:
        """Return how many actors a node with these resources has room for."""
        asked = (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory_bytes))
        return min(int(resources.get(kind, 0.0) / amount + SLACK) for kind, amount in asked if amount > 0)


class Nodes(NamedTuple):
    """The nodes that are alive, by id: how many actors each would take were it empty, its address, and which leave or are silent.

    One that leaves has been told to drain, as before a spot instance is taken away: what it has at hand it may yet finish. One that
    is silent is alive for all that Ray knows, and has not answered for long.
    """

    room: Mapping[str, int]
    address: Mapping[str, str]
    leaving: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        """Return how many actors the nodes that stay have room for."""
        return sum(self._staying.values())

    @property
    def _staying(self) -> dict[str, int]:
        return {node: room for node, room in self.room.items() if node not in self.leaving}

    def spread(self, actors: int) -> dict[str, int]:
        """Return how many of so many actors each node that stays would have: evenly, as Ray spreads them, while there is room."""
        room, given = self._staying, dict.fromkeys(self._staying, 0)
        for _ in range(min(actors, self.total)):
            given[min((n for n in room if given[n] < room[n]), key=given.__getitem__)] += 1
        return given


def look(need: Need) -> Nodes:
    """Ask the cluster that Ray has joined."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    leaving: Any = ray_worker.global_worker.gcs_client.get_draining_nodes(timeout=LOOK_S)  # pyright: ignore[reportAttributeAccessIssue]
    return Nodes(
        {name: need.fits(node["Resources"]) for name, node in alive.items()},
        {name: node["NodeManagerAddress"] for name, node in alive.items()},
        frozenset(leaving) & frozenset(alive),
    )


def visit(address: str, need: Need) -> Nodes:
    """Join a cluster for a look at it, and leave it again. Raises FedfleetError where there is none."""
    joined = start_ray(address, None)
    try:
        return look(need)
    finally:
        if joined:
            stop_ray()


class Watch:
    """A thread that looks at the cluster again and again, and calls ``tell`` with what it found where that has changed.

    With ``sentries`` it asks them too, on other nodes than this one.
    """

    def __init__(self, need: Need, seen: Nodes, tell: Callable[[Nodes], None], sentries: Heartbeats | None = None):
        self._need, self._seen, self._tell, self._sentries = need, seen, tell, sentries
        self._pause_s = LOOK_S if sentries is None else min(LOOK_S, sentries.silent_s / 4)
        self._here = ray.get_runtime_context().get_node_id() if sentries is not None else ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedfleet-nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(Exception):  # at once, so that they are up before there is work to lose
            self._ask(self._seen)
        while not self._end.wait(self._pause_s):
            with suppress(
                Exception
            ):  # a head that does not answer now may do so later; what it means for actors, Ray tells
                result = self._ask(look(self._need))
                if result != self._seen:
                    self._seen = result
                    self._tell(result)

    def _ask(self, result: Nodes) -> Nodes:
        """Return what was found with the nodes whose sentries are silent."""
        if self._sentries is None:
            return result
        return result._replace(silent=self._sentries.silent(result.room.keys() - {self._here}))

    def close(self) -> None:
        """Look no more; to be called before Ray is left."""
        self._end.set()
        self._thread.join(2 * LOOK_S)
        if self._sentries is not None:
            self._sentries.close()
