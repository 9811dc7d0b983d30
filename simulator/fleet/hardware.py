"""Devices with a processor and a network: times follow from what a phase really computes and sends.

A client's answer takes ``2 latency + 8 bytes_down / down + 8 bytes_up / up + flop examples / speed`` seconds. What a client's
device is like is a pure function of a key and the client, and stays the same over the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.devices import Load, Times


class Hardware(NamedTuple):
    """What devices are like, (S,) float64 each.

    Attributes:
        gflops: 1e9 floating-point operations a second.
        down_mbps, up_mbps: 1e6 bits a second.
        latency_s: seconds a message is under way, besides.

    """

    gflops: Tensor
    down_mbps: Tensor
    up_mbps: Tensor
    latency_s: Tensor

    @staticmethod
    def of(gflops: float, down_mbps: float, up_mbps: float, latency_s: float) -> Hardware:
        """Return one device."""
        return Hardware(*(torch.tensor([v], dtype=torch.float64) for v in (gflops, down_mbps, up_mbps, latency_s)))

    def at(self, rows: Tensor) -> Hardware:
        """Return the devices at some positions."""
        return Hardware(*(v[rows] for v in self))

    def median(self) -> Hardware:
        """Return a device that has the median of each."""
        return Hardware(*(v.quantile(0.5).reshape(1) for v in self))

    def download_s(self, load: Load) -> Tensor:
        """Return the seconds that the message to the client takes, less latency."""
        return 8 * load.bytes_down / (1e6 * self.down_mbps)

    def upload_s(self, load: Load) -> Tensor:
        """Return the seconds that the message from the client takes, less latency."""
        return 8 * load.bytes_up / (1e6 * self.up_mbps)

    def compute_s(self, load: Load) -> Tensor:
        """Return the seconds of all local steps."""
        return load.flop * load.examples / (1e9 * self.gflops)

    def times(self, load: Load) -> Times:
        """Return the times of the clients whose devices these are."""
        fixed = 2 * self.latency_s + self.download_s(load) + self.upload_s(load)
        return Times(fixed, self.compute_s(load) / load.steps.clamp(min=1))


class Fleet(Protocol):
    """Says which device each client has."""

    def of(self, clients: Tensor) -> Hardware:
        """Return the devices of clients (S,) int64."""
        ...


@dataclass(frozen=True)
class Lognormal:
    """Each of the numbers of a client's device is ``median * exp(sigma * normal)``, independently.

    Attributes:
        key: of the run, for devices.
        median, sigma: (1,) each.

    """

    key: Key
    median: Hardware
    sigma: Hardware

    def of(self, clients: Tensor) -> Hardware:
        """Return the devices."""

        def draw(name: str) -> Tensor:
            median, sigma = getattr(self.median, name), getattr(self.sigma, name)
            if not sigma:
                return median.expand(len(clients))
            return median * torch.exp(sigma * rng.normal(rng.fold(self.key, name, clients), (), torch.float64))

        return Hardware(*map(draw, Hardware._fields))


@dataclass(frozen=True)
class Drawn:
    """Each client has one of R devices, drawn with given shares.

    Attributes:
        key: of the run, for devices.
        devices: (R,) each.
        share: (R,) float64, positive, of any sum.

    """

    key: Key
    devices: Hardware
    share: Tensor

    def of(self, clients: Tensor) -> Hardware:
        """Return the devices."""
        upper = self.share.cumsum(0)
        u = rng.uniform(rng.fold(self.key, "device", clients), (), torch.float64) * upper[-1]
        return self.devices.at(torch.searchsorted(upper, u, right=True).clamp(max=len(upper) - 1))


@dataclass(frozen=True)
class Assigned:
    """Client i has device i: (N,) each."""

    devices: Hardware

    def of(self, clients: Tensor) -> Hardware:
        """Return the devices."""
        return self.devices.at(clients)


@dataclass(frozen=True)
class HeterogeneousDevices:
    """Clients answer when their devices have received, computed and sent.

    Attributes:
        fleet: the device of each client.
        jitter: the whole is multiplied by ``exp(jitter * normal)``, afresh for each client in every phase.

    """

    fleet: Fleet
    jitter: float = 0.0

    def times(self, key: Key, clients: Tensor, load: Load) -> Times:
        """Return the times."""
        result = self.fleet.of(clients).times(load)
        if not self.jitter:
            return result
        factor = torch.exp(self.jitter * rng.normal(rng.fold(key, "jitter", clients), (), torch.float64))
        return Times(result.fixed * factor, result.step * factor)
