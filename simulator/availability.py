"""Who can be reached, how long an answer takes, and whom the server waits for. Every draw is a pure function of a key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedfleet.simulator import rng
from fedfleet.simulator.rng import Key


class Fate(IntEnum):
    """What became of an invited client in a phase."""

    HEARD = 0
    LATE = 1
    FAILED = 2
    OFFLINE = 3


class Availability(Protocol):
    """Draws which invited clients are online at the invitation."""

    def online(self, key: Key, clients: Tensor) -> Tensor:
        """Return bool (S,) for clients (S,)."""
        ...


@dataclass(frozen=True)
class Always:
    """Every client is online."""

    def online(self, key: Key, clients: Tensor) -> Tensor:
        """Return all true."""
        return torch.ones(len(clients), dtype=torch.bool)


@dataclass(frozen=True)
class Bernoulli:
    """Each client is online with probability ``rate``, afresh at every invitation."""

    rate: float

    def online(self, key: Key, clients: Tensor) -> Tensor:
        """Return independent draws, one a client."""
        return rng.bernoulli(rng.fold(key, "online", clients), self.rate)


@dataclass(frozen=True)
class ResponseTime:
    """An invited client answers after ``median_s * exp(sigma * normal)`` virtual seconds, independently in every phase.

    Times are alike for all clients, so the first S answers are a uniformly random subset of those online (CDMA, section 2).
    """

    median_s: float = 1.0
    sigma: float = 0.5

    def seconds(self, key: Key, clients: Tensor) -> Tensor:
        """Return float64 (S,)."""
        return self.median_s * torch.exp(self.sigma * rng.normal(rng.fold(key, "seconds", clients), (), torch.float64))


class ResponsePolicy(Protocol):
    """How many answers the server waits for."""

    def wanted(self, invited: int, key: Key) -> int:
        """Return a number of answers, at most ``invited``."""
        ...


@dataclass(frozen=True)
class WaitAll:
    """Wait for everybody who is online."""

    def wanted(self, invited: int, key: Key) -> int:
        """Return ``invited``."""
        return invited


@dataclass(frozen=True)
class First:
    """Go on with the first ``count`` answers."""

    count: int

    def wanted(self, invited: int, key: Key) -> int:
        """Return ``count``, or ``invited`` if fewer were asked."""
        return min(self.count, invited)


@dataclass(frozen=True)
class Siwer:
    """Start immediately with enough responses (CDMA): ``S_t = ceil(p_t * invited)``, p_t uniform in (low, high], drawn afresh."""

    low: float = 0.5
    high: float = 1.0

    def wanted(self, invited: int, key: Key) -> int:
        """Return S_t. Drawing p from the half-open (low, high] makes the law of S_t exact, e.g. 5, 6, 7, 8 of 8 alike."""
        p = self.high - (self.high - self.low) * float(rng.uniform(rng.fold(key, "responses"), (), torch.float64))
        return max(1, math.ceil(p * invited))


class Responses(NamedTuple):
    """How a phase went for the invited clients: fate int8 (S,), answer time in seconds (S,), how long the server waited."""

    fate: Tensor
    seconds: Tensor
    duration_s: float

    @property
    def heard(self) -> Tensor:
        """Positions of the heard clients in the cohort, ascending."""
        return (self.fate == Fate.HEARD).nonzero().flatten()


def respond(
    clients: Tensor,
    copies: Tensor,
    key: Key,
    count_key: Key,
    availability: Availability,
    times: ResponseTime,
    policy: ResponsePolicy,
) -> Responses:
    """Resolve one phase: who is offline, who is heard, who is late.

    Args:
        clients: (S,) int64 invited clients.
        copies: (S,) int64 copy numbers, for cohorts drawn with replacement.
        key: the phase's key; a client's draws depend on it and on the client alone.
        count_key: key of the number of answers waited for.
        availability, times, policy: the models.

    """
    online = availability.online(key, clients)
    seconds = times.seconds(rng.fold(key, copies), clients)
    order = torch.where(online, seconds, torch.inf).argsort(stable=True)
    wanted = min(policy.wanted(len(clients), count_key), int(online.sum()))
    fate = torch.where(online, int(Fate.LATE), int(Fate.OFFLINE)).to(torch.int8)
    fate[order[:wanted]] = int(Fate.HEARD)
    duration = float(seconds[order[wanted - 1]]) if wanted else 0.0
    return Responses(fate, torch.where(online, seconds, 0.0), duration)
