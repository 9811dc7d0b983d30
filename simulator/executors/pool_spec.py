"""Specification of a pool: the actors that an executor wants, and how Ray is asked for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fedfleet.simulator.executors.actor import ClientActor
from fedfleet.simulator.executors.cluster import ray
from fedfleet.simulator.executors.fingerprint import Place
from fedfleet.simulator.executors.nodes import Need, Nodes
from fedfleet.simulator.executors.pool import Pool
from fedfleet.simulator.executors.vital import Vitals


class PoolSpec(NamedTuple):
    """So many actors, None for as many as the nodes of a cluster have room for, what each takes of its node, and torch threads."""

    actors: int | None
    need: Need
    threads: int

    def pool(
        self,
        setup: Callable[[], list[Any]],
        events: list[dict[str, Any]],
        fault: Callable[[Place], str | None],
        vitals: Vitals | None,
        nodes: Nodes | None,
    ) -> Pool:
        """Ask for them; the arguments are those of ``Pool``, and what an actor is given as it starts. ``nodes`` are a cluster's."""
        # Ray's own account of every task would grow with the rounds.
        options: dict[str, Any] = {"num_cpus": self.need.cpus, "num_gpus": self.need.gpus, "enable_task_events": False}
        if self.need.memory_bytes:
            options["memory"] = self.need.memory_bytes
        if nodes is not None:
            options["scheduling_strategy"] = "SPREAD"
        remote = ray.remote(ClientActor).options(**options)  # pyright: ignore
        size = self.actors or (0 if nodes is None else nodes.total)
        create = lambda: remote.remote(setup(), self.threads)  # noqa: E731
        return Pool(max(1, size), create, events, fault, vitals, nodes, self.actors is None)
