"""The configuration: a typed schema, and one line of help for every mistake.

A configuration is YAML plus ``dotted.key=value`` overrides. A section that names a part (``task``, ``algorithm``) is the
typed options of that part, ``config.algorithm.lr``; ``algorithm: fedavg`` is short for ``algorithm: {name: fedavg}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.availability import AVAILABILITY
from fedfleet.config.checking import sections, short_forms, validated
from fedfleet.config.devices import DEVICES
from fedfleet.config.executor import Executor, FaultOptions
from fedfleet.config.measuring import Checkpoint, Evaluation, Patience
from fedfleet.config.reading import override, plain, read
from fedfleet.config.selection import SELECTIONS
from fedfleet.config.shipped import locate
from fedfleet.config.trust import check as check_trusted
from fedfleet.config.trust import is_of_a_run
from fedfleet.config.tuning import Tuning
from fedfleet.datasets.domain_config import DOMAINS
from fedfleet.datasets.partition_config import PARTITIONS
from fedfleet.datasets.registry import DATASETS
from fedfleet.files.documents import leaves
from fedfleet.middleware.attacks.kinds.registry import ATTACKS
from fedfleet.middleware.compression.options import Transforms
from fedfleet.middleware.privacy.options import ExamplePrivacy, Privacy
from fedfleet.middleware.secure_aggregation.options import SecureAggregation
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.named import has as lies
from fedfleet.simulator.named import is_path
from fedfleet.simulator.registry import ByPathWithOptions, Options, Registry
from fedfleet.tasks.registry import TASKS
from fedfleet.tracking.registry import TRACKERS

SCHEMA_VERSION = 1
Seed = Annotated[int, Field(ge=0)]


CALLBACKS: Registry[Any] = Registry("callback", {}, key="name", group="fedfleet.callbacks")
Tracker = Annotated[Any, TRACKERS]
Callback = Annotated[Any, CALLBACKS]


def _several(given: Any) -> Any:
    """Let one stand for a list of it, and nothing for an empty list."""
    return [] if given is None else given if isinstance(given, list) else [given]


def _each_once(trackers: list[Any]) -> list[Any]:
    names = [tracker.name for tracker in trackers]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ConfigError(f"track[{i}].name={name!r}: it is there already: give each tracker once")
    return trackers


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

    dataset: Annotated[Any, DATASETS] = DATASETS.make()
    """Name of a data set, and its options; ``fedfleet list datasets`` shows the names."""
    clients: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Number of clients, N; 100 if not given. Clients on disk are as many as there are."""
    partition: Annotated[Any, PARTITIONS] = PARTITIONS.make()
    """How examples are dealt to clients: kind, and its options. Not for data sets that come in clients."""
    partition_seed: Seed | Literal["seed"] = 0
    """Seed of the partition, or of synthetic clients; apart from ``seed``, so that runs of several seeds share their clients.
    ``seed``: that of the run, so that every seed deals anew, and means over seeds hold the variance of partitions, too."""
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
    """Seed of everything but the partition. An override of it takes the place of ``seeds``."""
    seeds: Annotated[list[Seed], Field(min_length=1)] | None = None
    """Run once for each of these instead of ``seed``."""
    rounds: int = Field(default=100, ge=0)
    """Rounds, T."""
    population: Population = Population()
    domains: Annotated[Any, DOMAINS] = DOMAINS.make()
    """Which clients make up a domain: kind, and its options."""
    task: Annotated[Any, TASKS] = TASKS.make()
    algorithm: Annotated[Any, ALGORITHMS] = ALGORITHMS.make()
    cohort: CohortOptions = CohortOptions()
    availability: Annotated[Any, AVAILABILITY] = AVAILABILITY.make()
    devices: Annotated[Any, DEVICES] = DEVICES.make()
    selection: Annotated[Any, SELECTIONS] = SELECTIONS.make()
    attack: Annotated[Any, ATTACKS] = ATTACKS.make()
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
    until: Annotated[str, BeforeValidator(lambda given: given if isinstance(given, str) else f"{given}")] | None = None
    """Stop once a metric is reached, such as ``eval/auc=0.95``."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Stop after this many seconds, those before a resume included."""
    stop_if_diverged: Literal["not_finite"] | Annotated[float, Field(gt=0)] | None = None
    """Stop after a round whose training loss or model is not finite; a number: or whose training loss is above it. Under
    ``faults.non_finite: fail`` a client that sends a value that is not finite ends the run before that, as failed."""
    patience: Patience | None = None
    """Stop once a metric has not improved for so many evaluations: metric, evaluations, min_delta."""
    track: Annotated[
        list[Tracker],
        BeforeValidator(_several, json_schema_input_type=list[Tracker] | Tracker | None),
        AfterValidator(_each_once),
    ] = Field(default=[])
    """Where the run is entered besides its folder: names of trackers, or mappings of a name and its options; ``fedfleet list
    trackers`` shows the names. It changes nothing of what comes out."""
    callbacks: Annotated[
        list[Callback], BeforeValidator(_several, json_schema_input_type=list[Callback] | Callback | None)
    ] = Field(default=[])
    """Who is told how the run goes, and may stop it: module:name of a ``fedfleet.Callback``, or mappings of that and ``arguments``.
    They change nothing of what a round computes."""
    compare: Annotated[dict[str, dict[str, Any]], Field(min_length=1)] | None = None
    """Label -> overrides: run each of these, on every seed, and report them together."""
    vary: Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] | None = None
    """Dotted key -> values: run every combination, for each label of ``compare`` and every seed."""
    tune: Tuning | None = None
    """Search for the best values of some keys, with ``fedfleet tune``."""

    @property
    def partition_seed(self) -> int:
        """The seed of the partition as a number."""
        return self.seed if self.population.partition_seed == "seed" else self.population.partition_seed


SECTIONS = dict(sections(Config))
"""Sections that name a part, or are lists of such, by their dotted keys."""
OWN = {key: of.registry.given for key, of in SECTIONS.items() if of.registry.given}
"""Sections whose part may be made in Python instead, and the arguments of ``fedfleet.run`` it is given as. The section of what ran
then has the one key "own", and below it what ``assembly.provenance`` says of it."""
SHORT = dict(short_forms(Config))
"""Keys at which a name may stand for a mapping, and the option of it that is the name."""
LEAVES = ("compare", "vary", "tune.search", *(f"{key}.own" for key in OWN))
"""Mappings that are no sections: their keys are labels, and of the others dotted keys."""


def load(
    source: Path | str | Mapping[str, Any] | Config,
    overrides: list[str] | Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
) -> Config:
    """Read a configuration file (or take a mapping, or what was read), apply overrides, and check it against the schema.

    A file may be given by the name of one that comes with the package, such as "quickstart" (``fedfleet configs``).
    Overrides are ``dotted.key=value`` strings (values in YAML) or a mapping of dotted keys; a mapping as a value sets its keys
    and leaves the others; ``seed`` takes the place of ``seeds``. An override that changes the name of a section leaves out the
    options that only the old name has.

    A file in the folder of a run that names code, and that no run of this user's has written, is refused unless it is trusted.

    Raises ConfigError with one line naming the key, the value and the mend.
    """
    if isinstance(source, Config):
        source = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, str | Path):
        source = locate(Path(source))
    given = read(source) if isinstance(source, Path) else source
    if isinstance(source, Path):
        _check_once(given)
    changes = [overrides] if isinstance(overrides, Mapping) else [override(text) for text in overrides or []]
    if isinstance(source, Path) and is_of_a_run(source):
        check_trusted(source, [key for change in changes for key, _ in _flat(plain(change))], trust=trust)
    said = {key: value for change in changes for key, value in flattened(change).items()}
    if "seed" in said and said.get("seeds") is not None:
        raise ConfigError(f"seed={show(said['seed'])}: seeds={show(said['seeds'])} is given, too: leave one out")
    one_seed = [{"seeds": None}] if "seed" in said else []
    config = _build([given, *changes, *one_seed])
    _check_reaches(config, said)
    if not isinstance(source, Path) or config.code_dir is not None:
        return config
    folder = source.absolute().parent
    beside = any(lies(folder, text) for text in _texts(config.model_dump(mode="json", exclude_unset=True)))
    return replaced(config, "code_dir", str(folder)) if beside else config


def _check_once(given: Mapping[str, Any]) -> None:
    """Refuse a file that says a key twice: in its section, and by a dotted key. Raises ConfigError."""
    seen = set[str]()
    for whole, value in _settings(given):
        if whole in seen:
            raise ConfigError(f"{whole}={show(value)}: given twice, in its section and by a dotted key: keep one")
        seen.add(whole)


def _check_reaches(config: Config, given: Mapping[str, Any]) -> None:
    """Refuse an override, by dotted key, of what several runs set otherwise afterwards, unless it gives these, too.

    Raises ConfigError.
    """
    later = [(f"compare.{label}", own) for label, own in (config.compare or {}).items() if "compare" not in given]
    for key, values in (config.vary or {}).items() if "vary" not in given else ():
        later += [(f"vary.{key}", {key: value}) for value in values]
    for where, own in later:
        sets = flattened(own)
        for key in sets.keys() & given.keys():
            if sets[key] != given[key]:
                raise ConfigError(
                    f"{key}={show(given[key])}: {where} sets it to {show(sets[key])}: change it there, or leave it out"
                )
    drawn = config.tune.search if config.tune is not None and not any(key.startswith("tune") for key in given) else {}
    for key in drawn.keys() & given.keys():
        raise ConfigError(f"{key}={show(given[key])}: tune.search has it, too: change it there, or leave it out")


def _texts(node: Any) -> Iterator[str]:
    """Yield every ``module:name`` in plain data."""
    if is_path(node):
        yield node
    for below in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        yield from _texts(below)


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a checked configuration with nested or dotted overrides applied to what was given for it."""
    if not overrides:
        return config
    return _build([config.model_dump(mode="json", exclude_unset=True), overrides])


def flattened(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides by dotted key; where a section is named in short, by that of its name."""
    return dict(_settings(overrides))


def _settings(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in _flat(plain(given)):
        named = _single(key) if isinstance(value, str) else None
        yield key if named is None else f"{key}.{named.key}", value


def at(config: Config, key: str) -> Any:
    """Return what stands at a dotted key."""
    return reduce(getattr, key.split("."), config)


def replaced(config: Any, key: str, value: Any) -> Any:
    """Return a checked configuration, or a section of one, with another value at a dotted key."""
    first, _, rest = key.partition(".")
    return config.model_copy(update={first: replaced(getattr(config, first), rest, value) if rest else value})


def without_own(raw: Mapping[str, Any], parts: Iterable[str]) -> dict[str, Any]:
    """Return the mapping that a run has written without what was made in Python, if all of it is among the ``parts`` given anew.

    Raises ConfigError.
    """
    result = json.loads(json.dumps(raw))
    for section, given in OWN.items():
        *parents, last = section.split(".")
        node = result
        for name in parents:
            node = node.get(name, {})
        if isinstance(node, dict) and "own" in (node.get(last) or {}) and any(part in parts for part in given):
            del node[last]
    return result


def recorded(path: Path) -> dict[str, Any]:
    """Return what a run has written, with the defaults of today that it lacks; what was made in Python stays as it is.

    Raises ConfigError.
    """
    return _build([read(path)], lost=False).model_dump(mode="json")


def _build(layers: list[Mapping[str, Any]], *, lost: bool = True) -> Config:
    """Lay mappings over each other, the later above the earlier, and check the result.

    ``lost``: what was made in Python is an error, since nobody gives it again.
    """
    raw: dict[str, Any] = {}
    for layer in layers:
        for key, value in _flat(plain(layer)):
            _assign(raw, key, value)
    rounds = raw.get("rounds", Config.model_fields["rounds"].default)
    config = validated(Config, raw, {"rounds": rounds if isinstance(rounds, int) else None, "lost": lost})
    if config.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"schema_version={config.schema_version}: this fedfleet reads version {SCHEMA_VERSION}")
    return config


def _flat(mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield leaves by dotted key, the name of a section before its options. ``LEAVES`` are no sections."""
    return leaves(_named_first(mapping), whole=LEAVES)


def _named_first(value: Any, path: str = "") -> Any:
    if not isinstance(value, Mapping) or path in LEAVES:
        return value
    keys = sorted(value, key=lambda key: str(key).split(".")[-1] not in ("name", "kind"))
    return {key: _named_first(value[key], f"{path}.{key}" if path else str(key)) for key in keys}


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    if isinstance(value, str) and (named := _single(key)) is not None:  # the short form of a named section
        key = f"{key}.{named.key}"
    whole = next((leaf for leaf in LEAVES[1:] if key.startswith(f"{leaf}.")), None)
    *parents, last = key.split(".") if whole is None else [*whole.split("."), key.removeprefix(f"{whole}.")]
    node, path = raw, ""
    for name in parents:
        path = f"{path}.{name}" if path else name
        below: Any = {} if node.get(name) is None else node[name]
        if isinstance(below, str) and path in SHORT:
            below = {SHORT[path]: below}
        if not isinstance(below, dict):
            raise ConfigError(f"{key}={show(value)}: {path} is a value, not a section: leave out what follows it")
        node[name] = node = dict(below)
    if (named := _single(path)) is not None and last == named.key:
        before = node.get(last, named.default)
        old, new = named.find(before), named.find(value)
        if old is not None and new is not None and before != value:
            _rename(node, last, old, new)
    node[last] = value


def _rename(node: dict[str, Any], key: str, old: type[BaseModel], new: type[BaseModel]) -> None:
    """Leave out of a section the options that only its old name has. Code of an author's inherits them, and takes what it can."""
    known = {*old.model_fields}
    if issubclass(old, ByPathWithOptions):
        node |= {**(node.pop("inherited", None) or {}), **node}
        known = {*node}
    lost = {option: node.pop(option) for option in [*node] if option in known and option not in new.model_fields}
    if issubclass(new, ByPathWithOptions) and lost:
        node["inherited"] = lost


def _single(key: str) -> Registry[Any] | None:
    """Return the registry of a section that names one part."""
    result = SECTIONS.get(key)
    return None if result is None or result.listed else result.registry
