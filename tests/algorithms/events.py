"""A federation played event by event, one client at a time: what the engine is compared with.

It reads who is online and how long devices take through the same hashed draws as the engine, and decides everything else by
itself, from a heap of events.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.responses import Outcome

LIMIT = 1e-9  # of what two ways to add the same seconds may differ by


@dataclass(frozen=True)
class Rules:
    """How a federation behaves.

    ``wait`` is "all", a number of answers, or (low, high) for SIWER.
    """

    seed: int
    clients: int
    availability: Any
    devices: Any
    wait: Any = "all"
    deadline: float = math.inf
    size: int = 5
    over_select: float = 1.0
    hazard: float = 0.0
    partial: bool = False
    least: int = 1
    attempts: int = 1
    retry_s: float = 1.0
    discount: float | None = None
    concurrency: int = 0
    buffer: int = 0
    bound: int | None = None

    @property
    def root(self):
        return rng.key(self.seed)

    def online(self, key, client, at_s) -> bool:
        return bool(self.availability.online(key, torch.tensor([client]), torch.tensor([at_s], dtype=torch.float64)))

    def times(self, key, client, load) -> tuple[float, float]:
        found = self.devices.times(rng.fold(key, torch.tensor([0])), torch.tensor([client]), load)
        return float(found.fixed), float(found.step)

    def breaks_after(self, key, client) -> float:
        if not self.hazard:
            return math.inf
        u = float(rng.uniform(rng.fold(rng.fold(key, 0), "failure", client), (), torch.float64))
        return -math.log1p(-u) / self.hazard


@dataclass
class Answer:
    """One invitation; ``seconds`` from the invitation to its end."""

    client: int
    outcome: Outcome = Outcome.UNAVAILABLE
    seconds: float = 0.0
    steps: int = 0
    asked_s: float = 0.0
    round: int = 0
    merged: bool = False


@dataclass
class Played:
    """One attempt at a phase."""

    phase: str
    attempt: int
    started_s: float
    duration_s: float
    answers: list[Answer]
    merged: list[Answer] = field(default_factory=list)
    used: bool = False


@dataclass
class Work:
    """A phase: its local steps, and whether they can be cut short."""

    name: str
    steps: int
    divisible: bool


class Sync:
    """A server that works in rounds of phases, each with a cohort of its own."""

    def __init__(self, rules: Rules, phases: list[Work], load: Callable[[Work], Load]):
        self.rules, self.phases, self.load = rules, phases, load
        self.clock_s, self.late = 0.0, dict[str, list[Answer]]()

    def round(self, index: int) -> tuple[list[Played], list[list[Answer]]] | None:
        """Play a round; return all attempts at phases, and for each phase what counts; None if it fails for good."""
        found: list[Played] = []
        for attempt in range(self.rules.attempts):
            late, heard = {k: [replace(a) for a in v] for k, v in self.late.items()}, []
            for number, work in enumerate(self.phases):
                played = self.phase(index, attempt, number, work)
                found.append(played)
                self.clock_s = played.started_s + played.duration_s
                mine = [a for a in played.answers if a.outcome is Outcome.COMPLETED]
                if len(mine) < self.rules.least:
                    break
                if self.rules.discount is not None:
                    for a in (a for a in played.answers if a.outcome is Outcome.LATE):
                        a.outcome = Outcome.STALE
                        late.setdefault(work.name, []).append(a)
                waiting = late.get(work.name, [])
                played.used = True
                played.merged = [a for a in waiting if a.round < index and a.asked_s + a.seconds <= self.clock_s]
                late[work.name] = [a for a in waiting if a not in played.merged]
                heard.append(mine + played.merged)
            else:
                self.late = late
                return found, heard
            self.clock_s += self.rules.retry_s
        return None

    def phase(self, index: int, attempt: int, number: int, work: Work) -> Played:
        r, start = self.rules, self.clock_s
        key = rng.fold(rng.fold(r.root, "phase", index, attempt), number)
        invitation = rng.fold(rng.fold(r.root, "invite", index, attempt), number)
        size = min(r.clients, math.ceil(round(r.size * r.over_select, 9)))
        cohort = rng.sample(invitation, r.clients, size).tolist()
        answers = [Answer(c, asked_s=start, round=index) for c in cohort]
        events: list[tuple[float, int, int, str]] = []
        for place, a in enumerate(answers):
            if not r.online(key, a.client, start):
                continue
            fixed, step = r.times(key, a.client, self.load(work))
            a.steps = work.steps
            if r.partial and work.divisible and fixed + step * work.steps > r.deadline:
                in_time = [m for m in range(1, work.steps) if fixed + step * m <= r.deadline]
                a.steps = max(in_time, default=work.steps)
            heapq.heappush(events, (fixed + step * a.steps, 1, place, "answer"))
            heapq.heappush(events, (r.breaks_after(key, a.client), 0, place, "break"))
        at_work = {place for _, _, place, what in events if what == "answer"}
        heapq.heappush(events, (r.deadline, 2, -1, "deadline"))
        wanted, came, closed = self.wanted(key, size), 0, None if at_work else 0.0
        while at_work:
            at, _, place, what = heapq.heappop(events)
            if what == "deadline":
                closed = at if closed is None else closed
                continue
            if place not in at_work:
                continue
            at_work.remove(place)
            a = answers[place]
            a.seconds = at
            if what == "break" or not r.online(key, a.client, start + at):
                a.outcome = Outcome.FAILED
            else:
                a.outcome = Outcome.COMPLETED if closed is None else Outcome.LATE
                came += closed is None
            if closed is None and (came == wanted or not at_work):
                closed = at
        assert closed is not None
        return Played(work.name, attempt, start, closed, answers)

    def wanted(self, key, size) -> float:
        r = self.rules
        if r.over_select > 1:
            return r.size
        if r.wait == "all":
            return math.inf
        if isinstance(r.wait, int):
            return r.wait
        low, high = r.wait
        p = high - (high - low) * float(rng.uniform(rng.fold(key, "responses"), (), torch.float64))
        return max(1, math.ceil(round(p * size, 9)))


@dataclass
class Flown:
    """An invitation of an asynchronous server, and its end."""

    client: int
    version: int
    outcome: Outcome
    ends_s: float


class Async:
    """A server whose clients work all the time: one event after another."""

    def __init__(self, rules: Rules, load: Load):
        self.rules, self.load = rules, load
        self.root = rng.fold(rules.root, "flights")
        self.clock_s, self.invitations = 0.0, 0
        self.queue: list[tuple[float, int, int, int, bool]] = []  # moment, number, client, version, whether it fails
        self.ended: list[Flown] = []
        self.most_at_work = 0

    def step(self, version: int) -> list[Flown] | None:
        """Fill a buffer; return the answers in it, or None if none come any more."""
        r, used, waits, moment = self.rules, [], 0, None
        self.ended = []
        while len(used) < r.buffer:
            self.launch(version, moment)
            if not self.queue:
                waits, moment = waits + 1, None
                self.clock_s += r.retry_s
                if waits == r.attempts:
                    return None
                continue
            ends_s, moment, client, sent, fails = heapq.heappop(self.queue)
            self.clock_s = ends_s
            if fails:
                outcome = Outcome.FAILED
            elif r.bound is not None and version - sent > r.bound:
                outcome = Outcome.LATE
            else:
                outcome = Outcome.COMPLETED if sent == version else Outcome.STALE
            self.ended.append(Flown(client, sent, outcome, ends_s))
            if outcome in (Outcome.COMPLETED, Outcome.STALE):
                used.append(self.ended[-1])
                waits = 0
        return used

    def launch(self, version: int, moment: int | None) -> None:
        r = self.rules
        vacant = min(r.concurrency, r.clients) - len(self.queue)
        if vacant == 0:
            return
        moment = -1 - self.invitations if moment is None else moment
        key = rng.fold(self.root, "launch", moment)
        for client in self.order(moment)[: 10 * vacant]:
            number, self.invitations = self.invitations, self.invitations + 1
            if not r.online(key, client, self.clock_s):
                self.ended.append(Flown(client, version, Outcome.UNAVAILABLE, self.clock_s))
                continue
            fixed, step = r.times(key, client, self.load)
            whole = fixed + step * float(self.load.steps)
            breaks = r.breaks_after(key, client)
            fails = breaks < whole or not r.online(key, client, self.clock_s + whole)
            heapq.heappush(self.queue, (self.clock_s + min(whole, breaks), number, client, version, fails))
            vacant -= 1
            if vacant == 0:
                break
        self.most_at_work = max(self.most_at_work, len(self.queue))

    def order(self, moment: int) -> list[int]:
        """Return the idle clients in the order in which they would be invited: the same draws as the engine's."""
        r, busy = self.rules, {client for _, _, client, _, _ in self.queue}
        idle = [c for c in range(r.clients) if c not in busy]
        key = rng.fold(rng.fold(self.root, "launch"), "invite", moment)
        if len(idle) * 32 <= r.clients:
            return [idle[i] for i in rng.permutation(key, len(idle)).tolist()]
        drawn = (rng.uniform(key, 100 * r.clients, torch.float64) * r.clients).long().tolist()
        found = [c for c in dict.fromkeys(drawn) if c not in busy]
        assert len(found) == len(idle), "draw more"
        return found
