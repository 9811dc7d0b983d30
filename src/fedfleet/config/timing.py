"""Costs of phases that are known before a run, for deadlines and ``plan``: steps, bytes, operations, seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from fedfleet.config.devices import Computing
from fedfleet.config.schema import Config
from fedfleet.simulator.algorithm import Algorithm, Buffer, Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.batches import work
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.devices import Homogeneous, Load
from fedfleet.simulator.fleet.hardware import Drawn, Hardware, HeterogeneousDevices
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.population import Population
from fedfleet.simulator.registry import ByPath
from fedfleet.simulator.work import Phase

ALL_UP_TO = 100_000
"""Clients up to which each one's time is worked out before a run."""
SAMPLE = 10_000
"""Clients whose median is that of a larger population."""
ASKED = 25
"""Clients who are asked for their examples for the record of a run, which is to cost the same for more of them."""


class Steps(NamedTuple):
    """Local steps of a phase that the client with the least examples takes, the one in the middle, and the one with the most."""

    least: int
    middle: int
    most: int


class Costs(NamedTuple):
    """What phases take, by name: bytes of one client's messages, floating-point operations an example."""

    bytes_down: Mapping[str, float]
    bytes_up: Mapping[str, float]
    flop: Mapping[str, float]

    def load(self, phase: Phase, counts: torch.Tensor) -> Load:
        """Return what a phase asks of clients with ``counts`` (S,) int64 examples."""
        known = (c.get(phase.name, 0.0) for c in self)
        return Load(*work(phase, counts), *known)


def costs(config: Config, algorithm: Algorithm, z: Tree, notes: Callable[[], Notes]) -> Costs:
    """Return what phases take; nothing, and without asking for the notes, where the devices do not depend on it.

    A phase that the probe has not seen is taken to carry the model both ways, each float of which is used once an example.
    """
    if not isinstance(config.devices, Computing | ByPath):  # of an author's own nobody knows
        return Costs({}, {}, {})
    result, names = notes(), [p.name for p in algorithm.phases]
    flop = config.devices.flop_per_example if isinstance(config.devices, Computing) else None
    model = dict.fromkeys(names, float(T.num_bytes(z)))
    once = dict.fromkeys(names, 6.0 * T.count(z))
    return Costs(
        {**model, **result.bytes_down},
        {**model, **result.bytes_up},
        {**once, **result.flop} if flop is None else dict.fromkeys(names, flop),
    )


def check_deadline(
    config: Config, federation: Federation, algorithm: Algorithm, population: Population, known: Costs
) -> None:
    """Refuse a deadline that no client can meet, where times are the same in every phase. Raises ConfigError."""
    deadline_s = config.cohort.deadline_s
    if deadline_s is None:
        return
    for phase in algorithm.phases:
        here = federation.during(phase)
        wanted = config.cohort.min_responses
        least = _fastest_s(here, phase, population, known, wanted)
        if least > deadline_s:
            who = "fastest client needs" if wanted == 1 else f"cohort.min_responses={wanted} fastest clients need"
            what = f"{'a local step in ' if here.partial_work else ''}phase {phase.name!r}"
            raise ConfigError(f"cohort.deadline_s={deadline_s:g}: the {who} {_upwards(least)} s for {what}: raise it")


def _fastest_s(federation: Federation, phase: Phase, population: Population, known: Costs, wanted: int) -> float:
    """Return seconds before which no so many clients can answer; 0 where that cannot be said."""
    devices = federation.devices
    if not isinstance(devices, Homogeneous | HeterogeneousDevices) or (
        devices.sigma if isinstance(devices, Homogeneous) else devices.jitter
    ):
        return 0.0
    if population.size <= ALL_UP_TO:
        clients = torch.arange(population.size)
        load = known.load(phase, population.num_examples(clients))
        steps = load.steps.clamp(max=1) if federation.partial_work else load.steps
        return float(devices.times(rng.key(0), clients, load).after(steps).sort().values[min(wanted, len(steps)) - 1])
    if isinstance(devices, HeterogeneousDevices) and isinstance(devices.fleet, Drawn):
        one = torch.ones(1, dtype=torch.int64)
        return float(devices.fleet.devices.times(known.load(phase, one)).fixed.min())
    return 0.0


def _upwards(seconds: float) -> str:
    """Return a number of three digits that is no less."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return f"{math.ceil(seconds / unit) * unit:.3g}"


def middle(devices: HeterogeneousDevices, clients: int) -> Hardware:
    """Return the device each of whose numbers is in the middle, of so many clients."""
    return devices.fleet.of(torch.arange(min(clients, SAMPLE))).median()


def typical(devices: HeterogeneousDevices, algorithm: Algorithm, problem: Problem, known: Costs) -> tuple[float, str]:
    """Return what a round takes where each number of the device, and the client's examples, are in the middle, and of what.

    An asynchronous server has no rounds: that is then the time of one answer.
    """
    device = middle(devices, problem.clients)
    loads = [known.load(p, torch.tensor([max(1, round(problem.mean_examples))])) for p in algorithm.phases]
    total = lambda of: sum(float(of(load)) for load in loads)  # noqa: E731
    latency = 2 * len(loads) * float(device.latency_s)
    parts = {"download": device.download_s, "compute": device.compute_s, "upload": device.upload_s}
    seconds = {**{name: total(of) for name, of in parts.items()}, "latency": latency}
    return sum(seconds.values()), ", ".join(f"{name} {s:.3g} s" for name, s in seconds.items())


def local_steps(algorithm: Algorithm, population: Population) -> dict[str, Steps]:
    """Return the local steps of each phase in which clients work, by its name; of more clients than ``ASKED`` these, evenly
    spaced, say who is in the middle.
    """
    ends = population.summary()
    asked = min(population.size, ASKED)
    some = population.num_examples(torch.arange(asked) * (population.size // asked)).cpu()
    counts = torch.stack([torch.tensor(ends.min_examples), some.median(), torch.tensor(ends.max_examples)])
    working = (p for p in algorithm.phases if any(stage.batches.works for stage in p.work.loops))
    return {p.name: Steps(*work(p, counts)[0].tolist()) for p in working}


def between_steps(seconds: float, buffer: Buffer, clients: int) -> str:
    """Say how often an asynchronous server steps where an answer takes ``seconds``."""
    if buffer.seconds is not None:
        return f"{buffer.seconds:.3g} s, an answer in {seconds:.3g} s"
    at_work = buffer.at_work(clients)
    every = seconds * buffer.size / at_work
    return f"{every:.3g} s: {buffer.size} answers of {at_work} clients at work, an answer in {seconds:.3g} s"
