"""Availability as it was recorded: a list of the intervals in which devices were online."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key


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
        # Halving each device's own list, for all together, is faster than one search in all intervals.
        low, high = self.first[devices], self.first[devices + 1]
        last = max(len(self.start) - 1, 0)
        own = low
        for _ in range(self._halvings):  # low: the number of intervals that have begun, plus first
            middle = (low + high) >> 1
            begun = (low < high) & (self.start[middle.clamp(max=last)] <= seconds)
            low, high = torch.where(begun, middle + 1, low), torch.where(begun, high, middle.minimum(high))
        return (low > own) & (seconds < self.end[(low - 1).clamp(min=0)])


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

    @cached_property
    def _order(self) -> Tensor:
        return rng.permutation(rng.fold(self.key, "devices"), self.intervals.devices)

    def device(self, clients: Tensor) -> Tensor:
        """Return the device of each client, or -1."""
        if self.numbers is None:
            return self._order[clients % self.intervals.devices]
        found = torch.searchsorted(self.numbers, clients).clamp(max=len(self.numbers) - 1)
        return torch.where(self.numbers[found] == clients, found, -1)

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return whether the devices of clients were online."""
        devices = self.device(clients)
        known, devices = devices >= 0, devices.clamp(min=0)
        period = self.intervals.period
        period = period[devices] if len(period) > 1 else period
        if self.shift:
            seconds = seconds + period * rng.uniform(rng.fold(self.key, "shift", clients), (), torch.float64)
        return known & self.intervals.cover(devices, torch.remainder(seconds, period))
