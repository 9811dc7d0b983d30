"""Data and clients of one's own: what they are, whether they will do, and what a few clients hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfleet.config.plugins import Place, made
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset, fixed_draw
from fedfleet.datasets.names import NO_NAMES
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.errors import ConfigError, one_line, show
from fedfleet.simulator.population import Population, decode

Data = Dataset | FederatedDataset
POPULATION = ("size", "summary", "num_examples", "domains", "local_data", "to")
WANTED = {
    "task": "fedfleet.tasks.from_module(net) of a net, or an object with what fedfleet.author.Task lists",
    "algorithm": "a fedfleet.author.Algorithm",
    "population": "an object with what fedfleet.simulator.population.Population lists",
    "data": "what fedfleet.data.from_dataframe, from_arrays and others return, a fedfleet.Dataset or FederatedDataset",
}
FEW, ROWS = 8, 1000  # clients, and examples of each, that are looked at


def of_place(config: Config, here: Place, folder: Path) -> Data:
    """Return the data that a configuration names of an author's own; a population brings what it is tested on as its ``test``.

    It is told the number of clients asked for, or None, the seed of the partition and the folder of the original data. Raises
    ConfigError.
    """
    p, result = config.population, list[Data]()

    def check(x: Any) -> None:
        if not isinstance(x, Dataset | FederatedDataset):
            check_is("population", x, () if isinstance(x, type) else POPULATION)
            clients: Any = x
            x = federated(clients, None)
        if isinstance(x, FederatedDataset):
            check_population(x.population)
        result.append(x)

    made(config, here, check, clients=p.clients, seed=config.partition_seed, data_dir=folder)
    return result[0]


def sampled(population: Population) -> dict[str, Tensor]:
    """Return what a few clients are given, the same few at every call: their examples, how many they are, their domains."""
    each = [_given(population, client) for client in fixed_draw(population.size, FEW).split(1)]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def _given(population: Population, ids: Tensor) -> dict[str, Tensor]:
    local = population.local_data(ids)
    rows = torch.cat([row[: min(int(count), ROWS)] for row, count in zip(local.rows, local.counts, strict=True)])
    about = {" counts": local.counts, " domain": local.domain}
    return {**{name: column[rows] for name, column in local.data.items()}, **about}


def check_population(population: Population) -> None:
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


def check_is(part: str, x: Any, wanted: Any) -> None:
    """Refuse what is not what it is given as, None aside. Raises ConfigError."""
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

    called, names = getattr(given, "name", None), getattr(given, "names", NO_NAMES)
    if len(names.clients) != population.size:  # of other clients, that the examples to test on came with
        names = replace(names, clients=(), tested=(), held_out=())
    return FederatedDataset(
        called if isinstance(called, str) else name,
        population,
        test,
        getattr(given, "sample", none),
        names=names,
    )


def check_data(config: Config, part: str, data: Data, population: Population) -> None:
    """Refuse data of one's own, given as a part, whose clients and test examples are not of one kind. Raises ConfigError."""
    what, test, result = f"{part}={config.population.dataset.name!r}", data.test, sampled(population)
    if (x := result.get("x")) is not None:
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
    if config.domains.kind != "given":
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
