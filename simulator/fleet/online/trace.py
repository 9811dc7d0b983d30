"""Availability as it was recorded: a list of the intervals in which devices were online."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key

ROUNDING = 1e-9
"""Shares of a period below this come of rounding sums of many intervals."""


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [start, end) of devices 0 .. D - 1, sorted by device and by start, none overlapping another.

    Attributes:
        first: (D + 1,) int64: device d has the intervals first[d] .. first[d + 1] - 1.
        start, end: (R,) float64 seconds, 0 <= start < end <= the device's period.
        period: (D,) float64 or (1,) for all: seconds after which a device's intervals repeat.

    """

    first: Tensor
    start: Tensor
    end: Tensor
    period: Tensor

    @property
    def devices(self) -> int:
        """Number of devices, D."""
        return len(self.first) - 1

    @cached_property
    def _halvings(self) -> int:
        return int(self.first.diff().max()).bit_length()

    def cover(self, devices: Tensor, seconds: Tensor) -> Tensor:
        """Return bool (S,): whether a moment (S,) of [0, period) is in an interval of the device (S,)."""
        begun = self._begun(devices, seconds)
        return (begun > self.first[devices]) & (seconds < self.end[(begun - 1).clamp(min=0)])

    def covered(self, devices: Tensor, seconds: Tensor) -> Tensor:
        """Return how long (S,) float64 devices (S,) were online from 0 to a moment (S,) of any period."""
        period = self.period_of(devices)
        rest = torch.remainder(seconds, period)
        whole = ((seconds - rest) / period).round()
        own, begun = self.first[devices], self._begun(devices, rest)
        last = (begun - 1).clamp(min=0)
        part = self._before[last] - self._before[own] + torch.minimum(rest, self.end[last]) - self.start[last]
        return whole * (self._before[self.first[devices + 1]] - self._before[own]) + torch.where(begun > own, part, 0.0)

    def period_of(self, devices: Tensor) -> Tensor:
        """Return the periods (S,) of devices (S,)."""
        return self.period[devices] if len(self.period) > 1 else self.period.expand(len(devices))

    @cached_property
    def _before(self) -> Tensor:
        """Seconds (R + 1,) online in all intervals before each."""
        return torch.cat([torch.zeros(1, dtype=torch.float64), (self.end - self.start).cumsum(0)])

    def _begun(self, devices: Tensor, seconds: Tensor) -> Tensor:
        """Return the number of intervals that have begun at a moment of [0, period), plus ``first`` (S,)."""
        # Halving each device's own list, for all together, is faster than one search in all intervals.
        low, high = self.first[devices], self.first[devices + 1]
        last = max(len(self.start) - 1, 0)
        for _ in range(self._halvings):
            middle = (low + high) >> 1
            begun = (low < high) & (self.start[middle.clamp(max=last)] <= seconds)
            low, high = torch.where(begun, middle + 1, low), torch.where(begun, high, middle.minimum(high))
        return low


@dataclass(frozen=True)
class Trace:
    """Clients are online as devices of a trace were, again and again.

    Attributes:
        intervals: the trace.
        key: a scalar, of the run; phases have no say.
        numbers: (D,) int64, rising: which client each device is; a client that is no device is never online. None: clients are
            dealt to the devices in a seeded order, round and round, so that all devices have as many clients, or one more.
        shift: each client begins at a moment of its own, uniform over the period.

    """

    intervals: Intervals
    key: Key
    numbers: Tensor | None = None
    shift: bool = False
    varies: ClassVar[bool] = False

    @property
    def span_s(self) -> float:
        """The longest period."""
        return float(self.intervals.period.max())

    @cached_property
    def _order(self) -> Tensor:
        return rng.permutation(rng.fold(self.key, "devices"), self.intervals.devices)

    def device(self, clients: Tensor) -> Tensor:
        """Return the device of each client, or -1."""
        if self.numbers is None:
            return self._order[clients % self.intervals.devices]
        result = torch.searchsorted(self.numbers, clients).clamp(max=len(self.numbers) - 1)
        return torch.where(self.numbers[result] == clients, result, -1)

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return whether the devices of clients were online."""
        devices = self.device(clients)
        known, devices = devices >= 0, devices.clamp(min=0)
        period = self.intervals.period_of(devices)
        if self.shift:
            seconds = seconds + period * rng.uniform(rng.fold(self.key, "shift", clients), (), torch.float64)
        return known & self.intervals.cover(devices, torch.remainder(seconds, period))

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the share of the moments t of a client's period at which it is online both at t and at t + ``lasting``."""
        devices = self.device(clients)
        known, devices = devices >= 0, devices.clamp(min=0)
        i, period = self.intervals, self.intervals.period_of(devices)
        counts = i.first[devices + 1] - i.first[devices]
        owner = torch.arange(len(devices)).repeat_interleave(counts)
        row = i.first[devices][owner] + torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
        of, later = devices[owner], lasting[owner]
        both = i.covered(of, i.end[row] + later) - i.covered(of, i.start[row] + later)
        share = torch.zeros(len(devices), dtype=torch.float64).index_add_(0, owner, both) / period
        return torch.where(known & (share > ROUNDING), share, 0.0)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the share of a client's period in which it is online."""
        nothing = torch.zeros(len(clients), dtype=torch.float64)
        return self.chance(clients, nothing, nothing)
