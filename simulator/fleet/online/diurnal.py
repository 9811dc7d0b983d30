"""Clients that are online around an hour of their own day."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.availability import same

HOURS = 24.0


@dataclass(frozen=True)
class Diurnal:
    """A client is online while p(its local time) is above a threshold, drawn from U[0, 1) afresh for each client and day.

        p(t) = mean + amplitude cos(2 pi (t - peak) / day),   cut off at 0 and 1

    At any moment, a client is so online with probability p. A client's day runs from one trough of p to the next, hence it
    is online in one stretch a day, around the peak (all day where the threshold is below the trough).

    Attributes:
        key: a scalar, of the run; phases have no say.
        mean, amplitude: of p; the amplitude is at least 0.
        peak_hour: local time of the peak; an hour is a 24th of a day.
        zones: (Z,) float64, hours by which a client's clock is ahead, each as likely; None: uniform over the day.
        day_s: length of a day.

    """

    key: Key
    mean: float = 0.5
    amplitude: float = 0.3
    peak_hour: float = 2.0
    zones: Tensor | None = None
    day_s: float = 86400.0
    varies: ClassVar[bool] = True

    @property
    def span_s(self) -> float:
        """Three days."""
        return 3 * self.day_s

    def zone(self, clients: Tensor) -> Tensor:
        """Return the hours (S,) float64 by which the clocks of clients are ahead."""
        u = rng.uniform(rng.fold(self.key, "zone", clients), (), torch.float64)
        return u * HOURS if self.zones is None else self.zones[(u * len(self.zones)).to(torch.int64)]

    def share(self, days: Tensor) -> Tensor:
        """Return p for days (S,) since a peak."""
        return (self.mean + self.amplitude * torch.cos(2 * math.pi * days)).clamp(0, 1)

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return whether p is above the threshold of the day."""
        days, day = self._days(clients, seconds)
        threshold = rng.uniform(rng.fold(self.key, "day", clients, day.to(torch.int64)), (), torch.float64)
        return threshold < self.share(days - day)

    def _days(self, clients: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
        """Return local moments in days, and the number of each one's day, whose peak is at its middle."""
        days = seconds / self.day_s + (self.zone(clients) - self.peak_hour) / HOURS
        return days, (days + 0.5).floor()

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the lesser p of the two moments, which share a threshold; the product of both where a trough lies between."""
        (before, one), (after, two) = (self._days(clients, at) for at in (seconds, seconds + lasting))
        p, q = self.share(before - one), self.share(after - two)
        return torch.where(one == two, torch.minimum(p, q), p * q)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the mean of p over a day, cut off as it is."""
        m, a = self.mean, self.amplitude
        if a == 0:
            return same(clients, min(max(m, 0.0), 1.0))
        below_one, above_zero = (math.acos(min(max((bound - m) / a, -1.0), 1.0)) for bound in (1.0, 0.0))
        # From the peak: 1 up to the angle below_one, the cosine up to above_zero, 0 up to pi.
        wave = m * (above_zero - below_one) + a * (math.sin(above_zero) - math.sin(below_one))
        return same(clients, (below_one + wave) / math.pi)
