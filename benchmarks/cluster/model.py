"""A model of what a round costs on a cluster, fitted to rounds that were measured: eight rates, none of which is negative.

    begin   = phase + client C + bytes (put + sent (N - 1))
    back    = bytes (near / N + far (1 - 1 / N))
    joined  = bytes added R / W                    what a node does for one result, where R > W
    work    = ceil(B / A) block_s                  on actors that are alike
    tail    = min(A, R) block + joined + min(A, W) back        min(N, W) where results are joined
    driver  = R block + W back                     all results come to one process
    round   = begin + max(work + tail, block_s B / R + joined + driver)

N nodes, the driver on the first of them, A actors spread evenly, C clients in B blocks of so many seconds each, ``bytes`` of the
model, which travels down once a node and up once a result. Actors have R parts, of one block each or of several, and the driver W
results, of one part each or of several joined on a node, as ``cutting`` makes them of B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from fedfleet.simulator.driver.sharding import blocks_a_task, parts_a_task

GIGABIT = 1e9 / 8  # bytes


class Setting(NamedTuple):
    """A round that can be: ``size`` is the bytes of the model, ``block_s`` the seconds that the clients of a block take."""

    nodes: int
    actors: int
    blocks: int
    clients: int
    size: float
    block_s: float


class Rates(NamedTuple):
    """Seconds of what a round is made of.

    Attributes:
        phase: a round without clients.
        client: the driver's, a client.
        block: the driver's, a block without content.
        put: a byte of the model, made ready once.
        sent: a byte, to each node but the driver's.
        near, far: a byte that comes back, from the driver's node and from another.
        added: a byte of a part, joined to others on its node.

    """

    phase: float
    client: float
    block: float
    put: float
    sent: float
    near: float
    far: float
    added: float

    def over(self, gigabits: float) -> Rates:
        """Return the rates where nodes are linked by so many Gbit/s: no byte comes or goes faster than that."""
        least = 1 / (gigabits * GIGABIT)
        return self._replace(sent=max(self.sent, least), far=max(self.far, least))


START = Rates(phase=5e-3, client=5e-6, block=1e-3, put=5e-10, sent=1e-9, near=1e-9, far=2e-9, added=1e-9)


class Parts(NamedTuple):
    """Seconds of the parts of a round, and of all of it; parts overlap."""

    clients: float
    broadcast: float
    work: float
    dispatch: float
    merge: float
    round: float

    @property
    def limit(self) -> str:
        """Name what takes longest."""
        return max(self._fields[:-1], key=lambda name: getattr(self, name))


def parts(rates: Rates, of: Setting) -> Parts:
    """Return what a round would take, by part: broadcast is the model's way down, merge the way up and the sum."""
    clients = rates.phase + rates.client * of.clients
    broadcast = of.size * (rates.put + rates.sent * (of.nodes - 1))
    back = of.size * (rates.near + rates.far * (of.nodes - 1)) / of.nodes
    work = math.ceil(of.blocks / of.actors) * of.block_s
    each = blocks_a_task(of.blocks, of.actors, int(of.size))
    pieces = math.ceil(of.blocks / each)
    shared = parts_a_task(pieces, of.nodes, int(of.size))
    results = math.ceil(pieces / shared)
    joined = of.size * rates.added * shared if shared > 1 else 0.0
    last = min(of.actors if shared == 1 else of.nodes, results)
    dispatch, merge = pieces * rates.block, results * back
    tail = min(of.actors, pieces) * rates.block + joined + last * back
    busy = max(work + tail, each * of.block_s + joined + dispatch + merge)
    return Parts(clients, broadcast, work, dispatch, merge, clients + broadcast + busy)


def fit(measured: Sequence[tuple[Setting, float]]) -> Rates:
    """Return the rates whose rounds are, by their logarithms, nearest to those measured, in seconds."""
    settings, seconds = zip(*measured, strict=True)
    truth = np.log(seconds)

    def away(logarithms: np.ndarray) -> np.ndarray:
        rates = Rates(*np.exp(logarithms).tolist())
        return np.log([parts(rates, s).round for s in settings]) - truth

    start = np.log(START)
    found = least_squares(away, start, bounds=(start - 12, start + 12))
    return Rates(*np.exp(found.x).tolist())


def ratio(rates: Rates, setting: Setting, seconds: float) -> float:
    """Return what the model says over what was measured."""
    return parts(rates, setting).round / seconds
