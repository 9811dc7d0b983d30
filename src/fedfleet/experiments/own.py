"""The parts of a run that are given in Python instead of named in its configuration: whether they will do."""

from __future__ import annotations

from typing import Any

import torch

from fedfleet.config.population import Data
from fedfleet.config.reading import show
from fedfleet.config.schema import Config, named
from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.population import Population

TASK = ("parts", "objectives", "functions", "init", "metrics")
POPULATION = ("size", "summary", "num_examples", "domains", "local_data", "to")
WANTED = {
    "task": "an object with what fedfleet.simulator.author.Task lists",
    "algorithm": "a fedfleet.simulator.author.Algorithm",
    "population": "an object with what fedfleet.simulator.population.Population lists",
    "data": "a fedfleet.Dataset or a fedfleet.FederatedDataset",
}


def check(task: Any, algorithm: Any, population: Any, data: Any) -> None:
    """Refuse what is not what it is given as. Raises ConfigError."""
    _check("task", task, () if isinstance(task, type) else TASK)
    _check("algorithm", algorithm, Algorithm)
    _check("population", population, () if isinstance(population, type) else POPULATION)
    _check("data", data, (Dataset, FederatedDataset))


def _check(part: str, x: Any, wanted: Any) -> None:
    if x is None:
        return
    names = isinstance(wanted, tuple) and all(isinstance(w, str) for w in wanted)
    lacking = [w for w in wanted if not hasattr(x, w)] if names else []
    if (bool(wanted) and not lacking) if names else isinstance(x, wanted):
        return
    key = {"population": "population.dataset", "data": "population.dataset"}.get(part, part)
    what = show(x) if isinstance(x, str | int | float | list | dict) else f"a {type(x).__name__}"
    why = f"it has no {lacking[0]!r}" if lacking and len(lacking) < len(wanted) else "it cannot be one"
    by_name = f"; one of fedfleet's own is named in the configuration: {key}={x}" if isinstance(x, str) else ""
    raise ConfigError(f"{part}={what}: {why}: give {WANTED[part]}{by_name}")


def federated(population: Population, data: Data | None) -> FederatedDataset:
    """Return clients with the examples they are tested on, their own or those of ``data``. Raises ConfigError."""
    given = population if data is None else data
    name = type(population).__name__
    if not isinstance(test := getattr(given, "test", None), Examples):
        raise ConfigError(
            f"population={name}: it comes without test examples: give it `test`, a fedfleet.Examples, or give "
            f"fedfleet.run also the data= whose test examples fit"
        )

    def none(size: int) -> Examples:
        raise ConfigError(
            f"evaluation.train_examples={size}: the population {name} does not give any: leave it out, or give it a method "
            f"`sample(size)` that returns a fedfleet.Examples"
        )

    called = getattr(given, "name", None)
    return FederatedDataset(
        called if isinstance(called, str) else name, population, test, getattr(given, "sample", none)
    )


def check_data(config: Config, data: Data, population: Population) -> None:
    """Refuse data of one's own whose clients and test examples are not of one kind. Raises ConfigError."""
    what, test = f"data={named(config, 'population.dataset')!r}", data.test
    x = population.local_data(torch.zeros(1, dtype=torch.int64)).data.get("x")
    if x is not None and x.shape[1:] != test.x.shape[1:]:
        raise ConfigError(
            f"{what}: clients' examples are of shape {tuple(x.shape[1:])}, those to test on of {tuple(test.x.shape[1:])}: give "
            f"test examples of the clients' kind"
        )
    clients = population.summary().domains
    if test.domain is None or clients == 1 or named(config, "domains") != "given":
        return
    if (tested := len(test.domain.unique())) != clients or int(test.domain.max()) >= clients:
        raise ConfigError(
            f"{what}: clients are of {clients} domains, test examples of {tested}, the last of them {int(test.domain.max())}: "
            f"give test examples of each domain, numbered as the clients' from 0, or without domains"
        )
