"""Availability: which clients can be reached, and when.

Every draw is a pure function of a key, a client and a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

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


@runtime_checkable
class InRounds(Protocol):
    """A process whose time is the number of the round: whoever is online in a round is so in all its phases and retries.

    A model of availability is either this or ``Availability``. A round of an asynchronous server is one of its steps: a client
    invited between two steps is online, or not, until it answers.
    """

    def during(self, round: int) -> Availability:
        """Return the model of one round, from 0. It answers without its predecessors, at the same cost in any round."""
        ...


@runtime_checkable
class Chances(Protocol):
    """What a model may tell besides ``online``: how likely a client is online, which corrections of dropout divide by.

    What is drawn once for the run and stays with a client, such as its rate or its time zone, counts as known. Of a process
    that is fixed for the whole run by one draw (a recorded trace, a cycle of rounds), the moment counts as unknown: the chance
    is the share of the moments in a period. At any one moment such a client is online or not, and 1 / chance would correct
    nothing.
    """

    @property
    def varies(self) -> bool:
        """Whether a client's chance depends on the moment, so that 0 may be 0 for now alone."""
        ...

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the chances (S,) float64 of being online when invited and once more when asked for the answer.

        Args:
            clients: (S,) int64.
            seconds: (S,) float64, moments of the invitations, virtual seconds since the run began.
            lasting: (S,) float64, virtual seconds from each invitation to the answer, at least 0.

        """
        ...

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the shares (S,) float64 of all moments, or rounds, in which clients (S,) int64 are online."""
        ...


@runtime_checkable
class InTime(Protocol):
    """A process in virtual time says this besides ``online``."""

    @property
    def span_s(self) -> float:
        """Virtual seconds that show what it is like."""
        ...


def in_round(model: Availability | InRounds, round: int) -> Availability:
    """Return the model of availability of a round: itself, or what a process in rounds is in that round."""
    return cast(InRounds, model).during(round) if _in_rounds(type(model)) else cast(Availability, model)


@cache
def _in_rounds(kind: type) -> bool:
    """Say whether models of a type are processes in rounds. Every round asks, and a protocol is slow to tell."""
    return issubclass(kind, InRounds)


def chances(
    model: Any,
    clients: Tensor,
    seconds: Tensor,
    lasting: Tensor,
    round: int | None = None,
    *,
    what: str = "availability",
) -> Tensor:
    """Return ``model.chance`` (S,) float64, in (0, 1] but for clients that are offline at this moment alone, with 0.

    Args:
        model: of availability.
        clients, seconds, lasting: as ``Chances.chance`` takes them.
        round: the round's number; a process in rounds needs it.
        what: the key that an error names.

    Raises ConfigError where the model tells no chances, and for clients that can never be heard.
    """
    if isinstance(model, InRounds):
        if round is None:
            raise ConfigError(f"{what}: {_name(model)} counts in rounds: ask for the chances of a round")
        model = model.during(round)
    if not isinstance(model, Chances):
        raise ConfigError(
            f"{what}: {_name(model)} does not tell how likely clients are online: give it chance, long_run and varies "
            f"(fedfleet.simulator.fleet.availability.Chances), or choose a correction that needs no chances"
        )
    result = model.chance(clients, seconds, lasting)
    never = result == 0
    if model.varies and bool(never.any()):
        never &= model.long_run(clients) == 0
    if bool(never.any()):
        raise ConfigError(
            f"{what}: the chance that client {int(clients[never][0])} is heard is 0, and no weight makes up for that: raise its "
            f"chance, or choose a correction that needs no chances"
        )
    return result


def _name(model: Any) -> str:
    return type(model).__name__


def same(clients: Tensor, chance: float) -> Tensor:
    """Return one chance for all clients (S,), float64."""
    return torch.full(clients.shape, chance, dtype=torch.float64)


@dataclass(frozen=True)
class Always:
    """Every client is online."""

    varies: ClassVar[bool] = False

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return all true."""
        return torch.ones(len(clients), dtype=torch.bool)

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return ones."""
        return same(clients, 1.0)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return ones."""
        return same(clients, 1.0)


@dataclass(frozen=True)
class Bernoulli:
    """Each client is online with probability ``rate``, afresh in every phase."""

    rate: float
    varies: ClassVar[bool] = False

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return independent draws, one a client."""
        return rng.bernoulli(rng.fold(key, "online", clients), self.rate)

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the rate: one draw answers both questions of a phase."""
        return same(clients, self.rate)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the rate."""
        return same(clients, self.rate)
