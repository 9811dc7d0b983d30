"""Numbers of a run for Ray's dashboard, and whoever else reads Ray's metrics, which its agents export as ``ray_fedfleet_…``."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ray.util.metrics import Gauge

from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.executors.base import Executor

EVERY_S = 1.0  # Ray gathers them every few seconds
WHAT = {
    "rounds": "rounds done",
    "rounds_per_second": "1 / seconds of the last round, evaluation left out",
    "client_steps_per_second": "local steps of all clients in the last round, over its seconds",
    "completed_share": "clients that completed in the last round, over those invited",
    "bytes_up": "bytes that clients sent in the last round",
    "bytes_down": "bytes that were sent to clients in the last round",
    "virtual_seconds": "the virtual clock after the last round",
    "actors": "Ray actors that are up",
    "nodes": "nodes that have such actors",
    "block_seconds": "mean seconds of a block on its actor",
    "dead_actors": "actors that have died",
    "retried_blocks": "blocks that were lost with an actor or a node and ran again",
}


class MetricsExport:
    """Shows the last round, and what the workers have done since the first."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._dead = self._retried = 0
        self._next_s = 0.0

    def show(self, record: RoundRecord, executor: Executor) -> None:
        """Take note of a round, and of what has happened to the workers since the last one; show it now and then."""
        died = [e for e in executor.events if e["event"] == "worker_died"]
        self._dead += len(died)
        self._retried += sum(e["blocks"] for e in executor.events if e["event"] in ("worker_died", "node_silent"))
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        lost = {"dead_actors": self._dead, "retried_blocks": self._retried}
        for name, value in {**dict(_of_round(record)), **dict(_of_workers(executor)), **lost}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"fedfleet_{name}", WHAT[name])
            self._gauges[name].set(float(value))


def _of_round(record: RoundRecord) -> Iterator[tuple[str, float]]:
    def total(name: str) -> int:
        return sum(p.counts[name] for p in record.phases)

    yield "rounds", record.index + 1
    yield "rounds_per_second", 1 / max(record.seconds, 1e-9)
    yield "client_steps_per_second", total("client_steps") / max(record.seconds, 1e-9)
    yield "completed_share", total("completed") / max(1, total("invited"))
    yield from ((name, total(name)) for name in ("bytes_up", "bytes_down"))
    yield "virtual_seconds", record.virtual_s


def _of_workers(executor: Executor) -> Iterator[tuple[str, float]]:
    hosts = executor.hosts
    yield "actors", sum(h.workers for h in hosts)
    yield "nodes", sum(h.workers > 0 for h in hosts)
    yield "block_seconds", sum(h.busy_s for h in hosts) / max(1, sum(h.tasks for h in hosts))
