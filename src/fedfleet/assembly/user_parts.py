"""The parts of a run that are given in Python instead of named in its configuration: what they are, and whether they will do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedfleet.assembly.provenance import describe, differences, same
from fedfleet.config import schema as C
from fedfleet.config.plugins import places
from fedfleet.config.schema import Config
from fedfleet.config.user_data import POPULATION, Data, check_is, check_population, federated, sampled
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.middleware.attacks.poisoned import Poisoned
from fedfleet.simulator.algorithm import Algorithm, Task, View
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.executors.fingerprint import DATA, SHORT
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation, Population
from fedfleet.simulator.work import Phase
from fedfleet.tracking.callback import Callback

TASK = ("parts", "objectives", "functions", "init", "metrics")


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
        result = {name: describe(part) for name, part in parts.items() if part is not None}
        if self.clients is None:
            return result
        about = describe(self.clients, of=self.data if self.population is None else self.population)
        if isinstance(self.clients, FederatedDataset):  # whatever it holds, this is what clients learn from
            about["options"]["local_data"] = f"of a few clients sha256:{digest('', sampled(self.clients.population))}"
        about["given"] = [part for part in ("population", "data") if getattr(self, part) is not None]
        return {**result, "data": about}


def parts(
    task: Task | None = None,
    algorithm: Algorithm | None = None,
    population: Population | None = None,
    data: Data | None = None,
) -> Own:
    """Return what was given, and refuse what is not what it is given as. Raises ConfigError."""
    check_task(task)
    check_algorithm(algorithm)
    check_is("population", population, () if isinstance(population, type) else POPULATION)
    check_is("data", data, (Dataset, FederatedDataset))
    clients = data if population is None else federated(population, data)
    if isinstance(clients, FederatedDataset):
        check_population(clients.population)
    return Own(task, algorithm, population, data, clients)


def check_task(task: Any) -> None:
    """Refuse what is no task, None aside. Raises ConfigError."""
    check_is("task", task, () if isinstance(task, type) else TASK)


def check_algorithm(algorithm: Any) -> None:
    """Refuse what is no algorithm, None aside, and one whose model nobody could evaluate. Raises ConfigError."""
    check_is("algorithm", algorithm, Algorithm)
    if algorithm is None:
        return
    said = f"algorithm={algorithm.name or 'an Algorithm'}"
    if not isinstance(algorithm.phases, tuple | list) or not all(
        isinstance(phase, Phase) for phase in algorithm.phases
    ):
        raise ConfigError(f"{said}: its phases are no tuple of fedfleet.author.Phase: give phases=(train,)")
    if "global" not in algorithm.views or not all(isinstance(view, View) for view in algorithm.views.values()):
        raise ConfigError(
            f"{said}: it has no view 'global', the model that is evaluated and kept: give it views={{'global': View(…)}}"
        )


def check_callbacks(config: Config) -> None:
    """Refuse what is named as a callback and is none, as far as its class tells before it is called. Raises ConfigError."""
    for here in places(config, ("callbacks",)):
        make: Any = here.found(config.code_dir)
        if isinstance(make, type) and not issubclass(make, Callback):
            raise ConfigError(f"{here.at}.name={here.name!r}: it is no callback: make the class of fedfleet.Callback")


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
        said = C.at(config, section)
        key = next((k for k in type(said).model_fields if k in said.model_fields_set - {"name"}), None)
        if part is not None and key is not None:
            raise ConfigError(
                f"{section}.{key}={show(said.model_dump(mode='json')[key])}: it is no option of the {part} that is made in "
                f"Python: leave it out (or, after a file that says it, give {section}=null)"
            )


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
