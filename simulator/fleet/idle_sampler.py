"""Sampler of an asynchronous server: uniform draws among the clients that are not at work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key

CROWDED = 32
"""Where at most one in so many clients is idle, the idle ones are listed; elsewhere a draw is repeated until it finds one."""
CHUNK = 8  # draws made together


class IdleSampler:
    """Keeps who is at work.

    Args:
        root: the key of all draws.
        clients: N.
        places: clients at work at most.
        busy: those at work now.

    """

    def __init__(self, root: Key, clients: int, places: int, busy: Iterable[int]):
        self.clients, self.busy = clients, set(busy)
        self._root, self._streams = root, dict[int, list[int]]()
        crowded = (clients - places) * CROWDED <= clients
        self._marks = bytearray(clients) if crowded else None
        if self._marks is not None:
            for client in self.busy:
                self._marks[client] = 1

    def copy(self) -> IdleSampler:
        """Return a copy that goes its own way."""
        result = object.__new__(IdleSampler)
        result.__dict__ = {**self.__dict__, "busy": self.busy.copy()}
        result._marks = None if self._marks is None else self._marks.copy()
        return result

    def start(self, client: int) -> None:
        """Set a client to work."""
        self.busy.add(client)
        if self._marks is not None:
            self._marks[client] = 1

    def stop(self, client: int) -> None:
        """Say that a client has ended its work."""
        self.busy.discard(client)
        if self._marks is not None:
            self._marks[client] = 0

    def draw(self, moment: int) -> Iterator[int]:
        """Yield all idle clients in a random order that the key of the moment and who is busy now decide."""
        free = self.clients - len(self.busy)
        if self._marks is not None and free * CROWDED <= self.clients:
            idle = np.flatnonzero(np.frombuffer(self._marks, np.uint8) == 0)
            yield from idle[rng.permutation(self._key(moment), len(idle)).numpy()].tolist()
            return
        seen: set[int] = set()
        for client in self._stream(moment):
            if client not in self.busy and client not in seen:
                seen.add(client)
                yield client
                if len(seen) == free:
                    return

    def prepare(self, moments: list[int]) -> None:
        """Make the first draws of moments to come, together."""
        new = [m for m in moments if m not in self._streams]
        if new:
            drawn = self._drawn(torch.tensor(new), 0, CHUNK)
            self._streams.update(zip(new, drawn, strict=True))

    def forget(self) -> None:
        """Drop the draws made so far, which all copies share."""
        self._streams.clear()

    def _stream(self, moment: int) -> Iterator[int]:
        """Yield independent uniform draws of all clients, for ever."""
        self.prepare([moment])
        made = self._streams[moment]
        for i in count():
            if i == len(made):
                made += self._drawn(torch.tensor([moment]), i, i)[0]
            yield made[i]

    def _drawn(self, moments: torch.Tensor, first: int, size: int) -> list[list[int]]:
        at = torch.arange(first, first + size)
        u = rng.uniform_at(self._key(moments)[:, None], at)
        return (u * self.clients).to(torch.int64).tolist()

    def _key(self, moment: int | torch.Tensor) -> Key:
        return rng.fold(self._root, "invite", moment)
