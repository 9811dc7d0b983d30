"""Clients that go on and off at random: a stationary two-state Markov process in continuous time, each client its own.

A client stays on for an exponential time of mean m_on, then off for one of mean m_off, and so on. With

    lambda = 1 / m_on + 1 / m_off,    pi_on = m_on / (m_on + m_off),
    P_h(a, b) = pi_b + ([a = b] - pi_b) exp(-lambda h),   the chance of state b a time h after state a,

the state at any moment is found without a history: states at the multiples of 40 / lambda are drawn from pi alone, as
their true correlation, exp(-40), is less than float64 resolves; and between two known moments, h apart, the state half-way is
drawn from the Markov bridge

    P(mid = s | a, b) = P_{h/2}(a, s) P_{h/2}(s, b) / P_h(a, b),

again and again, each draw hashed from the client, the span, the level and the place. 22 halvings lead to cells of 1e-5 /
lambda, to whose start a moment is rounded down; on that grid the law is exact, and whoever asks, in whatever order, sees
the same path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.availability import same

SPAN = 40.0  # of a span, in units of 1 / lambda
LEVELS = 22


@dataclass(frozen=True)
class Markov:
    """An on/off process a client.

    Attributes:
        key: a scalar, of the run; phases have no say.
        mean_on_s, mean_off_s: mean lengths of the stretches online and offline, above 0.

    """

    key: Key
    mean_on_s: float
    mean_off_s: float
    varies: ClassVar[bool] = False

    @property
    def share(self) -> float:
        """Share of the time a client is online, pi_on."""
        return self.mean_on_s / (self.mean_on_s + self.mean_off_s)

    @property
    def span_s(self) -> float:
        """Ten stretches of each kind, on average."""
        return 10 * (self.mean_on_s + self.mean_off_s)

    @property
    def rate(self) -> float:
        """Return lambda, in 1 / s."""
        return 1 / self.mean_on_s + 1 / self.mean_off_s

    @cached_property
    def _bridge(self) -> Tensor:
        """Chance of being on half-way, (LEVELS, 4): a row a level, a column 2 a + b for the states a, b at the ends."""
        half = SPAN * 2.0 ** -torch.arange(1, LEVELS + 1, dtype=torch.float64)  # lambda h / 2
        changed = -torch.expm1(-half)
        off_share = self.mean_off_s / (self.mean_on_s + self.mean_off_s)
        to_on = (self.share * changed, 1 - off_share * changed)  # in half the time, from off and from on
        to_off = (1 - self.share * changed, off_share * changed)
        columns = []
        for a in (0, 1):
            for b in (to_off, to_on):
                on, off = to_on[a] * b[1], to_off[a] * b[0]
                columns.append(on / (on + off))
        return torch.stack(columns, dim=1)

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return the states at these moments, which are at least 0."""
        at = seconds * (self.rate / SPAN)
        span = at.floor()
        cell = ((at - span) * 2**LEVELS).to(torch.int64)  # 0 .. 2^LEVELS - 1
        span = span.to(torch.int64)
        own = rng.fold(self.key, clients)
        before = rng.bernoulli(rng.fold(own, "end", span), self.share)
        after = rng.bernoulli(rng.fold(own, "end", span + 1), self.share)
        inside = rng.fold(own, "inside", span)
        for level, chances in enumerate(self._bridge):
            node = (1 << level) + (cell >> (LEVELS - level))  # a number for each level and place
            middle = rng.uniform_at(inside, node) < chances[2 * before.to(torch.int64) + after]
            later = (cell >> (LEVELS - 1 - level)) & 1 == 1
            before, after = torch.where(later, middle, before), torch.where(later, after, middle)
        return before

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return pi_on P_h(on, on) for h = ``lasting``: the longer a client works, the less often it is heard."""
        return self.share * (self.share + (1 - self.share) * torch.exp(-self.rate * lasting))

    def long_run(self, clients: Tensor) -> Tensor:
        """Return pi_on."""
        return same(clients, self.share)
