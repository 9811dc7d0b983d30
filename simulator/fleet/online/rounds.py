"""Processes of availability whose time is the number of the round, as papers on dropout have them.

A client is online, or not, for a whole round: all phases and retries of a round have one answer. Each answer is a pure function
of the run's key, the client and the round, found without those before. t counts rounds from 0, and p_c is a client's rate
(``rates``).

    Independent   p_c, afresh in every round
    Waves         p_c w(t), 0 where that is below a cutoff; w a wave of some period, as ``sine``, ``staircase``, ``f3ast`` below
    MarkovRounds  P(off -> on) = a, P(on -> off) = b = a (1 / p_c - 1); where b > 1: a = p_c / (1 - p_c), b = 1
    Cyclic        on for A = max(1, round(C p_c)) rounds, then off for B = max(1, C - A), from a phase of the client's own
    Turns         groups of clients take turns, each on for so many rounds
    Outages       p_c in every round in which the client's region is up, a two-state chain that its clients share

Sources: IBM/fedau (Bernoulli, Markov, cyclic), mingxiang12/FedAWE (sine, staircase, interleaved sine), Ribero et al. 2022, F3AST
(sine), Wang and Ji 2022, "A unified analysis of federated learning with arbitrary client participation" (periodic blocks), Yan
et al. 2020, "Distributed non-convex optimization with intermittent clients", FedLaAvg (two groups). Outages are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.availability import Availability
from fedfleet.simulator.fleet.online.chain import chain, levels
from fedfleet.simulator.fleet.online.rates import Rates

Wave = Callable[[int], float]
"""Round -> what rates are multiplied by."""


class _Process(Protocol):
    """What a process says of its rounds."""

    varies: ClassVar[bool]

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return bool (S,): who of the clients (S,) is online in a round."""
        ...

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return the chances (S,) float64 of it."""
        ...

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the shares (S,) float64 of all rounds in which clients are online."""
        ...


@dataclass(frozen=True)
class _InRound:
    """A process in one round; neither phases nor moments have a say."""

    process: _Process
    round: int

    @property
    def varies(self) -> bool:
        """Whether the chance depends on the round."""
        return self.process.varies

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return who is online in the round."""
        return self.process.on(clients, self.round)

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the chances of the round: who is online when invited is so when it answers."""
        return self.process.likely(clients, self.round)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the shares of all rounds."""
        return self.process.long_run(clients)


class _Rounds:
    """A process; see ``InRounds``."""

    varies: ClassVar[bool] = False

    def during(self: _Process, round: int) -> Availability:
        """Return the model of a round."""
        return _InRound(self, round)


@dataclass(frozen=True)
class Independent(_Rounds):
    """Each client is online with its rate, afresh in every round.

    Attributes:
        key: a scalar, of the run, here and below.
        rates: p_c.

    """

    key: Key
    rates: Rates

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return independent draws, one a client and round."""
        return rng.bernoulli(rng.fold(self.key, "round", clients, round), self.rates(clients))

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return the rates."""
        return self.rates(clients)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the rates."""
        return self.rates(clients)


@dataclass(frozen=True)
class Waves(_Rounds):
    """Each client is online with its rate times a wave that all share, afresh in every round.

    Attributes:
        rates: p_c.
        wave: w(t), from 0 to 1.
        period: rounds after which w repeats.
        below: where p_c w(t) is below that, the client is offline.

    """

    key: Key
    rates: Rates
    wave: Wave
    period: int
    below: float = 0.0
    varies: ClassVar[bool] = True

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return independent draws, one a client and round; the same uniforms as ``Independent``'s."""
        return rng.bernoulli(rng.fold(self.key, "round", clients, round), self.likely(clients, round))

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return p_c w(t), cut off."""
        return self._cut(self.rates(clients) * self.wave(round % self.period))

    def _cut(self, p: Tensor) -> Tensor:
        return torch.where(p < self.below, 0.0, p)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the means over a period."""
        p, total = self.rates(clients), torch.zeros(len(clients), dtype=torch.float64)
        for t in range(self.period):
            total += self._cut(p * self.wave(t))
        return total / self.period


def sine(depth: float, period: int) -> Wave:
    """Return FedAWE's: depth sin(2 pi t / period) + 1 - depth."""
    return lambda t: depth * math.sin(2 * math.pi * t / period) + 1 - depth


def staircase(low: float, length: int) -> Wave:
    """Return FedAWE's: 1 and ``low`` by turns, for so many rounds each."""
    return lambda t: low if t // length % 2 else 1.0


def f3ast(depth: float, level: float, period: int) -> Wave:
    """Return F3AST's: depth sin(2 pi t / (period - 1)) + level, whose last round is as its first."""
    return lambda t: depth * math.sin(2 * math.pi * t / (period - 1)) + level


@dataclass(frozen=True)
class MarkovRounds(_Rounds):
    """Each client goes on and off by a chain of its own, in its stationary law from the first round on.

    Attributes:
        rates: p_c, the share of the rounds it is online.
        off_to_on: a, the chance of coming back after a round offline, above 0 and at most 1/2, so that chains mix.

    """

    key: Key
    rates: Rates
    off_to_on: float

    @cached_property
    def _halvings(self) -> int:
        # r = 1 - a - b is at most 1 - a; where b is 1 it is - p / (1 - p), and that is no less than -a.
        return levels(max(1 - self.off_to_on, self.off_to_on))

    def steps(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and b (S,) of rates (S,)."""
        back = self.off_to_on * (1 / rates - 1)
        a = torch.where(back > 1, rates / (1 - rates), self.off_to_on)
        return a, back.clamp(max=1.0)

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return the states in a round."""
        p = self.rates(clients)
        a, b = self.steps(p)
        return chain(self.key, clients, round, p, 1 - a - b, self._halvings)

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return the rates: the chain is stationary."""
        return self.rates(clients)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the rates."""
        return self.rates(clients)


@dataclass(frozen=True)
class Cyclic(_Rounds):
    """Each client is on for some rounds and off for the rest of a cycle, again and again.

    Attributes:
        rates: p_c.
        cycle: C, rounds of a cycle; A + B is C + 1 where p_c is 1.
        start_off: a client begins at a moment uniform over its rounds off, hence offline but for one client in B. Otherwise at
            one that is uniform over the whole cycle, and then as many are online in every round.

    """

    key: Key
    rates: Rates
    cycle: int
    start_off: bool = False

    def lengths(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B (S,) float64."""
        on = (self.cycle * self.rates(clients)).round().clamp(min=1)
        return on, (self.cycle - on).clamp(min=1)

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return whether (t - phase) mod (A + B) < A."""
        on, off = self.lengths(clients)
        u = rng.uniform(rng.fold(self.key, "phase", clients), (), torch.float64)
        phase = (u * (off if self.start_off else on + off)).floor()
        return torch.remainder(round - phase, on + off) < on

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return A / (A + B): the phase counts as unknown."""
        return self.long_run(clients)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return A / (A + B)."""
        on, off = self.lengths(clients)
        return on / (on + off)


@dataclass(frozen=True)
class Turns(_Rounds):
    """Groups of clients with consecutive numbers are on in turn, all others off.

    Attributes:
        clients: N; client c is of group floor(c G / N).
        lengths: rounds of each group's turn, (G,).
        most: the first turn is cut short by as many rounds as are drawn once for all, below ``most``; 1: none.

    """

    key: Key
    clients: int
    lengths: tuple[int, ...]
    most: int = 1

    @cached_property
    def _ends(self) -> Tensor:
        return torch.tensor(self.lengths).cumsum(0)

    @cached_property
    def _offset(self) -> int:
        return int(rng.uniform(rng.fold(self.key, "offset"), (), torch.float64) * self.most)

    def group(self, clients: Tensor) -> Tensor:
        """Return the group of each client."""
        return clients * len(self.lengths) // self.clients

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return whose turn it is."""
        at = (round + self._offset) % sum(self.lengths)
        return self.group(clients) == int(torch.searchsorted(self._ends, at, right=True))

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return the share of a period: the offset counts as unknown."""
        return self.long_run(clients)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the share of a period that is the group's turn."""
        share = torch.tensor(self.lengths, dtype=torch.float64) / sum(self.lengths)
        return share[self.group(clients)]


@dataclass(frozen=True)
class Outages(_Rounds):
    """Regions fail as a whole: each client is online with its rate in the rounds in which its region is up.

    Attributes:
        rates: p_c.
        region: clients (S,) int64 -> the region of each, from 0.
        up: (G,) float64, the share of the rounds in which a region is up.
        correlation: of a region's states in two rounds that follow one another, from 0 to below 1.

    """

    key: Key
    rates: Rates
    region: Callable[[Tensor], Tensor]
    up: Tensor
    correlation: float

    def regions_up(self, regions: Tensor, round: int) -> Tensor:
        """Return bool (R,): which regions (R,) int64 are up in a round."""
        share = self.up[regions]
        lag = torch.full_like(share, self.correlation)
        return chain(rng.fold(self.key, "region"), regions, round, share, lag, levels(self.correlation))

    def on(self, clients: Tensor, round: int) -> Tensor:
        """Return draws that are independent, given the regions; the same uniforms as ``Independent``'s."""
        drawn = rng.bernoulli(rng.fold(self.key, "round", clients, round), self.rates(clients))
        regions, mine = self.region(clients).unique(return_inverse=True)
        return drawn & self.regions_up(regions, round)[mine]

    def likely(self, clients: Tensor, round: int) -> Tensor:
        """Return the rates times the regions' shares."""
        return self.rates(clients) * self.up[self.region(clients)]

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the rates times the regions' shares."""
        return self.likely(clients, 0)
