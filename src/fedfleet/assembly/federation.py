"""The second stage: the task, the algorithm as it is by itself, and the clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedfleet.assembly import task_setup, user_parts, weights
from fedfleet.assembly.client_features import ClientFeatures
from fedfleet.assembly.data import Loaded, so_far
from fedfleet.config import requirements, resolve, root
from fedfleet.config.federation import steps
from fedfleet.config.plugins import places
from fedfleet.config.population import (
    check_drawn,
    check_grouped,
    check_source_share,
    drawn,
    make_population,
    problem,
    with_clients,
    with_domains,
    with_held_out,
    with_roles,
)
from fedfleet.config.schema import Config
from fedfleet.config.user_data import check_data
from fedfleet.datasets.examples import Dataset
from fedfleet.middleware.compression.options import Step
from fedfleet.middleware.facts import Break, check
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.driver.probe import asked
from fedfleet.simulator.driver.server import initial
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.population import Population
from fedfleet.tasks.options import named_net
from fedfleet.tasks.transformer import is_transformer

BESIDE = {"availability", "selection", "devices", "callbacks"}
"""Sections whose code has no part in clients' work."""


@dataclass(frozen=True, kw_only=True)
class Federated(Loaded):
    """A task, an algorithm and the clients they run on.

    Attributes:
        task: what is learnt.
        bare: the algorithm, without what stands between it and the engine.
        written: the sections whose part is the user's own code.
        up, down: the transforms on the two ways.
        breaks: what of all this takes away what features may need.
        dealt: whether clients were dealt by the partition.
        drawn: whether the partition's seed draws anything.
        population, problem: the clients, and what the algorithm knows of them.
        z: the initial model.
        net_advice: lines on what of the net will rarely do.
        domain_names: what the data call their domains, where clients belong to those.
        cohort_advice: a line where there are fewer clients than are asked by default.

    """

    task: Task
    bare: Algorithm
    written: frozenset[str]
    up: tuple[Step, ...]
    down: tuple[Step, ...]
    breaks: tuple[Break, ...]
    dealt: bool
    drawn: bool
    population: Population
    problem: Problem
    z: Tree
    net_advice: list[str]
    domain_names: tuple[str, ...]
    cohort_advice: tuple[str, ...] = ()

    @property
    def own_work(self) -> frozenset[str]:
        """Return the sections whose part is the user's own code, and has a part in clients' work."""
        return self.written - BESIDE

    @property
    def authors_code(self) -> bool:
        """Whether clients' work has code of authors in it. That of fedfleet itself is known to be pure, and is not tried."""
        model, _, paths = named_net(self.config.task)
        return bool(self.own_work or paths) or (model is not None and is_transformer(model))


def federate(x: Loaded, task: Task | None = None, algorithm: Algorithm | None = None) -> Federated:
    """Return the clients of what was loaded, with a task and an algorithm, those given or those configured. Raises ConfigError."""
    config, data = x.config, x.data
    task = task or task_setup.configured(config, data)
    algorithm = algorithm or task_setup.algorithm(config, task)
    written = frozenset({*x.own, *(here.section for here in places(config))})
    config = task_setup.with_sources(config)
    user_parts.check_callbacks(config)
    config = task_setup.with_base(config, task)
    resolve.check_pairing(config, algorithm, task)
    up, down = tuple(steps(config, "up")), tuple(steps(config, "down"))
    breaks = tuple(requirements.breaks(config, algorithm, task, up, down))
    check(requirements.needs(config, algorithm, up, down), breaks)
    root.check(config, algorithm)
    dealt = _dealt(x, config, task, written)
    resolve.check_roles(config, algorithm, task)
    population = with_roles(config, data, dealt, unlabelled=resolve.unlabelled(algorithm, task))
    check_source_share(task, population)
    population = with_held_out(config, with_domains(config, data, population, algorithm), algorithm)
    result, summary, z = problem(population), population.summary(), task_setup.begun(task, config.seed)
    weights.check_vocabularies(config, data.names.vocabulary)
    net_advice = task_setup.net_advice(config, task, z, data)
    cohort_advice: tuple[str, ...] = ()
    own = "algorithm" in written
    if (size := asked(algorithm, z, result, config.seed) if own else None) is not None:
        config = _as_asked(config, algorithm, size)
    elif (
        "size" not in config.cohort.model_fields_set
        and not algorithm.asynchronous
        and result.clients < (usual := config.cohort.size)
    ):
        config = _asking(config, result.clients)
        if not own:
            asks = f"cohort.size: {usual} clients are asked a round by default"
            cohort_advice = (f"{asks}, and there are {result.clients}: all are asked",)
            algorithm = task_setup.algorithm(config, task)
    config = with_clients(config, data, dealt, population, asynchronous=algorithm.asynchronous is not None)
    resolve.check_local(config, summary.max_examples)
    if config.warm_start is not None:
        z = weights.load_model(Path(config.warm_start), z, task)
    resolve.check_proven(config, algorithm)
    if algorithm.domains is not None:
        check_grouped(f"algorithm={config.algorithm.name!r}", population.size)
        resolve.check_domains(config, data.test, summary.domains)
    initial(algorithm, z, config.seed, result)  # what cannot be is said before the work
    if x.train is None and hasattr(task, "prepare"):
        raise ConfigError(
            f"population.dataset={config.population.dataset.name!r}: task.name={config.task.name!r} needs the training images of "
            f"a published data set: choose one"
        )
    return Federated(
        **so_far(x, config=config),
        task=task,
        bare=algorithm,
        written=written,
        up=up,
        down=down,
        breaks=breaks,
        dealt=isinstance(data, Dataset),
        drawn=drawn(config, x.data, given=_given(written)),
        population=population,
        problem=result,
        z=z,
        net_advice=net_advice,
        domain_names=getattr(data, "domains", ()) if config.domains.kind == "given" else (),
        cohort_advice=cohort_advice,
    )


def _given(written: frozenset[str]) -> bool:
    return not {"data", "population"}.isdisjoint(written)


def _dealt(x: Loaded, config: Config, task: Task, written: frozenset[str]) -> Population:
    """Return all clients of the data, in their domains. Raises ConfigError."""
    check_drawn(config, x.data, given=_given(written))
    dealt = make_population(config, x.data, lambda kind, clients: _vectors(config, task)(kind, clients))
    if {"data", "population.dataset"} & written:
        part = next((p for p in ("population", "data") if getattr(x.given, p) is not None), "population.dataset")
        check_data(config, part, x.data, dealt)
    return dealt


def _vectors(config: Config, task: Task) -> ClientFeatures:
    """Return what clients make of the model they are grouped by, which is the same for runs of every seed."""
    z = task.init(config.partition_seed)
    return ClientFeatures(
        task, z if config.warm_start is None else weights.load_model(Path(config.warm_start), z, task)
    )


def _as_asked(config: Config, algorithm: Algorithm, size: int) -> Config:
    """Return the configuration with the cohort that one's own algorithm invites. Raises ConfigError where it says another."""
    wanted = config.cohort.size
    if algorithm.asynchronous or size == wanted:
        return config
    if "size" in config.cohort.model_fields_set:
        raise ConfigError(
            f"cohort.size={wanted}: the algorithm {config.algorithm.name} invites {size} clients: set cohort.size={size}, "
            f"leave it out, or make the algorithm so that it invites {wanted}"
        )
    return _asking(config, size)


def _asking(config: Config, size: int) -> Config:
    return config.model_copy(update={"cohort": config.cohort.model_copy(update={"size": size})})
