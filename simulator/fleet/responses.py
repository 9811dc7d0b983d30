"""Responses of the clients invited to a phase, resolved before any of them works."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.availability import Always, Availability, InRounds, chances, in_round
from fedfleet.simulator.fleet.devices import Devices, Homogeneous, Load
from fedfleet.simulator.fleet.policies import Deadline, ResponsePolicy, WaitAll
from fedfleet.simulator.work import Phase


class Outcome(IntEnum):
    """What became of an invited client in a phase."""

    COMPLETED = 0
    LATE = 1
    FAILED = 2
    UNAVAILABLE = 3
    STALE = 4
    """Late, but kept for a later round."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """How clients and their devices behave, and whom the server waits for.

    Attributes:
        availability, devices, policy: the models.
        hazard: failures a second of a device at work (crash, lost connection), exponentially distributed.
        partial_work: under a deadline, a slow client sends what it has after as many local steps as it can finish in time, in
            phases whose work is divisible.

    """

    availability: Availability | InRounds = field(default_factory=Always)
    devices: Devices = field(default_factory=Homogeneous)
    policy: ResponsePolicy = field(default_factory=WaitAll)
    hazard: float = 0.0
    partial_work: bool = False

    def during(self, phase: Phase) -> Federation:
        """Return how clients behave in a phase: work that means nothing unfinished is not stopped half way."""
        whole = self.partial_work and not phase.work.divisible
        return replace(self, partial_work=False) if whole else self

    def in_round(self, round: int) -> Federation:
        """Return how clients behave in a round: the same in all of its phases, and whenever it is tried again."""
        now = in_round(self.availability, round)
        return self if now is self.availability else replace(self, availability=now)

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return bool (S,), as the availability of a round does."""
        return cast(Availability, self.availability).online(key, clients, seconds)


class Responses(NamedTuple):
    """How a phase went for the invited clients.

    Attributes:
        outcome: (S,) int8.
        seconds: (S,) float64 from the invitation to the answer, or to the failure; 0 for clients offline.
        duration_s: how long the server waited.
        steps: (S,) int64, local steps of those that answer.

    """

    outcome: Tensor
    seconds: Tensor
    duration_s: float
    steps: Tensor

    @property
    def completed(self) -> Tensor:
        """Positions of the heard clients in the cohort, ascending."""
        return (self.outcome == Outcome.COMPLETED).nonzero().flatten()


class Timeline(NamedTuple):
    """How clients (S,) fare if nobody stops waiting: online when invited, failed on the way, seconds until the end, steps taken."""

    online: Tensor
    failed: Tensor
    seconds: Tensor
    steps: Tensor


def timelines(
    federation: Federation, clients: Tensor, copies: Tensor, load: Load, at_s: float | Tensor, key: Key
) -> Timeline:
    """Return how invited clients fare. A client must be online when invited, not fail, and be online again when it answers.

    ``at_s`` and ``key``, of the moment of the invitation, are of all clients, or (S,), of each.
    """
    f, own = federation, rng.fold(key, copies)
    invited = torch.as_tensor(at_s, dtype=torch.float64).expand(len(clients))
    online = f.online(key, clients, invited)
    steps, seconds = _worked(f, clients, load, own)
    failed = online & ~f.online(key, clients, invited + seconds)
    if f.hazard:
        u = rng.uniform(rng.fold(own, "failure", clients), (), torch.float64)
        lifetime = -torch.log1p(-u) / f.hazard
        failed |= online & (lifetime < seconds)
        seconds = seconds.minimum(lifetime)
    return Timeline(online, failed, torch.where(online, seconds, 0.0), steps)


def chance(federation: Federation, clients: Tensor, copies: Tensor, load: Load, at_s: float, key: Key) -> Tensor:
    """Return the chance (S,) float64 that each invited client is online, does not fail, and is online again when it answers.

    Args: as of ``wait_for``, whose answer takes the same seconds. Raises ConfigError where availability does not tell.
    """
    invited = torch.full((len(clients),), at_s, dtype=torch.float64)
    seconds = _worked(federation, clients, load, rng.fold(key, copies))[1]
    return chances(federation.availability, clients, invited, seconds) * torch.exp(-federation.hazard * seconds)


def _worked(f: Federation, clients: Tensor, load: Load, own: Key) -> tuple[Tensor, Tensor]:
    """Return the steps (S,) that clients take if nobody stops waiting, and the seconds (S,) until they answer."""
    times, steps = f.devices.times(own, clients, load), load.steps
    if f.partial_work and isinstance(f.policy, Deadline):
        in_time = (
            ((f.policy.deadline_s - times.fixed) / times.step).floor().nan_to_num(0.0).clamp(0, 2**62).to(torch.int64)
        )
        in_time -= (times.after(in_time) > f.policy.deadline_s).to(torch.int64)  # the quotient may have been rounded up
        steps = torch.where(in_time > 0, steps.minimum(in_time), steps)
    return steps, times.after(steps)


def respond(
    federation: Federation, clients: Tensor, copies: Tensor, load: Load, at_s: float, key: Key, count_key: Key
) -> Responses:
    """Resolve one phase: who is offline, who fails, who is heard, who is late.

    Args:
        federation: the models.
        clients: (S,) int64 invited clients.
        copies: (S,) int64 copy numbers, for cohorts drawn with replacement.
        load: the work of each.
        at_s: the moment of the invitation on the virtual clock.
        key: the phase's key; a client's draws depend on it and on the client alone.
        count_key: key of the policy's own draws.

    """
    online, failed, seconds, steps = timelines(federation, clients, copies, load, at_s, key)
    answering = online & ~failed
    order = torch.where(answering, seconds, torch.inf).argsort(stable=True)
    answers = seconds[order[: int(answering.sum())]]
    anybody = bool(online.any())
    close = federation.policy.close(answers, len(clients), float(seconds.max()) if anybody else 0.0, count_key)
    outcome = torch.full((len(clients),), int(Outcome.UNAVAILABLE), dtype=torch.int8)
    outcome.masked_fill_(answering, int(Outcome.LATE)).masked_fill_(failed, int(Outcome.FAILED))
    outcome[order[: close.completed]] = int(Outcome.COMPLETED)
    return Responses(outcome, seconds, close.seconds if anybody else 0.0, steps)
