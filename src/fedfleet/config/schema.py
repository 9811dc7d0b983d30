"""The configuration: a typed schema, and one line of help for every mistake.

A configuration is YAML plus ``dotted.key=value`` overrides. Sections that name a thing (``task``, ``algorithm``,
``population.dataset``, ``population.partition``, ``availability``, ``devices``, ``selection``, ``attack``) take that thing's own
options; ``algorithm: fedavg`` is short for ``algorithm: {name: fedavg}``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedfleet.algorithms.options import CohortOptions, Options
from fedfleet.config.checking import unknown, validated
from fedfleet.config.executor import Executor, FaultOptions
from fedfleet.config.measuring import Checkpoint, Evaluation, Patience
from fedfleet.config.names import NAMED, NESTED, OTHERWISE, Named, check_clear, kind_of, known, listed
from fedfleet.config.privacy import ExamplePrivacy, Privacy
from fedfleet.config.reading import override, plain, read, show
from fedfleet.config.secure_aggregation import SecureAggregation
from fedfleet.config.shipped import locate
from fedfleet.config.track import tracked
from fedfleet.config.transforms import Transforms, filled_in
from fedfleet.config.tuning import Tuning
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.named import has as lies
from fedfleet.simulator.named import is_path

SCHEMA_VERSION = 1
Seed = Annotated[int, Field(ge=0)]


class Root(Options):
    """Training examples that are the server's own, and no client's: drawn by ``partition_seed`` before the others are dealt."""

    examples: int = Field(default=100, ge=1)
    """How many."""
    label: int | None = Field(default=None, ge=0)
    """The label of ``bias`` of them; all alike are drawn if not given."""
    bias: float | None = Field(default=None, ge=0, le=1)
    """Share of the examples that are of ``label``; the others are drawn of those of other labels."""

    @model_validator(mode="after")
    def _both(self) -> Root:
        if (self.label is None) != (self.bias is None):
            raise ValueError("bias is towards a label: give label and bias, or neither")
        return self


class Population(Options):
    """Who the clients are."""

    dataset: dict[str, Any] = Field(default={"name": "digits"})
    """Name of a data set, and its options; ``fedfleet list datasets`` shows the names."""
    clients: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Number of clients, N; 100 if not given. Clients on disk are as many as there are."""
    partition: dict[str, Any] = Field(default={"kind": "iid"})
    """How examples are dealt to clients: kind, and its options. Not for data sets that come in clients."""
    partition_seed: Seed = 0
    """Seed of the partition, or of synthetic clients; apart from ``seed``, so that runs of several seeds share their clients."""
    held_out: float = Field(default=0.0, ge=0, le=0.9)
    """Share of every client's examples that its work never sees: ``evaluation.per_client`` measures on these, the global model and
    each client's own, where an algorithm or fine-tuning gives it one. Drawn by ``partition_seed``."""
    root: Root | None = None
    """The server's own examples, from which it learns as a client does where the algorithm asks for that (``rule: fltrust``)."""
    data_dir: str | None = None
    """Folder of the original data files; $FEDFLEET_DATA, else the user cache, if not given."""


class Config(Options):
    """A run, as a configuration says it: checked, with every default. Names end in their units, ``_s`` for seconds."""

    schema_version: int = SCHEMA_VERSION
    label: str | None = None
    """Name in reports; the algorithm's name if not given."""
    seed: Seed = 0
    """Seed of everything but the partition."""
    seeds: Annotated[list[Seed], Field(min_length=1)] | None = None
    """Run once for each of these instead of ``seed``."""
    rounds: int = Field(default=100, ge=0)
    """Rounds, T."""
    population: Population = Population()
    domains: dict[str, Any] = Field(default={"kind": "given"})
    """Which clients make up a domain: kind, and its options."""
    task: dict[str, Any] = Field(default={"name": "classification"})
    algorithm: dict[str, Any] = Field(default={"name": "fedavg"})
    cohort: CohortOptions = CohortOptions()
    availability: dict[str, Any] = Field(default={"kind": "always"})
    devices: dict[str, Any] = Field(default={"kind": "alike"})
    selection: dict[str, Any] = Field(default={"kind": "uniform"})
    attack: dict[str, Any] = Field(default={"kind": "none"})
    """What some clients do to the others: kind, and its options; ``fedfleet list attacks`` shows the kinds."""
    transforms: Transforms = Transforms()
    privacy: Privacy | None = None
    """Clip what clients send, add noise, and account for it; null: nothing is hidden."""
    example_privacy: ExamplePrivacy | None = None
    """Let clients clip the gradient of each example and add noise, and account for it; null: nothing is hidden."""
    secure_aggregation: SecureAggregation | None = None
    """Let the server see the sum of a cohort's messages alone, as far as numbers, bytes and time go; null: it sees each."""
    executor: Executor = Executor()
    faults: FaultOptions = FaultOptions()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    code_dir: str | None = None
    """Folder of the modules that are named as ``module:name``, beside where Python looks and the folder one runs in; that of the
    configuration file, if they lie there. A run says here where they were."""
    warm_start: str | None = None
    """Start from this safetensors file (a ``model.safetensors`` of an earlier run)."""
    until: str | None = None
    """Stop once a metric is reached, such as ``eval/auc=0.95``."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Stop after this many seconds."""
    stop_if_diverged: Literal["not_finite"] | Annotated[float, Field(gt=0)] | None = None
    """Stop after a round whose training loss or model is not finite; a number: or whose training loss is above it. Under
    ``faults.non_finite: fail`` a client that sends a value that is not finite ends the run before that, as failed."""
    patience: Patience | None = None
    """Stop once a metric has not improved for so many evaluations: metric, evaluations, min_delta."""
    track: list[dict[str, Any]] = Field(default=[])
    """Where the run is entered besides its folder: names of trackers, or mappings of a name and its options; ``fedfleet list
    trackers`` shows the names. It changes nothing of what comes out."""
    callbacks: list[dict[str, Any]] = Field(default=[])
    """Who is told how the run goes, and may stop it: module:name of a ``fedfleet.Callback``, or mappings of that and ``arguments``.
    They change nothing of what a round computes."""
    compare: Annotated[dict[str, dict[str, Any]], Field(min_length=1)] | None = None
    """Label -> overrides: run each of these, on every seed, and report them together."""
    vary: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] | None = None
    """Dotted key -> values: run every combination, for each label of ``compare`` and every seed."""
    tune: Tuning | None = None
    """Search for the best values of some keys, with ``fedfleet tune``."""


LEAVES = ("compare", "vary", "tune.search")
"""Mappings that are no sections: their keys are labels, and of the others dotted keys."""
OWN = {"task": ("task",), "algorithm": ("algorithm",), "population.dataset": ("data", "population")}
"""Named sections whose thing may be made in Python instead, and the arguments of ``fedfleet.run`` it is given as. The section of
what ran then has the one key "own", and below it what ``experiments.provenance`` says of it."""


def load(
    source: Path | str | Mapping[str, Any] | Config, overrides: list[str] | Mapping[str, Any] | None = None
) -> Config:
    """Read a configuration file (or take a mapping, or what was read), apply overrides, and check it against the schema.

    A file may be given by the name of one that comes with the package, such as "quickstart" (``fedfleet configs``).
    Overrides are ``dotted.key=value`` strings (values in YAML) or a mapping of dotted keys; a mapping as a value sets its keys
    and leaves the others. An override that changes the name of a section leaves out the options that only the old name has.

    Raises ConfigError with one line naming the key, the value and the mend.
    """
    if isinstance(source, Config):
        source = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, str | Path):
        source = locate(Path(source))
    given = read(source) if isinstance(source, Path) else source
    changes = [overrides] if isinstance(overrides, Mapping) else [override(text) for text in overrides or []]
    config = _build([given, *changes])
    if not isinstance(source, Path) or config.code_dir is not None:
        return config
    folder = source.absolute().parent
    beside = any(lies(folder, text) for text in _texts(config.model_dump(mode="json", exclude_unset=True)))
    return with_overrides(config, {"code_dir": str(folder)}) if beside else config


def _texts(node: Any) -> Iterator[str]:
    """Yield every ``module:name`` in plain data."""
    if is_path(node):
        yield node
    for below in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from _texts(below)


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a checked configuration with nested or dotted overrides applied to what was given for it."""
    return _build([config.model_dump(mode="json", exclude_unset=True), overrides])


def named(config: Config, section: str) -> str:
    """Return the name in a named section, or that of one's own."""
    given = as_said(config, section)
    return given["own"]["name"] if "own" in given else given[NAMED[section].key]


def options(config: Config, section: str) -> Any:
    """Return the typed options of a named section of a checked configuration; none for one's own."""
    key, kinds, _ = NAMED[section]
    given = as_said(config, section)
    if "own" in given:
        return Options()
    kind = kind_of(section, kinds, given[key])
    assert kind is not None
    return validated(kind, {k: v for k, v in given.items() if k != key}, f"{section}.", rounds=config.rounds)


def complete(config: Config) -> dict[str, Any]:
    """Return the configuration as plain data with every default of its named sections, ready to be written and loaded again."""
    raw = config.model_dump(mode="json")
    for section, (key, _, _) in NAMED.items():
        *parents, last = section.split(".")
        node = raw
        for name in parents:
            node = node[name]
        if "own" not in node[last]:
            node[last] = {key: named(config, section), **options(config, section).model_dump(mode="json")}
    return raw


def with_own(config: Config, section: str, description: Mapping[str, Any]) -> Config:
    """Return a configuration that says of a section that its thing was made in Python, and what it is."""
    return replaced(config, section, {"own": dict(description)})


def replaced(config: Any, key: str, value: Any) -> Any:
    """Return a checked configuration, or a section of one, with another value at a dotted key."""
    first, _, rest = key.partition(".")
    return config.model_copy(update={first: replaced(getattr(config, first), rest, value) if rest else value})


def without_own(raw: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the mapping that a run has written without what was made in Python, if all of it is among the ``parts`` given anew.

    Raises ConfigError.
    """
    found = json.loads(json.dumps(raw))
    for section, given in OWN.items():
        *parents, last = section.split(".")
        node = found
        for name in parents:
            node = node.get(name, {})
        if isinstance(node, dict) and "own" in (node.get(last) or {}) and any(part in parts for part in given):
            del node[last]
    return found


def recorded(path: Path) -> dict[str, Any]:
    """Return what a run has written, with the defaults of today that it lacks; what was made in Python stays as it is.

    Raises ConfigError.
    """
    raw = read(path)
    found = complete(load(without_own(raw, tuple(itertools.chain(*OWN.values())))))
    for section in OWN:
        *parents, last = section.split(".")
        node, written = found, raw
        for name in parents:
            node, written = node[name], written.get(name) or {}
        if "own" in (written.get(last) or {}):
            node[last] = written[last]
    return found


def _build(layers: list[Mapping[str, Any]]) -> Config:
    """Lay mappings over each other, the later above the earlier, and check the result."""
    raw: dict[str, Any] = {}
    for layer in layers:
        for key, value in _flat(plain(layer)):
            _assign(raw, key, value)
    for section, names in NESTED.items():
        if _takes(raw, section):
            _check_named(raw, section, names)
    for section, names in NAMED.items():
        _check_named(raw, section, names)
    filled_in(raw)
    tracked(raw)
    _told(raw)
    _check_places(raw)
    config = validated(Config, raw, "")
    if config.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"schema_version={config.schema_version}: this fedfleet reads version {SCHEMA_VERSION}")
    return config


def _check_places(raw: Mapping[str, Any]) -> None:
    """Refuse what is set at the top and is a key of a section, and say which. Raises ConfigError."""
    for key in (key for key in raw if key not in Config.model_fields):
        kinds: dict[str, Any] = {name: known.annotation for name, known in Config.model_fields.items()}
        kinds |= {s: kind_of(s, NAMED[s].options, raw[s][NAMED[s].key]) for s in ("algorithm", "task")}
        there = [name for name, kind in kinds.items() if key in getattr(kind, "model_fields", {})]
        if there:
            raise ConfigError(f"{key}={show(raw[key])}: unknown key; did you mean {there[0]}.{key}?")


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves under dotted keys, the name of a section before its options. ``LEAVES`` are no sections."""
    for key in sorted(mapping, key=lambda k: k.split(".")[-1] not in ("name", "kind")):
        value, path = mapping[key], f"{prefix}{key}"
        if isinstance(value, dict) and value and path not in LEAVES:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    sections = NAMED | NESTED
    if key in sections and isinstance(value, str):  # the short form of a named section
        key = f"{key}.{sections[key].key}"
    whole = next((leaf for leaf in LEAVES[1:] if key.startswith(f"{leaf}.")), None)
    *parents, last = key.split(".") if whole is None else [*whole.split("."), key.removeprefix(f"{whole}.")]
    node, path = raw, ""
    for name in parents:
        path = f"{path}.{name}" if path else name
        below: Any = {} if node.get(name) is None else node[name]
        if path in sections and isinstance(below, str):
            below = {sections[path].key: below}
        if not isinstance(below, dict):
            raise ConfigError(f"{key}={show(value)}: {path} is a value, not a section: leave out what follows it")
        node[name] = node = dict(below)
    if path in sections and last == sections[path].key:
        names = (node.get(last, sections[path].default), value)
        kinds = (kind_of(path, sections[path].options, n) for n in names)
        old, new = (None if kind is None else set(kind.model_fields) for kind in kinds)
        for option in () if old is None or new is None else old - new:
            node.pop(option, None)
    node[last] = value


# Checking


def _takes(raw: Mapping[str, Any], section: str) -> bool:
    """Say whether the name that stands above a nested section has such an option."""
    parent, _, last = section.rpartition(".")
    key, kinds, default = NAMED[parent]
    above = raw.get(parent)
    name = above.get(key, default) if isinstance(above, dict) else default
    return isinstance(name, str) and name in kinds and last in kinds[name].model_fields


def _check_named(raw: dict[str, Any], section: str, names: Named) -> None:
    """Check the options of a named section, and give the section its name where that was left out."""
    key, kinds, default = names
    *parents, last = section.split(".")
    node: Any = raw
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            return  # the schema will say so
    given = {} if node.get(last) is None else node[last]
    if not isinstance(given, dict):
        raise ConfigError(f"{section}={show(given)}: give a name, or a mapping with the key {key!r}")
    if "own" in given:
        made = given["own"] if isinstance(given["own"], dict) else {"name": given["own"]}
        parts = ", ".join(f"{part}=…" for part in made.get("given") or OWN.get(section, (section,))[:1])
        raise ConfigError(
            f"{section}.own={show(made.get('name'))}: made in Python, which no file brings back: give it to fedfleet.run as "
            f"{parts}, or go on with its run by fedfleet.resume(RUN, {parts})"
        )
    name = given.get(key, default)
    kind = kind_of(section, kinds, name)
    if kind is None:
        if section == "algorithm" and (it := OTHERWISE.get(str(name).lower())) is not None:
            raise ConfigError(f"algorithm.name={show(name)}: here it is {it}")
        raise ConfigError(unknown(f"{section}.{key}", name, known(section, kinds)))
    check_clear(section, name)
    others = {f"{section}.{key}={n}": other for n, other in kinds.items() if n != name}
    validated(kind, {k: v for k, v in given.items() if k != key}, f"{section}.", others)
    node[last] = {key: name, **given}


def _told(raw: dict[str, Any]) -> None:
    """Check the callbacks of a configuration, one or several, and fill in their defaults. Raises ConfigError."""
    given = raw.pop("callbacks", None)
    if given is not None:
        several = listed("callbacks", given if isinstance(given, list) else [given], "stops:Rising")
        raw["callbacks"] = [{"name": name, **options.model_dump(mode="json")} for _, name, options in several]


def as_said(config: Config, section: str) -> Mapping[str, Any]:
    """Return a named section as it was given."""
    node: Any = config
    for key in section.split("."):
        node = getattr(node, key)
    return node
