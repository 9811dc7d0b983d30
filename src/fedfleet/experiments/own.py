"""The parts of a run that are given in Python instead of named in its configuration: what they are, and whether they will do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.config import schema as C
from fedfleet.config.population import Data
from fedfleet.config.reading import show
from fedfleet.config.schema import Config, named
from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset, fixed_draw
from fedfleet.experiments.provenance import describe, differences, same
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.executors.likeness import DATA, SHORT
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.poisoned import Poisoned
from fedfleet.simulator.population import InMemoryPopulation, Population, decode

TASK = ("parts", "objectives", "functions", "init", "metrics")
POPULATION = ("size", "summary", "num_examples", "domains", "local_data", "to")
WANTED = {
    "task": "an object with what fedfleet.simulator.author.Task lists",
    "algorithm": "a fedfleet.simulator.author.Algorithm",
    "population": "an object with what fedfleet.simulator.population.Population lists",
    "data": "a fedfleet.Dataset or a fedfleet.FederatedDataset",
}


FEW, ROWS = 8, 1000  # clients, and examples of each, that are looked at


class Own(NamedTuple):
    """What was given in Python, ``clients`` with the examples they are tested on."""

    task: Task | None
    algorithm: Algorithm | None
    population: Population | None
    data: Data | None
    clients: Data | None

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return what each part is, for the record; a population, and what it is tested on, are "data"."""
        parts = {"task": self.task, "algorithm": self.algorithm}
        found = {name: describe(part) for name, part in parts.items() if part is not None}
        if self.clients is None:
            return found
        about = describe(self.clients, of=self.data if self.population is None else self.population)
        if isinstance(self.clients, FederatedDataset):  # whatever it holds, this is what clients learn from
            about["options"]["local_data"] = f"of a few clients sha256:{digest('', sampled(self.clients.population))}"
        about["given"] = [part for part in ("population", "data") if getattr(self, part) is not None]
        return {**found, "data": about}


def parts(
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    population: Population | None = None,
    data: Data | None = None,
) -> Own:
    """Return what was given, and refuse what is not what it is given as. Raises ConfigError."""
    check_task(task)
    check_algorithm(algorithm)
    _check("population", population, () if isinstance(population, type) else POPULATION)
    _check("data", data, (Dataset, FederatedDataset))
    clients = data if population is None else federated(population, data)
    if isinstance(clients, FederatedDataset):
        _check_clients(clients.population)
    return Own(task, algorithm, population, data, clients)


def check_task(task: Any) -> None:
    """Refuse what is no task, None aside. Raises ConfigError."""
    _check("task", task, () if isinstance(task, type) else TASK)


def check_algorithm(algorithm: Any) -> None:
    """Refuse what is no algorithm, None aside, and one whose model nobody could evaluate. Raises ConfigError."""
    _check("algorithm", algorithm, Algorithm)
    if algorithm is not None and "global" not in algorithm.views:
        raise ConfigError(
            f"algorithm={algorithm.name or 'an Algorithm'}: it has no view 'global', the model that is evaluated and kept: give "
            f"it views={{'global': View(…)}}"
        )


def check_same(folder: Any, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a run with other parts than it began with. Raises ConfigError."""
    for part in ("task", "algorithm", "data"):
        before, here = was.get(part), now.get(part)
        name = " and ".join((before or here or {}).get("given", [part]))
        if (before is None) != (here is None):
            raise ConfigError(
                f"{folder}: the run {'had' if here is None else 'did not have'} {name} of its own, made in Python: give the same "
                f"to fedfleet.resume"
            )
        if before is not None and here is not None and not same(before, here):
            old, new = differences(before, here)
            raise ConfigError(
                f"{folder}: the run began with {name} {before['name']} ({old}), and this one is {here['name']} ({new}): give "
                f"the same to fedfleet.resume, or start a new run"
            )


def check_unused(config: Config, given: Own) -> None:
    """Refuse options of what a part made in Python takes the place of. Raises ConfigError."""
    for section, arguments in C.OWN.items():
        part = next((a for a in arguments if getattr(given, a) is not None), None)
        said = {k: v for k, v in C.as_said(config, section).items() if k != C.NAMED[section].key}
        if part is not None and said:
            key, value = next(iter(said.items()))
            raise ConfigError(
                f"{section}.{key}={show(value)}: it is no option of the {part} that is made in Python: leave it out (or, after a "
                f"file that says it, give {section}=null)"
            )


def sampled(population: Population) -> dict[str, Tensor]:
    """Return what a few clients are given, the same few at every call: their examples, how many they are, their domains."""
    each = [_given(population, client) for client in fixed_draw(population.size, FEW).split(1)]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def read_by_workers(population: Population) -> dict[str, str]:
    """Return what tells the clients' data that a worker reads or makes for itself from others; nothing of what travels to it.

    A population that reads files may say what tells them, as its ``content()``; of others it is what a few clients are given.
    """
    whole = population
    while isinstance(whole, HeldOut | Poisoned):
        whole = whole.whole
    if isinstance(whole, InMemoryPopulation):
        return {}
    if (content := getattr(whole, "content", None)) is not None:
        return {DATA: content()}
    return {"what a few clients are given": f"sha256 {digest('', sampled(population))[:SHORT]}"}


def _given(population: Population, ids: Tensor) -> dict[str, Tensor]:
    local = population.local_data(ids)
    rows = torch.cat([row[: min(int(count), ROWS)] for row, count in zip(local.rows, local.counts, strict=True)])
    about = {" counts": local.counts, " domain": local.domain}
    return {**{name: column[rows] for name, column in local.data.items()}, **about}


def _check_clients(population: Population) -> None:
    """Refuse clients that cannot be asked for their examples, or whose examples are others when asked again."""
    name, pair = type(population).__name__, fixed_draw(population.size, FEW)[:2]
    try:
        alone = [_given(population, client) for client in pair.split(1)]
        known = digest("", {k: torch.cat([one[k] for one in alone]) for k in alone[0]})
        same_again = digest("", _given(population, pair)) == known
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise ConfigError(
            f"population={name}: what clients hold cannot be read ({type(e).__name__}: {one_line(e)}): give "
            f"{WANTED['population']}"
        ) from e
    if not same_again:
        raise ConfigError(
            f"population={name}: `local_data` gives a client other examples when asked again, or with other clients: make it a "
            f"function of the client's number alone"
        )


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


def check_data(config: Config, given: Own, data: Data, population: Population) -> None:
    """Refuse data of one's own whose clients and test examples are not of one kind. Raises ConfigError."""
    part = "data" if given.population is None else "population"
    what, test, found = f"{part}={named(config, 'population.dataset')!r}", data.test, sampled(population)
    if (x := found.get("x")) is not None:
        for of, here, there in (
            ("shape", tuple(x.shape[1:]), tuple(test.x.shape[1:])),
            ("dtype", decode(x[:1]).dtype, decode(test.x[:1]).dtype),
        ):
            if here != there:
                raise ConfigError(
                    f"{what}: clients' examples are of {of} {here}, those to test on of {there}: give test examples of the "
                    f"clients' kind"
                )
    for whose, known in (("training", getattr(data, "train", None)), ("test", test)):  # clients' are a fault of theirs
        if known is not None and known.classes and len(known) and (most := int(known.y.max())) >= known.classes:
            raise ConfigError(
                f"{what}: there are {whose} labels up to {most}, and classes={known.classes}: labels go from 0 to classes - 1"
            )
    clients, names = population.summary().domains, data.domains
    if named(config, "domains") != "given":
        return
    there = clients if isinstance(data, FederatedDataset) else _domains(data.train)
    if names and there is not None and len(names) != there:
        raise ConfigError(
            f"{what}: {len(names)} names of domains, {', '.join(names)}, and there are {there}: name each"
        )
    if test.domain is None or clients == 1:
        return
    if (tested := len(test.domain.unique())) != clients or int(test.domain.max()) >= clients:
        raise ConfigError(
            f"{what}: clients are of {clients} domains, test examples of {tested}, the last of them {int(test.domain.max())}: "
            f"give test examples of each domain, numbered as the clients' from 0, or without domains"
        )


def _domains(examples: Examples) -> int | None:
    return None if examples.domain is None else int(examples.domain.max()) + 1
