"""Options of ``devices``: how long clients take to answer, and what breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field

from fedfleet.config.device_table import read_table
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet import devices as models
from fedfleet.simulator.fleet.hardware import Assigned, Drawn, Fleet, Hardware, HeterogeneousDevices, Lognormal
from fedfleet.simulator.population import Population
from fedfleet.simulator.registry import Entry, Options, Registry

Gflops = Annotated[float, Field(gt=0, le=1e9)]
Mbps = Annotated[float, Field(gt=0, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Sigma = Annotated[float, Field(ge=0, le=10)]


class Failing(Options):
    """What every kind of device has."""

    failures_per_hour: float = Field(default=0.0, ge=0, le=3.6e9)
    """Failures of a device at work (crash, lost connection), exponentially distributed in virtual time."""


class HomogeneousOptions(Failing):
    """A client answers after median * exp(sigma * normal) virtual seconds, independently in every phase, whatever it does."""

    median_s: float = Field(default=1.0, gt=0, le=1e9)
    sigma: Sigma = 0.5


class Computing(Failing):
    """What every kind of device has whose times follow from what a phase computes and sends."""

    jitter: Sigma = 0.0
    """Times are multiplied by exp(jitter * normal), afresh in every phase."""
    flop_per_example: float | None = Field(default=None, gt=0, le=1e18)
    """Floating-point operations for an example of a local step, in every phase; counted for each phase if not given."""


class LognormalDevices(Computing):
    """Each client's speed and bandwidths are median * exp(sigma * normal), drawn once for the run."""

    gflops: Gflops = 10.0
    """Median speed in training, 1e9 floating-point operations a second."""
    gflops_sigma: Sigma = 0.7
    down_mbps: Mbps = 36.0
    """Median bandwidth to clients, 1e6 bits a second."""
    down_sigma: Sigma = 0.7
    up_mbps: Mbps = 11.0
    """Median bandwidth from clients, 1e6 bits a second."""
    up_sigma: Sigma = 0.7
    latency_s: Seconds = 0.02
    """Seconds each message takes besides, the same for all clients."""


class Tier(Options):
    """A kind of device."""

    share: float = Field(gt=0, le=1e9)
    """Clients that have it, relative to the shares of the other tiers."""
    gflops: Gflops
    down_mbps: Mbps
    up_mbps: Mbps
    latency_s: Seconds = 0.0


class Tiers(Computing):
    """Each client's device is of one of a few tiers, drawn once for the run."""

    tiers: Annotated[list[Tier], Field(min_length=1)]


class Table(Computing):
    """Devices from Parquet, columns gflops, down_mbps, up_mbps, and if need be latency_s and client."""

    path: str
    """The Parquet file."""
    map: Literal["hash", "direct"] = "hash"
    """hash: each client has the device of a row drawn once for the run; direct: that of its own row."""


class Context(NamedTuple):
    """What a model may depend on: a key of the run for devices alone, and the clients."""

    key: Key
    population: Population


Build = Callable[[Any, Context], models.Devices]  # which raises ConfigError


def _lognormal(given: LognormalDevices, context: Context) -> Fleet:
    median = Hardware.of(given.gflops, given.down_mbps, given.up_mbps, given.latency_s)
    return Lognormal(context.key, median, Hardware.of(given.gflops_sigma, given.down_sigma, given.up_sigma, 0.0))


def _tiers(given: Tiers, context: Context) -> Fleet:
    rows = [Hardware.of(t.gflops, t.down_mbps, t.up_mbps, t.latency_s) for t in given.tiers]
    share = torch.tensor([t.share for t in given.tiers], dtype=torch.float64)
    return Drawn(context.key, Hardware(*map(torch.cat, zip(*rows, strict=True))), share)


def _table(given: Table, context: Context) -> Fleet:
    clients = context.population.size if given.map == "direct" else None
    devices = read_table(given.path, clients)
    if given.map == "direct":
        return Assigned(devices)
    return Drawn(context.key, devices, torch.ones_like(devices.gflops))


def _computing(options: type[Computing], fleet: Callable[[Any, Context], Fleet]) -> Entry[Build]:
    return Entry(options, lambda given, context: HeterogeneousDevices(fleet(given, context), given.jitter))


ROWS: dict[str, Entry[Build]] = {
    "homogeneous": Entry(HomogeneousOptions, lambda given, context: models.Homogeneous(given.median_s, given.sigma)),
    "lognormal": _computing(LognormalDevices, _lognormal),
    "tiers": _computing(Tiers, _tiers),
    "table": _computing(Table, _table),
}
DEVICES = Registry("devices", ROWS, default="homogeneous", group="fedfleet.devices")
