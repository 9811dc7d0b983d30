"""Small problems with domains, for the tests of AFL and DRFA."""

import math
from collections.abc import Sequence

import torch

from fedfleet.algorithms.afl import State
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.block.side_effects import ClosureTensors
from fedfleet.simulator.population import InMemoryPopulation
from tests.algorithms.harness import Bowl, World, build, records

EXACT = {"batch_size": None, "lr": 0.1, "average": False}


def world(*clients: Sequence[Sequence[float]], domain: Sequence[int] | None = None) -> World:
    """Clients with rows (a, m) of losses a (w - m)^2 / 2; each a domain of its own if none are given."""
    sizes = torch.tensor([0, *(len(c) for c in clients)])
    data = torch.tensor([r for c in clients for r in c], dtype=torch.float64)
    of = torch.arange(len(clients)) if domain is None else torch.tensor(domain)
    return World(Bowl(), InMemoryPopulation({"x": data}, torch.arange(len(data)), sizes.cumsum(0), of))


TWO = world([(1, 0)], [(4, 3)])
"""The toy of the specification, 9.1: saddle w = 2, lambda = (2/3, 1/3), value 2."""


def at(w: float):
    return {"x": {"w": torch.tensor(w, dtype=torch.float64)}}


_built: dict[str, tuple[Algorithm, ClosureTensors, World]] = {}


def run(
    where: World, rounds: int, name: str = "afl", *, w: float = 0.0, size: int | None = None, seed: int = 0, **options
) -> list[State]:
    """Run an algorithm, which is built, and tried before its first block, once for all seeds."""
    key = f"{id(where)} {name} {size} {options}"
    if key not in _built:
        everybody = CohortOptions(size=size or where.population.size)
        algorithm = build(name, where.task, everybody, **{**EXACT, **options} if name == "afl" else options)
        _built[key] = algorithm, ClosureTensors(), where
    algorithm, held, _ = _built[key]
    return [r.state for r in records(algorithm, where, rounds, z=at(w), seed=seed, held=held)]


def w(state: State) -> float:
    return float(state.z["x"]["w"])


MANY = world([(1, 0), (2, 1)], [(4, 3)], [(1, -2), (1, 5), (3, 1)], [(2, 2)], [(1, 1), (1, 4)], domain=[0, 1, 1, 0, 2])
"""Domains of 3, 4 and 2 examples."""


def losses(where: World, point: float) -> torch.Tensor:
    """The loss of each domain."""
    p = where.population
    a, m = p.data["x"].unbind(1)
    each = a * (point - m) ** 2 / 2
    return torch.stack(
        [
            torch.cat([each[p.offsets[i] : p.offsets[i + 1]] for i in range(p.size) if p.domain[i] == k]).mean()
            for k in range(int(p.domain.max()) + 1)
        ]
    )


def mean_of(runs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and its standard error."""
    stacked = torch.stack(list(runs))
    return stacked.mean(0), stacked.std(0) / math.sqrt(len(stacked))
