"""Which clients can be reached, and when. Every draw is a pure function of a key, a client and a moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.errors import ConfigError


class Availability(Protocol):
    """Says which clients are online at a moment of the virtual clock.

    It is asked twice a phase: at the invitation, and for those who were online again when they are about to answer. A model
    that draws afresh for every phase takes the phase's key, and so answers the same both times. A process in time takes a
    key of its own instead, so that a client's past and future do not depend on who asks.
    """

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return bool (S,) for clients (S,) int64 at moments (S,) float64, in virtual seconds since the run began.

        ``key`` is the phase's, or (S,): that of the moment at which an asynchronous server invited each.
        """
        ...


@dataclass(frozen=True)
class Always:
    """Every client is online."""

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return all true."""
        return torch.ones(len(clients), dtype=torch.bool)

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones(len(clients), dtype=torch.float64)


@dataclass(frozen=True)
class Bernoulli:
    """Each client is online with probability ``rate``, afresh in every phase."""

    rate: float

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return independent draws, one a client."""
        return rng.bernoulli(rng.fold(key, "online", clients), self.rate)

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the rate: both questions of a phase share one draw."""
        return torch.full((len(clients),), self.rate, dtype=torch.float64)


def chances(model: Availability, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
    """Return the chance (S,) float64 that clients (S,) are online at moments (S,) and again ``lasting`` (S,) seconds later.

    Raises ConfigError for a model that does not tell.
    """
    of = getattr(model, "chance", None)
    if of is None:
        raise ConfigError(
            f"availability: {type(model).__name__} has no method chance(clients, seconds, lasting), and the algorithm divides "
            f"by chances: choose another availability, or algorithm.correction=fedau, which estimates them"
        )
    return of(clients, seconds, lasting)
