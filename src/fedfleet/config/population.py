"""Turn the configured data set into clients, and into examples to evaluate on."""

from __future__ import annotations

import json

import torch
from pydantic import BaseModel
from torch import Tensor

from fedfleet.config import schema as C
from fedfleet.config.availability import known
from fedfleet.config.plugins import place
from fedfleet.config.schema import Config
from fedfleet.config.selection import asked
from fedfleet.config.user_data import Data, of_place, sampled
from fedfleet.datasets.domain_config import ClientFeatures, Given
from fedfleet.datasets.examples import Dataset, Examples, FederatedDataset
from fedfleet.datasets.files import DataError, data_dir
from fedfleet.datasets.partition import Partition
from fedfleet.datasets.registry import DATASETS, FEDERATED, Asked
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.domains import Grouped
from fedfleet.simulator.errors import ConfigError, one_line, show
from fedfleet.simulator.held_out import HeldOut
from fedfleet.simulator.population import InMemoryPopulation, Population
from fedfleet.simulator.registry import ByPath

PER_CLIENT_UP_TO = 1_000_000
"""Clients above which to evaluate each of them at every evaluation is refused."""
GROUPED_UP_TO = 10_000_000
"""Clients above which they cannot be grouped into domains, nor domains be learnt on."""
NEAR = 0.01  # how far from the true share of labels a task may think it, as a part of it


def data_key(config: Config) -> str:
    """Return what decides the data: configurations with equal keys can share what `load_data` gives."""
    p = config.population
    mine = isinstance(p.dataset, ByPath)
    own = [p.clients, config.partition_seed] if mine or p.dataset.name in FEDERATED else []
    own += [config.code_dir] if mine else []
    return json.dumps([p.dataset.model_dump(mode="json"), p.data_dir, *own], sort_keys=True)


def load_data(config: Config) -> Data:
    """Load the configured data set. Raises DataError, and ConfigError where it comes in clients and a partition is given."""
    p, name = config.population, config.population.dataset.name
    if name in FEDERATED:
        check_undealt(config, name)
    if (here := place(config, "population.dataset")) is not None:
        data = of_place(config, here, data_dir(p.data_dir))
    else:
        try:
            data = DATASETS.build(p.dataset, Asked(data_dir(p.data_dir), p.clients, config.partition_seed))
        except DataError as e:
            raise DataError(f"{_key_of(p.dataset, str(e))}{e}") from e
    if isinstance(data, FederatedDataset):
        check_undealt(config, name)
    return data


def _key_of(dataset: BaseModel, said: str) -> str:
    """Return the option of a data set whose value, or a file below it, a message begins with; "" where it begins otherwise."""
    for option, value in dataset.model_dump(mode="json").items():
        if isinstance(value, str) and value and said.startswith((f"{value}: ", f"{value}/")):
            return f"population.dataset.{option}{'=' if said.startswith(f'{value}: ') else ': '}"
    return ""


def with_digests(config: Config, data: Data) -> Config:
    """Return the configuration with digests of what it names by a path and was read: of the data, and of a partition.

    So runs on two tables that have lain at one path are never taken for the same. Raises DataError where a digest is given and
    is another.
    """
    p, given, dealing = config.population, config.population.dataset, config.population.partition
    changes = {}
    if hasattr(given, "sha256"):
        changes["dataset"] = given.model_copy(update={"sha256": (result := _digest(data))})
        if given.sha256 not in (None, result):
            raise DataError(
                f"population.dataset.sha256={given.sha256!r}: {data.name} now holds other data ({result}): give those that it "
                f"held, or leave this out in a new run"
            )
    if isinstance(data, Dataset) and getattr(dealing, "sha256", "") is None:  # one that is given, it checks itself
        changes["partition"] = dealing.model_copy(update={"sha256": dealing.digest()})
    return config.model_copy(update={"population": p.model_copy(update=changes)}) if changes else config


def _digest(data: Data) -> str:
    """Return a digest of all examples and of who holds them."""
    tensors: dict[str, Tensor] = {}
    parts = {"test": data.test} | ({"train": data.train} if isinstance(data, Dataset) else {})
    for name, part in parts.items():
        result = {"x": part.x, "y": part.y, "domain": part.domain}
        tensors |= {f"{name} {column}": tensor for column, tensor in result.items() if tensor is not None}
    if isinstance(data, FederatedDataset) and isinstance(whole := data.population, InMemoryPopulation):
        tensors |= {**whole.data, "indices": whole.indices, "offsets": whole.offsets, " domain": whole.domain}
    elif isinstance(data, FederatedDataset):  # of any number of clients
        tensors |= sampled(data.population)
    words = f" {data.test.words}" if data.test.words else ""
    return digest(f"{data.test.classes} {data.domains}{words}", tensors)


def check_undealt(config: Config, name: str) -> None:
    """Refuse a partition of data that come in clients. Raises ConfigError."""
    if (kind := config.population.partition.kind) != "iid":
        raise ConfigError(
            f"population.partition={kind!r}: the data set {name!r} comes in clients: leave it out, or give iid"
        )


def make_population(config: Config, data: Data, vectors: ClientFeatures | None = None) -> Population:
    """Return the clients of a data set in their domains, dealt by the configured partition if it has none.

    ``vectors`` says what clients make of the initial model. Raises ConfigError.
    """
    check_targets(config, data)
    clients = _clients(config, data)
    kind = config.domains.kind
    if kind != "given":
        check_grouped(f"domains={kind!r}", clients.size)
    try:
        return config.domains.group(clients, config.partition_seed, vectors)
    except ValueError as e:
        raise ConfigError(f"domains={kind!r}: {one_line(e)}") from None


def check_targets(config: Config, data: Data) -> None:
    """Refuse what goes by labels where the data have targets. Raises ConfigError."""
    if data.test.classes:
        return
    online = known(config.availability)
    goes = {
        "population.partition": (config.population.partition.of_labels, "iid"),
        "domains": (config.domains.of_labels, "given"),
        "availability": (online is not None and online.follows == "labels", "bernoulli"),
        "attack": (config.attack.poisons, "sign_flip"),
    }
    for section, (by_labels, instead) in goes.items():
        if by_labels:
            raise ConfigError(
                f"{section}={C.at(config, section).kind!r}: it goes by labels, and {data.name!r} has targets: choose {instead}, or "
                f"leave it out"
            )


def targets(config: Config, data: Data) -> tuple[int, ...]:
    """Return the domains of a data set that are targets. Raises ConfigError."""
    chosen = config.domains
    if not chosen.asked:
        return ()
    domain = data.test.domain if isinstance(data, FederatedDataset) else data.train.domain
    if domain is None:
        raise ConfigError(
            f"domains.target={chosen.target!r}: the data set {data.name!r} has no domains: choose one that has, such as "
            f"domains_digits"
        )
    try:
        return chosen.targets(data.domains, int(domain.max()) + 1)
    except ValueError as e:
        raise ConfigError(f"domains.{one_line(e)}") from None


def with_roles(config: Config, data: Data, population: Population, *, unlabelled: bool) -> Population:
    """Return the clients without the labels of the targets, or where these are of no use without their examples.

    Raises ConfigError.
    """
    chosen = targets(config, data)
    if not chosen:
        return population
    if (
        not isinstance(population, InMemoryPopulation)
        or isinstance(data, FederatedDataset)
        or data.train.domain is None
    ):
        raise ConfigError(
            "domains.target: clients that come by themselves tell no labelled examples from others: choose a data set that "
            "population.partition deals"
        )
    of = torch.isin(data.train.domain, torch.tensor(chosen))
    shared = isinstance(config.domains, Given) and config.domains.share_target
    if shared and not unlabelled:
        raise ConfigError(
            f"domains.share_target=true: {config.algorithm.name} does not learn from examples without labels: leave it out"
        )
    if not unlabelled:
        return population.keeping(~of)
    held = population.withholding(of)
    return held.sharing() if shared else held


def with_domains(config: Config, data: Data, population: Population, algorithm: Algorithm) -> Population:
    """Return clients whose examples say of which domain they are, where batches are made by it. Raises ConfigError."""
    plans = [stage.batches for phase in algorithm.phases for stage in phase.work.loops]
    plans = [plan for plan in plans if plan.stratified == "domains"]
    if not plans:
        return population
    name = config.algorithm.name
    if (
        not isinstance(population, InMemoryPopulation)
        or isinstance(data, FederatedDataset)
        or data.train.domain is None
    ):
        raise ConfigError(
            f"algorithm.name={name!r}: it takes as many examples of each domain, and those of {data.name!r} say none: choose "
            f"a data set of several domains that population.partition deals, such as domains_digits"
        )
    told = population.telling(data.train.domain)
    assert told.by_domain is not None
    most = int((told.by_domain > 0).sum(1).max())
    for size in {plan.size for plan in plans if plan.size is not None and plan.size < most}:
        raise ConfigError(
            f"algorithm.batch_size={size}: a batch holds as many examples of each domain of a client, and there are {most}: "
            f"raise it to {most} at least"
        )
    return told


def with_held_out(config: Config, population: Population, algorithm: Algorithm) -> Population:
    """Return clients that keep some of their examples from their work, where they are to. Raises ConfigError."""
    share, least = config.population.held_out, population.summary().min_examples
    wanted = any(stage.batches.held_out for phase in algorithm.phases for stage in phase.work.loops)
    if not share:
        if wanted:
            raise ConfigError(
                f"population.held_out=0: {config.algorithm.name} measures models on examples that clients do not learn "
                f"from: set it, to 0.25 for instance"
            )
        return population
    if not (wanted or config.evaluation.per_client):
        raise ConfigError(
            f"population.held_out={share:g}: nothing is measured on that share of each client's examples: set "
            f"evaluation.per_client=true, or leave it out"
        )
    if getattr(population, "labelled", None) is not None:
        raise ConfigError(f"population.held_out={share:g}: clients of domains.target have no labels: leave it out")
    if least < 2:
        raise ConfigError(
            f"population.held_out={share:g}: there are clients with {least} example{'s' * (least != 1)}, of two or more one is "
            f"held out: raise population.partition.min_size, or lower population.clients"
        )
    return HeldOut(population, share, config.partition_seed)


def check_source_share(task: Task, population: Population) -> None:
    """Refuse a task that takes another share of the training examples for labelled than there is. Raises ConfigError."""
    share, labelled = getattr(task, "source_share", None), getattr(population, "labelled", None)
    if share is None or labelled is None:
        return
    true = int(labelled.sum()) / (population.size * population.summary().mean_examples)
    if abs(share - true) > NEAR * true:
        raise ConfigError(f"task.source_share={share:g}: {true:.4f} of the training examples have labels: set that")


def check_grouped(what: str, clients: int) -> None:
    """Refuse what looks at every client where they are too many. Raises ConfigError."""
    if clients > GROUPED_UP_TO:
        raise ConfigError(
            f"{what}: it looks at every client once, {clients:,} of them, and up to {GROUPED_UP_TO:,} may be: lower "
            f"population.clients"
        )


def _clients(config: Config, data: Data) -> Population:
    if isinstance(data, FederatedDataset):
        check_undealt(config, data.name)
        return data.population
    examples = data.train
    partition = dealt(config, data)
    clients = len(partition.sizes)
    domain = torch.zeros(clients, dtype=torch.int64)
    if examples.domain is not None:
        each, sizes = examples.domain[partition.indices], partition.offsets.diff()
        first = each[partition.offsets[:-1].clamp(max=len(each) - 1)]
        if torch.equal(each, first.repeat_interleave(sizes)):
            domain = first
        elif partition.home is not None:  # otherwise clients that hold several are of none
            domain = partition.home
    return InMemoryPopulation({"x": examples.x, "y": examples.y}, partition.indices, partition.offsets, domain)


def drawn(config: Config, data: Data, *, given: bool) -> bool:
    """Return whether the partition's seed draws anything; ``given`` says that data were made in Python."""
    p = config.population
    if p.held_out or p.root or config.domains.draws:
        return True
    of_a_path = isinstance(p.dataset, ByPath) and not given
    if isinstance(data, FederatedDataset):
        name = None if given or isinstance(p.dataset, ByPath) else p.dataset.name
        return of_a_path or name == "synthetic" or (name == "disk" and p.clients is not None)
    return p.partition.draws or of_a_path


def check_drawn(config: Config, data: Data, *, given: bool) -> None:
    """Refuse a seed by which nothing is drawn; ``given`` as of ``drawn``. Raises ConfigError."""
    p = config.population
    if p.partition_seed == 0 or drawn(config, data, given=given):
        return
    said = f"population.partition_seed={show(p.partition_seed)}:"
    if isinstance(data, FederatedDataset):
        raise ConfigError(f"{said} {data.name!r} comes in clients, the same for every seed: leave it out")
    mix = ", give population.partition.similarity" * hasattr(p.partition, "similarity")
    raise ConfigError(
        f"{said} population.partition.kind={p.partition.kind!r} draws nothing, so every seed has the same clients: leave the seed "
        f"out{mix}, or choose another partition"
    )


def dealt(config: Config, data: Dataset) -> Partition:
    """Return which training examples of a data set every client holds, as configured. Raises ConfigError, DataError."""
    check_targets(config, data)
    check_drawn(config, data, given=False)
    p, examples, chosen = config.population, data.train, config.population.partition
    clients, apart = chosen.clients(p.clients), targets(config, data)
    try:
        return chosen.split(examples.y, examples.domain, clients, config.partition_seed, apart)
    except DataError:
        raise
    except ValueError as e:
        raise ConfigError(
            f"population.partition={chosen.kind!r}, population.clients={clients}: {one_line(e)}"
        ) from None


def problem(population: Population) -> Problem:
    """Return the federation of these clients."""
    summary, num_examples = population.summary(), population.num_examples
    domains = Grouped(population.size, summary.domains, population.domains, num_examples)
    labelled: Tensor | None = getattr(population, "labelled", None)
    roles: dict[str, Tensor] = {}
    if labelled is not None:
        examples = num_examples(torch.arange(population.size))
        roles = {"sources": labelled.nonzero().flatten(), "targets": (examples - labelled).nonzero().flatten()}
    return Problem(population.size, summary.mean_examples, num_examples, domains, **roles)


def with_clients(
    config: Config, data: Data, dealt: Population, population: Population, *, asynchronous: bool = False
) -> Config:
    """Return the configuration with its number of clients, all that were ``dealt``, filled in.

    Raises ConfigError where it does not fit the ``population`` of those that take part.
    """
    p, size, invite = config.population, population.size, config.cohort.size
    if p.clients is not None and p.clients != dealt.size:
        raise ConfigError(f"population.clients={p.clients}: the population has {dealt.size}: leave it out")
    if not asynchronous and invite > size:
        tested = len(data.names.held_out)
        kept = f" ({tested} more {'is' if tested == 1 else 'are'} held out as test examples)" * bool(tested)
        there = (
            f"there are only population.clients={size}{kept}"
            if size == dealt.size
            else f"only {size} clients have labels"
        )
        raise ConfigError(f"cohort.size={invite}: {there}: lower it")
    if not asynchronous and (wanted := asked(config.cohort)) > size:
        raise ConfigError(
            f"cohort.over_select={config.cohort.over_select:g}: it invites {wanted} clients, and there are only "
            f"population.clients={size}: lower it"
        )
    if config.evaluation.per_client and getattr(population, "labelled", None) is not None:
        raise ConfigError(
            "evaluation.per_client=True: clients of domains.target have no labels to be evaluated by: set it to false"
        )
    if config.evaluation.per_client and size > PER_CLIENT_UP_TO:
        raise ConfigError(
            f"evaluation.per_client=True: it evaluates every one of {size:,} clients, and up to {PER_CLIENT_UP_TO:,} may be: set "
            f"it to false"
        )
    if population.summary().min_examples == 0 and isinstance(data, FederatedDataset):
        raise ConfigError(
            f"population.dataset={data.name!r}: there are clients that have no examples: leave them out of it"
        )
    if population.summary().min_examples == 0:
        raise ConfigError(
            f"population.partition={p.partition.kind!r}: there are clients that have no examples: raise "
            f"population.partition.min_size, or lower population.clients"
        )
    return config.model_copy(update={"population": p.model_copy(update={"clients": dealt.size})})


def parted(config: Config, data: Data) -> tuple[Data, Examples | None]:
    """Return the data set without the training examples that are held out to select models by, and these. Raises ConfigError."""
    share = config.evaluation.validation
    if not share:
        return data, None
    if isinstance(data, FederatedDataset):
        raise ConfigError(
            f"evaluation.validation={share:g}: {data.name!r} comes in clients, of whose examples none are held out: leave it out"
        )
    return data.parted(share)


def evaluation_data(config: Config, data: Data, validation: Examples | None) -> dict[str, dict[str, Tensor]]:
    """Return the splits to evaluate on: "test", and "train" and "validation" if asked for, each x (n, ...) and y (n,).

    Those from several domains have a column "domain" (n,) too, if clients' domains are theirs, and "target" where some are.
    """
    few = config.evaluation.test_examples
    splits = {"test": data.test.sample(few) if few else data.test}
    if config.evaluation.train_examples:
        splits["train"] = data.sample(config.evaluation.train_examples)
    if validation is not None:
        splits["validation"] = validation
    result = {name: _columns(examples) for name, examples in splits.items()}
    chosen = targets(config, data)
    for name, examples in splits.items():
        if examples.domain is not None and name != "train" and config.domains.kind == "given":
            result[name]["domain"] = examples.domain
            if chosen:
                result[name]["target"] = torch.isin(examples.domain, torch.tensor(chosen))
    return result


def final_data(config: Config, data: Data) -> dict[str, dict[str, Tensor]]:
    """Return the split that only the last model is evaluated on: "all" test examples, if there are more than those of "test"."""
    return {"all": _columns(data.test)} if 0 < config.evaluation.test_examples < len(data.test) else {}


def _columns(examples: Examples) -> dict[str, Tensor]:
    return {"x": examples.x, "y": examples.y}
