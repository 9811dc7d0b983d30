"""Small federations with clients whose labels are withheld, and algorithms on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from harness import World
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.population import problem
from fedfleet.datasets.digits import load
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import RoundRecord, simulate
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

PAIR = CohortOptions(size=2)
SIZES, TARGETS = (30, 17, 24, 9, 21), (4,)


def population(x: Tensor, y: Tensor, sizes: Sequence[int], targets: Sequence[int]) -> InMemoryPopulation:
    """Clients of these sizes, one after the other; those of ``targets`` without labels."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rows = torch.arange(int(offsets[-1]))
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    whole = InMemoryPopulation({"x": x[rows], "y": y[rows]}, rows, offsets, torch.arange(len(sizes)))
    return whole.withholding(torch.isin(owner, torch.tensor(targets)))


def world(
    sizes: Sequence[int] = SIZES, targets: Sequence[int] = TARGETS, *, dtype: torch.dtype = torch.float32, **task: Any
) -> World:
    """Digits, each client's with an offset of its own, so that domains differ."""
    data = load(None).train  # type: ignore[arg-type]
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = data.x[: len(owner)].to(dtype) + 0.2 * owner[:, None, None, None]
    entry = TASKS["two_heads"]
    hidden = {} if "model" in task else {"hidden": (8,)}
    made = entry.build(entry.options(**hidden, **task), DataShape((1, 8, 8), 10))
    return World(made, population(x, data.y, sizes, targets))


def build(task: Any, name: str = "fact", cohort: CohortOptions = PAIR, **options: Any) -> Algorithm:
    entry = ALGORITHMS[name]
    return entry.build(entry.options(**{"batch_size": 7, "lr": 0.1, **options}), task, cohort)


def records(
    algorithm: Algorithm, where: World, rounds: int, *, inner: str = "serial", z: Any = None, **given: Any
) -> Iterator[RoundRecord]:
    setup = Setup.of(algorithm, where.task, where.population, inner, captures=Captures())
    executor = LocalExecutor(1)
    executor.start(setup)
    conditions = Conditions(**{"seed": 0, "block_size": 4, **given})
    z = where.task.init(conditions.seed) if z is None else z
    try:
        yield from simulate(algorithm, z, problem(where.population), conditions, executor, rounds)
    finally:
        executor.close()


def states(where: World, count: int, given: Mapping[str, Any] | None = None, **options: Any) -> list[Any]:
    """The state of FACT after each round; ``given`` are the conditions."""
    return [r.state for r in records(build(where.task, **options), where, count, **(given or {}))]


def same(a: Any, b: Any) -> bool:
    """Say whether two trees are the same to the bit."""
    return all(torch.equal(x, y) for x, y in zip(T.leaves(a), T.leaves(b), strict=True))
