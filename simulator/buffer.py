"""Fill an asynchronous server's buffer: let time pass until enough answers are in."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator import rng
from fedfleet.simulator.devices import Load
from fedfleet.simulator.flights import Flight, Flights
from fedfleet.simulator.responses import Fate, Federation, Responses, outcomes
from fedfleet.simulator.rng import Key

TRIES = 10  # cohorts invited at one moment before places stay empty until the next answer


class Server(NamedTuple):
    """What filling a buffer needs to know.

    Attributes:
        federation: how clients behave.
        clients: N.
        load: the work of some clients, given by their numbers.
        root: the run's key.
        version: the present round, hence the model that clients are sent now.
        concurrency: clients at work at any time.
        max_staleness: older answers are thrown away; None keeps all.
        tries, retry_s: how often to wait so many seconds where nobody can be reached, and how many times as many invitations
            as there are places to let go by without an answer.
        dropped: numbers of flights from which no answer comes, since the client is at fault.

    """

    federation: Federation
    clients: int
    load: Callable[[Tensor], Load]
    root: Key
    version: int
    concurrency: int
    max_staleness: int | None
    tries: int
    retry_s: float
    dropped: Set[int] = frozenset()


class Ended(NamedTuple):
    """Invitations that came to an end, in order: numbers, fates, moments; and what was used."""

    responses: Responses
    clients: Tensor
    used: list[Flight]
    launched: int


def fill(server: Server, flights: Flights, size: int, started_s: float) -> Ended:
    """Let clients work until ``size`` answers are in, or too many tries brought none.

    Whenever one ends, another is invited, uniformly among those not at work.
    """
    ended: list[tuple[int, Fate, float, int]] = []
    used: list[Flight] = []
    before, clock_s, waits, barren = flights.launched, started_s, 0, 0
    while len(used) < size and waits < server.tries and barren < server.tries * max(server.concurrency, size):
        _launch(server, flights, clock_s, ended)
        if not len(flights):
            waits, clock_s = waits + 1, clock_s + server.retry_s
            continue
        barren += 1
        flight = flights.next()
        clock_s = max(clock_s, flight.ends_s)
        staleness = server.version - flight.version
        if flight.fails or flight.number in server.dropped:
            fate = Fate.FAILED
        elif server.max_staleness is not None and staleness > server.max_staleness:
            fate = Fate.LATE
        else:
            fate = Fate.STALE if staleness else Fate.HEARD
            used.append(flight)
            waits = barren = 0
        ended.append((flight.client, fate, flight.ends_s, flight.steps))
    clients, fates, ends, steps = zip(*ended, strict=True) if ended else ((), (), (), ())
    seconds = torch.tensor(ends, dtype=torch.float64) - started_s
    responses = Responses(
        torch.tensor([int(f) for f in fates], dtype=torch.int8), seconds, clock_s - started_s, torch.tensor(steps)
    )
    online = flights.launched - before - sum(f == Fate.OFFLINE for f in fates)
    return Ended(responses, torch.tensor(clients, dtype=torch.int64), used, online)


def _launch(server: Server, flights: Flights, clock_s: float, ended: list[tuple[int, Fate, float, int]]) -> None:
    """Invite clients until as many as should be are at work; those offline are noted, and others invited in their place."""
    for _ in range(TRIES):
        busy = torch.tensor(sorted(flights.clients()), dtype=torch.int64)
        wanted = min(server.concurrency - len(flights), server.clients - len(flights))
        if wanted <= 0:
            return
        key = rng.fold(server.root, "launch", flights.launched)
        drawn = rng.sample(rng.fold(key, "invite"), server.clients, min(server.clients, wanted + len(busy)))
        clients = drawn[~torch.isin(drawn, busy)][:wanted]
        numbers = flights.launched + torch.arange(len(clients))
        flights.launched += len(clients)
        found = outcomes(server.federation, clients, numbers, server.load(clients), clock_s, key)
        rows = zip(*(v.tolist() for v in (clients, numbers, *found)), strict=True)
        for client, number, online, failed, seconds, steps in rows:
            if online:
                flights.add(Flight(clock_s + seconds, number, client, server.version, steps, failed))
            else:
                ended.append((client, Fate.OFFLINE, clock_s, 0))
