"""A pool on actors made up, to see what becomes of its slots."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import ray
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.executors import pool
from fedfleet.simulator.executors.actor import Ready
from fedfleet.simulator.executors.fingerprint import Place
from fedfleet.simulator.executors.pool import Pool


def block(phase="train", clients=3):
    return BlockTask(phase, torch.arange(clients), torch.zeros(clients), rng.key(0))


class Places:
    """A pool whose actors are up at once, each on the node that is ``next``; those of no node never are."""

    def __init__(self, size, monkeypatch, nodes=None, elastic=False, next="here"):
        monkeypatch.setattr(pool.ray, "kill", lambda actor: None)
        self.events: list[dict[str, Any]] = []
        self.made, self.next = 0, next
        self.pool = Pool(size, self.create, self.events, nodes=nodes, elastic=elastic)
        if nodes is None:
            self.come()

    def create(self):
        self.made += 1
        up = Future()
        if self.next is not None:
            up.set_result(Ready(False, Place(self.next, {}, id=self.next)))
        return SimpleNamespace(ready=SimpleNamespace(remote=lambda offer: SimpleNamespace(future=lambda: up)), up=up)

    def come(self):
        while any(s.starting for s in self.pool.slots):
            self.pool.event_queue.answer()

    def kill(self, number):
        self.pool.died(self.pool.slots[number], ray.exceptions.ActorDiedError(), 2, block())

    @property
    def at(self):
        """The nodes of the actors that are up, in the order of their places."""
        return [s.place.node for s in self.pool.slots if s.up and s.place is not None]
