"""The configuration: a typed schema, and one line of help for every mistake.

A configuration is YAML plus ``dotted.key=value`` overrides. Sections that name a thing (``task``, ``algorithm``,
``population.partition``, ``availability``) take that thing's own options; ``algorithm: fedavg`` is short for
``algorithm: {name: fedavg}``.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError

from fedfleet.algorithms.options import CohortOptions, Options
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.datasets.partition_config import PARTITIONS
from fedfleet.datasets.registry import LOADERS
from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.registry import TASKS

SCHEMA_VERSION = 1


class Always(Options):
    """Every client is online at every invitation."""


class Bernoulli(Options):
    """Each client is online with a fixed probability, afresh at every invitation."""

    rate: float = Field(default=0.9, gt=0, le=1)
    """Probability of being online."""


AVAILABILITY: dict[str, type[Options]] = {"always": Always, "bernoulli": Bernoulli}


class Population(Options):
    """Who the clients are."""

    dataset: str = "digits"
    """Name of a data set; ``fedfleet list datasets`` shows them."""
    clients: int = Field(default=100, ge=1)
    """Number of clients, N."""
    partition: dict[str, Any] = Field(default={"kind": "iid"})
    """How examples are dealt to clients: kind, and its options."""
    partition_seed: int = 0
    """Seed of the partition; apart from ``seed``, so that runs of several seeds share their clients."""
    data_dir: str | None = None
    """Folder of the original data files; $FEDFLEET_DATA, else the user cache, if not given."""


class Devices(Options):
    """How long clients take to answer, in virtual seconds: median * exp(sigma * normal), independently in every phase."""

    median_s: float = Field(default=1.0, gt=0)
    sigma: float = Field(default=0.5, ge=0)


class Executor(Options):
    """Where the work runs. None of these keys but ``inner``, ``block_size``, threads and device may change a bit of the result."""

    kind: Literal["local", "ray"] = "ray"
    """local: in this process; ray: on a pool of Ray actors."""
    inner: Literal["auto", "serial", "batched"] = "auto"
    """One client at a time, or a block at once under vmap."""
    actors: int | Literal["auto"] = "auto"
    """Ray actors; auto: one a CPU."""
    cpus_per_actor: float = Field(default=1.0, gt=0)
    """CPUs reserved for an actor; may be fractional."""
    gpus_per_actor: float = Field(default=0.0, ge=0)
    """GPUs reserved for an actor; may be fractional. Above 0, clients are trained on the GPU."""
    threads_per_actor: int = Field(default=1, ge=1)
    """Torch threads of an actor."""
    block_size: int | Literal["auto"] = "auto"
    """Clients a block: the unit of dispatch and of summation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if ``gpus_per_actor`` is above 0."""
    address: str | None = None
    """Address of a running Ray cluster; a private one is started on loopback if not given."""


class Evaluation(Options):
    """What is measured on the server's side, and when."""

    every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the initial and the final model are always evaluated."""
    train_examples: int = Field(default=0, ge=0)
    """Evaluate on this many training examples too (a fixed draw), as ``eval/train_<metric>``."""
    per_client: bool = False
    """Write ``clients.parquet``: every client's own metrics on its own data at each evaluation."""


class Config(Options):
    """A run."""

    schema_version: int = SCHEMA_VERSION
    label: str | None = None
    """Name in reports; the algorithm's name if not given."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything but the partition."""
    seeds: list[int] | None = None
    """Run once for each of these instead of ``seed``."""
    rounds: int = Field(default=100, ge=0)
    """Rounds, T."""
    population: Population = Population()
    task: dict[str, Any] = Field(default={"name": "classification"})
    algorithm: dict[str, Any] = Field(default={"name": "fedavg"})
    cohort: CohortOptions = CohortOptions()
    availability: dict[str, Any] = Field(default={"kind": "always"})
    devices: Devices = Devices()
    executor: Executor = Executor()
    evaluation: Evaluation = Evaluation()
    warm_start: str | None = None
    """Start from this safetensors file (a ``model.safetensors`` of an earlier run)."""
    until: str | None = None
    """Stop once a metric is reached, such as ``eval/auc=0.95``."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Stop after this many seconds."""
    compare: dict[str, dict[str, Any]] | None = None
    """Label -> overrides: run each of these, on every seed, and report them together."""
    vary: dict[str, list[Any]] | None = None
    """Dotted key -> values: run every combination, for each label of ``compare`` and every seed."""


NAMED: dict[str, tuple[str, Mapping[str, type[BaseModel]]]] = {
    "task": ("name", {k: v.options for k, v in TASKS.items()}),
    "algorithm": ("name", {k: v.options for k, v in ALGORITHMS.items()}),
    "population.partition": ("kind", PARTITIONS),
    "availability": ("kind", AVAILABILITY),
}
"""Sections that name a thing: where -> (the naming key, the options of each name)."""


def load(path: Path | str | Mapping[str, Any], overrides: list[str] | Mapping[str, Any] | None = None) -> Config:
    """Read a configuration file (or mapping), apply overrides, and check it against the schema.

    Overrides are ``dotted.key=value`` strings (values in YAML) or a mapping of dotted keys. An override that changes the name of a
    section leaves out those of the file's options that the new name does not have.

    Raises ConfigError with one line naming the key, the value and the mend.
    """
    raw: dict[str, Any] = _read(Path(path)) if isinstance(path, str | Path) else _plain(path)
    for key, value in _pairs(overrides or []):
        _assign(raw, key, value)
    return check(raw)


def options(config: Config, section: str) -> Any:
    """Return the typed options of a named section of a checked configuration."""
    key, kinds = NAMED[section]
    mapping = dict(_get(config, section))
    return kinds[mapping.pop(key)].model_validate(
        {k: v for k, v in mapping.items() if k != "kind"} if key == "kind" else mapping
    )


def named(config: Config, section: str) -> str:
    """Return the name in a named section."""
    return _get(config, section)[NAMED[section][0]]


def check(raw: Mapping[str, Any]) -> Config:
    """Validate a nested mapping and fill in every default. Raises ConfigError."""
    filled = _plain(raw)
    for section in NAMED:
        _fill(filled, section)
    config = _validate(Config, filled, "")
    if config.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"schema_version={config.schema_version}: this fedfleet reads version {SCHEMA_VERSION}")
    if config.population.dataset not in LOADERS:
        raise ConfigError(_unknown("population.dataset", config.population.dataset, LOADERS))
    return config


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a checked configuration with nested or dotted overrides applied."""
    raw = config.model_dump()
    for key, value in _flat(overrides):
        _assign(raw, key, value)
    return check(raw)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file: give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e}): give the path of a YAML file") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from None
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values, not a {type(found).__name__}")
    return found or {}


def _pairs(overrides: list[str] | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from _flat(overrides)
        return
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r}: an override is written dotted.key=value")
        try:
            yield key.strip(), yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"{key}={value}: the value is not valid YAML: quote it") from None


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves as dotted keys, the naming key of a section first, so that it decides which options remain."""
    for key in sorted(mapping, key=lambda k: k not in ("name", "kind")):
        value, path = mapping[key], f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path not in ("compare", "vary"):
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node: dict[str, Any] = raw
    for i, name in enumerate(parents):
        below = node.get(name)
        if isinstance(below, str) and ".".join(parents[: i + 1]) in NAMED:  # the short form of a named section
            below = {NAMED[".".join(parents[: i + 1])][0]: below}
        if below is not None and not isinstance(below, dict):
            raise ConfigError(f"{key}={value!r}: {'.'.join(parents[: i + 1])} is a value, not a section")
        node[name] = node = dict(below or {})
    section = ".".join(parents)
    if key in NAMED and isinstance(value, str):
        value = _renamed(node.get(last), *NAMED[key], value)
    elif section in NAMED and last == NAMED[section][0]:
        kept = _renamed(node, *NAMED[section], value)
        node.clear()
        node.update(kept)
        return
    node[last] = value


def _renamed(old: Any, key: str, kinds: Mapping[str, type[BaseModel]], name: Any) -> dict[str, Any]:
    """Return a named section under a new name, with the options the new name knows."""
    keep = dict(old) if isinstance(old, Mapping) else {}
    if keep.get(key) != name and isinstance(name, str) and name in kinds:
        keep = {k: v for k, v in keep.items() if k in kinds[name].model_fields}
    return keep | {key: name}


def _fill(raw: dict[str, Any], section: str) -> None:
    """Check one named section and replace it with its complete options."""
    key, kinds = NAMED[section]
    *parents, last = section.split(".")
    node: Any = raw
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            return  # the schema will say so
    default = {
        "task": "classification",
        "algorithm": "fedavg",
        "population.partition": "iid",
        "availability": "always",
    }[section]
    given = node.get(last, default)
    mapping: Any = {key: given} if isinstance(given, str) else given
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{section}={given!r}: give a name, or a mapping with the key {key!r}")
    mapping = dict(mapping)
    chosen = mapping.pop(key, default)
    if chosen not in kinds:
        raise ConfigError(_unknown(f"{section}.{key}", chosen, kinds))
    found = _validate(kinds[chosen], mapping, f"{section}.")
    node[last] = {key: chosen, **{k: v for k, v in found.model_dump().items() if k != key}}


def _validate(model: type[BaseModel], mapping: Mapping[str, Any], prefix: str) -> Any:
    try:
        return model.model_validate(dict(mapping))
    except ValidationError as e:
        raise ConfigError(_one_line(e.errors(), model, prefix)) from None


def _one_line(errors: Any, model: type[BaseModel], prefix: str) -> str:
    error = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    keys = [
        str(part)
        for part in error["loc"]
        if not (isinstance(part, str) and part.startswith(("literal", "constrained")))
    ]
    if error["type"] == "extra_forbidden":
        *parents, last = keys
        names = _fields(model, parents)
        near = difflib.get_close_matches(last, names, n=1, cutoff=0.5)
        where = prefix + "".join(f"{p}." for p in parents)
        mend = f"did you mean {where}{near[0]}?" if near else f"known here: {', '.join(names)}"
        return f"{where}{last}={error['input']!r}: unknown key; {mend}"
    said = [e["msg"] for e in errors if e["loc"][:1] == error["loc"][:1]]
    while (keys and keys[-1] in ("int", "str", "float", "bool")) or (keys and "[" in keys[-1]):
        keys.pop()
    messages = " or ".join(dict.fromkeys(m[0].lower() + m[1:] for m in said))
    path = f"{prefix}{'.'.join(keys)}".rstrip(".")
    return f"{path}={error['input']!r}: {messages}" if keys else f"{path}: {messages.removeprefix('value error, ')}"


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the keys of the model that stands at ``path`` below ``model``."""
    for name in path:
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        candidates = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)


def _unknown(key: str, value: Any, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{key}={value!r}: unknown; {hint}choose one of {', '.join(known)}"


def _get(config: Config, section: str) -> Mapping[str, Any]:
    node: Any = config
    for name in section.split("."):
        node = getattr(node, name)
    return node


def _plain(value: Any) -> Any:
    """Copy nested mappings, so that nobody's input is changed."""
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value
