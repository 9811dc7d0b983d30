"""Fill an asynchronous server's buffer: let time pass until enough answers are in.

Events follow one another, each depending on the last: whoever ends makes room for another, invited at that moment. Models of
devices and availability answer for many clients at once in the time they take for one, so a stretch of events is played as
far as is known how those invited fare, the others taken to work for ever; then all that was missing is asked for together, and
the stretch is played again. What is kept was played with nothing missing, hence is what one event after the other gives.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.idle_sampler import IdleSampler
from fedfleet.simulator.fleet.in_flight import Flights, InFlight
from fedfleet.simulator.fleet.responses import Federation, Outcome, Responses, timelines

TRIES = 10  # times as many invitations as empty places at one moment, before places stay empty until the next answer
LONG = 8  # times as many invitations as events end a stretch early: what is played again should be short
ROUNDING = 1e-9  # of a step's seconds, by which an answer may come later: sums of seconds are rounded
USED = (Outcome.COMPLETED, Outcome.STALE)
STRETCH = 32  # one in so many clients at work ends in a stretch, so that hardly one of those invited meanwhile does


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
    """Invitations that came to an end, in order: numbers, outcomes, moments; and what was used."""

    responses: Responses
    clients: Tensor
    used: list[InFlight]
    launched: int


class Asked(NamedTuple):
    """An invitation: the moment's number, the client, the virtual time."""

    moment: int
    client: int
    at_s: float


class Answer(NamedTuple):
    """How it goes: online, failed on the way, seconds until the end, steps taken."""

    online: bool
    failed: bool
    seconds: float
    steps: int


UNKNOWN = Answer(online=True, failed=False, seconds=math.inf, steps=0)


def fill(server: Server, flights: Flights, size: int, started_s: float) -> Ended:
    """Let clients work until ``size`` answers are in, or too many tries brought none.

    Whenever one ends, another is invited, uniformly among those not at work; those offline are noted, and others invited in
    their place, nobody twice at one moment.
    """
    places = min(server.concurrency, server.clients)
    idle = IdleSampler(rng.fold(server.root, "launch"), server.clients, places, flights.clients())
    now = _Play(server, size, places, idle, flights.under_way(), flights.launched, started_s)
    stretch = max(1, places // STRETCH)
    while not now.over:
        known, soon = dict[Asked, Answer](), heapq.nsmallest(stretch, now.queue)
        idle.prepare([f.number for f in soon])
        ahead = 1
        while missing := (trial := now.copy()).play(stretch, known, ahead):
            known |= _ask(server, missing)
            ahead *= 2
        now = trial
        idle.forget()
    flights.replace(now.queue, now.launched)
    ended = [(client, outcome, at_s - started_s, steps) for client, outcome, at_s, steps in now.ended]
    return _ended(ended, now.clock_s - started_s, now.used, now.taken_up)


def lapse(server: Server, flights: Flights, seconds: float, started_s: float) -> Ended:
    """Let so many seconds pass.

    Clients that are not at work are invited when they begin, drawn uniformly where the server has fewer places. Whoever is
    offline then leaves a place empty, and whoever ends meanwhile waits for the next call.
    """
    queue, idle = flights.under_way(), torch.ones(server.clients, dtype=torch.bool)
    idle[torch.tensor([f.client for f in queue], dtype=torch.int64)] = False
    clients, key = idle.nonzero().flatten(), rng.fold(server.root, "lapse", server.version)
    places = min(server.concurrency, server.clients) - len(queue)
    if places < len(clients):
        clients = clients[rng.sample(rng.fold(key, "idle"), len(clients), places)]
    result = timelines(server.federation, clients, torch.zeros_like(clients), server.load(clients), started_s, key)
    answers = map(Answer, *(v.tolist() for v in result))
    invited = list(zip(clients.tolist(), answers, strict=True))
    queue += [
        InFlight(started_s + a.seconds, flights.launched + i, client, server.version, a.steps, a.failed)
        for i, (client, a) in enumerate(invited)
        if a.online
    ]
    until_s = started_s + seconds * (1 + ROUNDING)
    done = sorted(f for f in queue if f.ends_s <= until_s)
    left = sorted(f for f in queue if f.ends_s > until_s)
    flights.replace(left, flights.launched + len(clients))
    ended = [(client, Outcome.UNAVAILABLE, 0.0, 0) for client, a in invited if not a.online]
    ended += [(f.client, _fate(server, f), f.ends_s - started_s, f.steps) for f in done]
    used = [f for f, (_, outcome, _, _) in zip(done, ended[len(ended) - len(done) :], strict=True) if outcome in USED]
    return _ended(ended, seconds, used, launched=sum(a.online for _, a in invited))


def _ended(ended: list[tuple[int, Outcome, float, int]], seconds: float, used: list[InFlight], launched: int) -> Ended:
    """Return what ended in so many seconds: clients, outcomes, seconds since they began, steps."""
    clients, outcomes, ends, steps = zip(*ended, strict=True) if ended else ((), (), (), ())
    responses = Responses(
        torch.tensor([int(f) for f in outcomes], dtype=torch.int8),
        torch.tensor(ends, dtype=torch.float64),
        seconds,
        torch.tensor(steps, dtype=torch.int64),
    )
    return Ended(responses, torch.tensor(clients, dtype=torch.int64), used, launched)


def _fate(server: Server, flight: InFlight) -> Outcome:
    """Return what became of an invitation that has ended."""
    staleness, bound = server.version - flight.version, server.max_staleness
    if flight.fails or flight.number in server.dropped:
        return Outcome.FAILED
    if bound is not None and staleness > bound:
        return Outcome.LATE
    return Outcome.STALE if staleness else Outcome.COMPLETED


def _ask(server: Server, asked: list[Asked]) -> dict[Asked, Answer]:
    """Return how invitations go, from draws that depend on the moment's number and the client."""
    moments, clients = (torch.tensor(column) for column in list(zip(*asked, strict=True))[:2])
    at_s = torch.tensor([a.at_s for a in asked], dtype=torch.float64)
    key = rng.fold(server.root, "launch", moments)
    result = timelines(server.federation, clients, torch.zeros_like(clients), server.load(clients), at_s, key)
    return dict(zip(asked, map(Answer, *(v.tolist() for v in result)), strict=True))


@dataclass
class _Play:
    """The server at a moment; ``play`` lets time pass."""

    server: Server
    size: int
    places: int
    idle: IdleSampler
    queue: list[InFlight]
    launched: int
    clock_s: float
    opened: int | None = None  # number of the flight whose end is the present moment
    invited: bool = False  # whether the invitations of the present moment are out
    ended: list[tuple[int, Outcome, float, int]] = field(default_factory=list)
    used: list[InFlight] = field(default_factory=list)
    taken_up: int = 0
    waits: int = 0
    barren: int = 0

    @property
    def over(self) -> bool:
        """Whether the buffer is full, or too many tries brought nothing."""
        s = self.server
        limit = s.tries * max(s.concurrency, self.size)
        return len(self.used) >= self.size or self.waits >= s.tries or self.barren >= limit

    def copy(self) -> _Play:
        """Return a copy that goes its own way."""
        return replace(
            self, idle=self.idle.copy(), queue=self.queue.copy(), ended=self.ended.copy(), used=self.used.copy()
        )

    def play(self, events: int, known: dict[Asked, Answer], ahead: int) -> list[Asked]:
        """Go on for some events, and return the invitations of which it is not known how they go.

        ``ahead`` times as many are listed as are needed if all of them are taken up.
        """
        missing: list[Asked] = []
        before = self.launched
        for _ in range(events):
            if self.over:
                break
            if not self.invited:
                self._launch(known, missing, ahead)
                self.invited = True
            if self.launched - before > LONG * events:
                break
            if not self.queue:
                self.waits, self.clock_s, self.opened = self.waits + 1, self.clock_s + self.server.retry_s, None
                self.invited = False
            elif math.isinf(self.queue[0].ends_s):
                break
            else:
                self._end(heapq.heappop(self.queue))
        return missing

    def _end(self, flight: InFlight) -> None:
        self.idle.stop(flight.client)
        self.clock_s, self.opened, self.invited = max(self.clock_s, flight.ends_s), flight.number, False
        self.barren += 1
        outcome = _fate(self.server, flight)
        if outcome in USED:
            self.used.append(flight)
            self.waits = self.barren = 0
        self.ended.append((flight.client, outcome, flight.ends_s, flight.steps))

    def _launch(self, known: dict[Asked, Answer], missing: list[Asked], ahead: int) -> None:
        """Invite clients until as many as should be are at work, or enough have been tried."""
        vacant = self.places - len(self.queue)
        if not vacant:
            return
        moment = -1 - self.launched if self.opened is None else self.opened
        drawn = islice(self.idle.draw(moment), TRIES * vacant)
        unknown = 0
        for client in drawn:
            asked = Asked(moment, client, self.clock_s)
            result = known.get(asked, UNKNOWN)
            if result is UNKNOWN:
                unknown += 1
                missing.append(asked)
            if result.online:
                ends_s = self.clock_s + result.seconds
                flight = InFlight(ends_s, self.launched, client, self.server.version, result.steps, result.failed)
                heapq.heappush(self.queue, flight)
                self.idle.start(client)
                self.taken_up += 1
                vacant -= 1
            else:
                self.ended.append((client, Outcome.UNAVAILABLE, self.clock_s, 0))
            self.launched += 1
            if not vacant:
                break
        missing += [Asked(moment, client, self.clock_s) for client in islice(drawn, unknown * (ahead - 1))]
