"""Run algorithms on small problems in this process."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.population import problem
from fedfleet.datasets.digits import load
from fedfleet.datasets.partition_config import PARTITIONS
from fedfleet.simulator.algorithm import Algorithm, Cohort, Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.side_effects import ClosureTensors
from fedfleet.simulator.driver import simulate as driver
from fedfleet.simulator.driver.round import Conditions, EngineRound
from fedfleet.simulator.driver.simulate import RoundRecord, simulate, start
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.fleet.policies import ResponsePolicy, WaitAll
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Objective
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS


@dataclass(frozen=True)
class World:
    """A task, its clients, and the server's own examples."""

    task: Task
    population: Any
    root: Any = None


class Game:
    """Scalar games a x^2/2 + b x y - c y^2/2 + p x + q y; a client's examples are rows (a, b, c, p, q)."""

    parts = ("x", "y")
    functions: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1, "y": -1})}

    def _loss(self, z, batch, ctx, key):
        a, b, c, p, q = batch.x.unbind(-1)
        x, y = z["x"]["x"], z["y"]["y"]
        return batch.mean(a * x**2 / 2 + b * x * y - c * y**2 / 2 + p * x + q * y), {}

    def init(self, seed: int):
        return point(1.0, -1.0)

    def metrics(self, outputs, data):
        return {}


class Bowl:
    """Quadratics (a / 2) (w - m)^2; a client's examples are rows (a, m)."""

    parts = ("x",)
    functions: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1})}

    def _loss(self, z, batch, ctx, key):
        a, m = batch.x.unbind(-1)
        return batch.mean(a * (z["x"]["w"] - m) ** 2 / 2), {}

    def init(self, seed: int):
        return {"x": {"w": torch.tensor(1.0, dtype=torch.float64)}}

    def metrics(self, outputs, data):
        return {}


@dataclass(frozen=True)
class Fixed:
    """Devices that take so many seconds each."""

    seconds: tuple[float, ...]

    def times(self, key: Any, clients: Tensor, load: Load) -> Times:
        whole = torch.tensor(self.seconds, dtype=torch.float64)[clients]
        return Times(whole, torch.zeros_like(whole))


def point(x: float, y: float):
    return {"x": {"x": torch.tensor(x, dtype=torch.float64)}, "y": {"y": torch.tensor(y, dtype=torch.float64)}}


def xy(z) -> tuple[float, float]:
    return float(z["x"]["x"]), float(z["y"]["y"])


def rows(*clients: Sequence[Sequence[float]]) -> InMemoryPopulation:
    """Clients from their rows of numbers, float64."""
    sizes = torch.tensor([0, *(len(c) for c in clients)])
    data = torch.tensor([r for c in clients for r in c], dtype=torch.float64)
    domain = torch.zeros(len(clients), dtype=torch.int64)
    return InMemoryPopulation({"x": data}, torch.arange(len(data)), sizes.cumsum(0), domain)


TOY = rows([(1, 2, 1, 1, -1)], [(3, 0, 2, -3, 2)])
"""The two-client game of the CDMA specification; saddle (1/4, 1/2)."""


NET = {"model": "mlp", "hidden": (8,)}


_load: Any = functools.cache(load)


def digits(
    task: str,
    partition: str = "label_sorted",
    clients: int = 30,
    net: Mapping[str, Any] = NET,
    dtype: torch.dtype = torch.float32,
    scale: int = 1,
    **options: Any,
) -> World:
    """Digits of ``scale`` times 8 x 8, and a task for them; clients belong to three domains in turn."""
    data = _load(None)
    x = data.train.x.to(dtype).repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    split = PARTITIONS.make(partition, **options).split(data.train.y, None, clients, 0)
    domain = torch.arange(clients) % 3
    population = InMemoryPopulation({"x": x, "y": data.train.y}, split.indices, split.offsets, domain)
    entry = TASKS[task]
    return with_targets(World(entry.build(entry.options(**net), DataShape(tuple(x.shape[1:]), 10)), population))


def with_targets(world: World) -> World:
    """For tasks that want examples without labels: of every three clients one has none, one half of them, one all."""
    if not getattr(world.task, "unlabelled", False) and "head" not in world.task.parts:
        return world
    p = world.population
    owner = torch.arange(p.size).repeat_interleave(p.offsets.diff())
    place = torch.arange(len(owner)) - p.offsets[owner]
    hidden = torch.zeros(len(p.data["y"]), dtype=torch.bool)
    hidden[p.indices] = (owner % 3 == 2) | ((owner % 3 == 1) & (place % 2 == 1))
    return World(world.task, p.withholding(hidden))


def as_asked(algorithm: Algorithm, world: World) -> World:
    """Return the world with what an algorithm asks of its clients.

    They keep a quarter of their examples from their work, if models are measured on these. Where batches are made by domain,
    examples with labels are of two domains, by these, and the others of a third.
    """
    plans = [stage.batches for phase in algorithm.phases for stage in phase.work.loops]
    population = world.population.sharing() if algorithm.name == "fedka" else world.population
    if any(plan.stratified == "domains" for plan in plans):
        y = population.data["y"]
        population = population.telling(torch.where(y < 0, 2, y % 2))
    if any(plan.held_out for plan in plans):
        population = HeldOut(population, 0.25, 0)
    return replace(world, population=population)


def build(name: str, task: Task, cohort: CohortOptions | None = None, **options: Any) -> Algorithm:
    entry = ALGORITHMS[name]
    return entry.build(entry.options(**options), task, cohort or CohortOptions(size=2))


def records(
    algorithm: Algorithm,
    world: World,
    rounds: int,
    *,
    z: Any = None,
    inner: str = "serial",
    policy: ResponsePolicy | None = None,
    executor: Executor | None = None,
    block_size: int = 4,
    seed: int = 0,
    captures: Captures | None = None,
    held: ClosureTensors | None = None,
    device: str = "cpu",
    **given: Any,
) -> Iterator[RoundRecord]:
    world = as_asked(algorithm, world)
    more = {
        "captures": captures or Captures(),
        "held": held or ClosureTensors(tries=False),
        "device": device,
        "root": world.root,
    }
    setup = Setup.of(algorithm, world.task, world.population, inner, **more)
    executor = executor or LocalExecutor(1)
    executor.start(setup)
    server = None if device == "cpu" else torch.device(device)
    given = {"federation": Federation(policy=policy or WaitAll()), "device": server, **given}
    conditions = Conditions(seed=seed, block_size=block_size, **given)
    try:
        z = world.task.init(seed) if z is None else z
        yield from simulate(algorithm, z, problem(world.population), conditions, executor, rounds)
    finally:
        executor.close()


def play(algorithm: Algorithm, world: World, rounds: int, **options: Any) -> list[Any]:
    """The model after each round."""
    return [algorithm.views["global"].params(r.state) for r in records(algorithm, world, rounds, **options)]


def script(monkeypatch, cohorts: Sequence[Sequence[int]]) -> None:
    """Make invitations follow a script, whatever their size."""
    left = iter(cohorts)

    def invite(self: EngineRound, size: int, *, replace: bool = False) -> Cohort:
        clients = torch.tensor(next(left))
        return Cohort(clients, torch.zeros_like(clients))

    monkeypatch.setattr(EngineRound, "invite", invite)


def positions(monkeypatch) -> list[Any]:
    """Return a list that gets the position of each run started from now on, which has the clients' states."""
    kept = []

    def started(*args, **given):
        kept.append(start(*args, **given))
        return kept[-1]

    monkeypatch.setattr(driver, "start", started)
    return kept


def moved(start: Any, end: Any) -> float:
    """The largest change of what both models have."""
    after = dict(T.named_leaves(end))
    return max(float((after[name] - leaf).abs().max()) for name, leaf in T.named_leaves(start) if leaf.numel())


def flat(z: Any) -> Tensor:
    return torch.cat([leaf.flatten().double() for leaf in T.leaves(z)])


def captured_to_the_bit(algorithm: Algorithm, where: World) -> None:
    """Check that replayed blocks come to the bits of those computed."""
    captures = Captures(after=2)
    found = [
        play(algorithm, where, 6, captures=c, inner="batched", block_size=8)[-1] for c in (Captures(None), captures)
    ]
    assert captures.ready > 0
    assert torch.equal(*map(flat, found))
