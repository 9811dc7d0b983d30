"""A case as the engine sees it: task, algorithm, clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.cdma_loop import ALPHA
from benchmarks.fedmm_loop import ETA3, MU, is_target
from benchmarks.peers import workload
from benchmarks.peers.workload import CLASSES, Case
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.commands.rules import How
from fedfleet.config import rules
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.ambient import EXACT, Gpu
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.driver.probe import probe
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import RoundRecord, simulate
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.fleet.availability import Always, Availability
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.population import InMemoryPopulation, Population
from fedfleet.tasks.adaptation import AdaptationOptions, DomainAdaptation
from fedfleet.tasks.auc import AucMaximisation, AucOptions
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions
from fedfleet.tasks.robust import RobustOptions, RobustTraining

EXTRA: dict[str, dict[str, Any]] = {
    "cdma_ada": {"alpha": ALPHA},
    "fedmm": {"mu1": MU, "mu2": MU, "eta3": {"kind": "constant", "value": ETA3}},
}
"""Options of the algorithms, besides those that all have."""
ALWAYS = Always()
SOON = 3
"""Blocks of a kind after which it is captured: all are before the warm-up ends, as they would be in a run of some length."""


@dataclass(frozen=True)
class World:
    """What one run needs."""

    case: Case
    task: Task
    algorithm: Algorithm
    population: Population


class OwnNet(Classification):
    """Classification with a net of the benchmarks."""

    def __init__(self, case: Case):
        self._case = case
        super().__init__(ModelOptions(), DataShape(case.shape, CLASSES))

    def _build(self, seed: int) -> nn.Module:
        return workload.net(replace(self._case, seed=seed))


def task(case: Case) -> Task:
    """Return what the clients of a case learn."""
    shape = DataShape(case.shape, CLASSES)
    if case.task == "robust":
        return RobustTraining(RobustOptions(model=case.model, hidden=(200, 200)), shape)
    if case.task in ("domain_adaptation", "source_only"):
        loss = "dann" if case.task == "domain_adaptation" else "none"
        return DomainAdaptation(AdaptationOptions(model="cnn", loss=loss), shape)
    if case.task == "auc":
        return AucMaximisation(AucOptions(model=case.model), shape)
    if case.model == "cnn":
        return OwnNet(case)
    return Classification(ModelOptions(model=case.model, hidden=(200, 200)), shape)


def algorithm(case: Case, of: Task, falling: bool = False) -> Algorithm:
    """Return the algorithm of a case, with learning rates that fall each round if asked."""
    entry = ALGORITHMS[case.algorithm]
    given: dict[str, Any] = {"steps": case.steps, "batch_size": case.batch, "lr": case.lr}
    given |= {"lr_schedule": {"kind": "ExponentialLR", "gamma": 0.9999}} if falling else {}
    return entry.build(entry.options(**given, **EXTRA.get(case.algorithm, {})), of, CohortOptions(size=case.cohort))


def population(case: Case) -> InMemoryPopulation:
    """Return the clients of a case, their data in memory."""
    x, y = workload.data(case)
    total = case.clients * case.samples
    offsets = torch.arange(0, total + 1, case.samples)
    tensors = {"x": x.flatten(0, 1), "y": y.flatten()}
    domain = torch.zeros(case.clients, dtype=torch.int64)
    found = InMemoryPopulation(tensors, torch.arange(total), offsets, domain)
    if case.task != "domain_adaptation":
        return found
    return found.withholding(torch.tensor([is_target(c) for c in range(case.clients)]).repeat_interleave(case.samples))


def enlarged(population: InMemoryPopulation, clients: int) -> InMemoryPopulation:
    """Return so many clients of equal size; client i holds the data of client i modulo the given ones."""
    rows = population.indices.reshape(population.size, -1)
    owner = torch.arange(clients) % population.size
    offsets = torch.arange(0, clients * rows.shape[1] + 1, rows.shape[1])
    return InMemoryPopulation(population.data, rows[owner].flatten(), offsets, population.domain[owner])


def build(case: Case, clients: Population | None = None, falling: bool = False) -> World:
    """Return a case made ready, with learning rates that fall each round if asked."""
    of = task(case)
    return World(case, of, algorithm(case, of, falling), population(case) if clients is None else clients)


def setup(world: World, inner: str, device: str = "cpu", capture: bool = True, gpu: Gpu = EXACT) -> Setup:
    """Return what workers need; there is nothing to evaluate."""
    captures = Captures(after=SOON if capture else None)
    return Setup.of(world.algorithm, world.task, world.population, inner, device=device, gpu=gpu, captures=captures)


def notes(world: World) -> Notes:
    """Learn what factoring the clients' weights takes."""
    return probe(world.algorithm, world.task.init(world.case.seed), problem(world), setup(world, "factored"))


def rule(world: World, device: str = "cpu") -> How:
    """Return the product's own choice."""
    z, learned = world.task.init(world.case.seed), notes(world)
    return How(rules.inner(z, learned, device), rules.block_size(world.case.cohort, z, learned, device))


def problem(world: World) -> Problem:
    """Return the federation as algorithms see it."""
    return Problem(world.population.size, float(world.case.samples), world.population.num_examples)


def conditions(world: World, how: How, online: Availability = ALWAYS) -> Conditions:
    """Return how the federation behaves: all who are online answer at once."""
    return Conditions(
        seed=world.case.seed,
        block_size=how.block_size,
        federation=Federation(availability=online),
    )


def play(
    world: World,
    executor: Executor,
    how: How,
    rounds: int,
    device: str = "cpu",
    capture: bool = True,
    gpu: Gpu = EXACT,
    online: Availability = ALWAYS,
) -> Iterator[RoundRecord]:
    """Start the executor and run so many rounds, without any evaluation; the caller closes the executor."""
    executor.start(setup(world, how.inner, device, capture, gpu))
    z = world.task.init(world.case.seed)
    yield from simulate(world.algorithm, z, problem(world), conditions(world, how, online), executor, rounds)
