"""What a configuration can name, and how: by a built-in name, by that of an installed package, or as ``module:name``.

A built-in name has its options beside it. The other two are functions or classes that make one; what they are called with is
``arguments``. A package gives a name by an entry point of the group of its kind, such as ``fedfleet.algorithms``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from pydantic import BaseModel

from fedfleet.algorithms.options import Options
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.algorithms.wrapping import WrapperOptions
from fedfleet.attacks.registry import ATTACKS
from fedfleet.config.availability import AVAILABILITY
from fedfleet.config.checking import unknown, validated
from fedfleet.config.devices import DEVICES
from fedfleet.config.reading import show
from fedfleet.config.selection import SELECTIONS
from fedfleet.datasets.domain_config import DOMAINS
from fedfleet.datasets.partition_config import PARTITIONS
from fedfleet.datasets.registry import FEDERATED
from fedfleet.datasets.registry import OPTIONS as PUBLISHED
from fedfleet.datasets.sources import SOURCES
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.named import is_path
from fedfleet.tasks.registry import TASKS
from fedfleet.transforms.registry import TRANSFORMS


class ByPath(Options):
    """What is named as ``module:name``, or by a package that is installed: a function or class that makes one."""

    arguments: dict[str, Any] | None = None
    """What it is called with."""
    source: str | None = None
    """Digest of its code; a run says here what it was."""
    version: str | None = None
    """The installed package that it is of, and its version; a run says here what it was."""


class DataByPath(ByPath):
    """Data that are made by what is named as ``module:name``, or by a package that is installed."""

    sha256: str | None = None
    """Digest of the examples, and of who holds them; a run says here what they were."""


class Named(NamedTuple):
    """A section that names a thing: the key of the name, the options of every name, the name if none is given."""

    key: str
    options: Mapping[str, type[BaseModel]]
    default: str


NAMED = {
    "task": Named("name", {k: v.options for k, v in TASKS.items()}, "classification"),
    "algorithm": Named("name", {k: v.options for k, v in ALGORITHMS.items()}, "fedavg"),
    "population.dataset": Named(
        "name", {**PUBLISHED, **{k: v.options for k, v in {**FEDERATED, **SOURCES}.items()}}, "digits"
    ),
    "population.partition": Named("kind", PARTITIONS, "iid"),
    "domains": Named("kind", DOMAINS, "given"),
    "availability": Named("kind", {k: v.options for k, v in AVAILABILITY.items()}, "always"),
    "selection": Named("kind", {k: v.options for k, v in SELECTIONS.items()}, "uniform"),
    "devices": Named("kind", {k: v.options for k, v in DEVICES.items()}, "alike"),
    "attack": Named("kind", {k: v.options for k, v in ATTACKS.items()}, "none"),
}
_PLAIN = {k: v.options for k, v in ALGORITHMS.items() if not issubclass(v.options, WrapperOptions)}
NESTED = {"algorithm.of": Named("name", _PLAIN, "fedavg")}
"""Sections within those, of names that have such an option."""
LISTS: Mapping[str, Mapping[str, type[BaseModel]]] = {
    **{way: {k: v.options for k, v in TRANSFORMS.items()} for way in ("transforms.up", "transforms.down")},
    "callbacks": {},
}
"""Sections that are lists of mappings of a name and its options, and the options of every name."""


class Seam(NamedTuple):
    """A kind of thing that may be an author's own: the group of entry points that name it, options of what is named by a path."""

    group: str
    options: type[ByPath] = ByPath


BY_PATH = {
    "task": Seam("fedfleet.tasks"),
    "algorithm": Seam("fedfleet.algorithms"),
    "population.dataset": Seam("fedfleet.datasets", DataByPath),
    "availability": Seam("fedfleet.availability"),
    "selection": Seam("fedfleet.selections"),
    "devices": Seam("fedfleet.devices"),
    **dict.fromkeys(("transforms.up", "transforms.down"), Seam("fedfleet.transforms")),
    "callbacks": Seam("fedfleet.callbacks"),
}
"""Sections whose thing may be an author's own."""


@cache
def _entries() -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """Return the entry points of installed packages by group and name."""
    found: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
    groups = {seam.group for seam in BY_PATH.values()}
    for group in groups:
        for each in entry_points(group=group):
            named = found.setdefault(group, {})
            if each not in named.get(each.name, ()):
                named[each.name] = (*named.get(each.name, ()), each)
    return found


def built_in(section: str) -> Mapping[str, type[BaseModel]]:
    """Return the options of every built-in name of a section."""
    return LISTS[section] if section in LISTS else NAMED[section].options


def packaged(section: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return what installed packages name in a section, by name; of a name that is not clear, all who have it."""
    return _entries().get(BY_PATH[section].group, {}) if section in BY_PATH else {}


def package(entry: EntryPoint) -> str:
    """Return the package that an entry point is of, and its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package without a name"


def check_clear(section: str, name: str) -> None:
    """Refuse a name that several have, packages or one of them and fedfleet. Raises ConfigError."""
    several = packaged(section).get(name, ())
    key = f"{section}={name!r}"
    if several and name in built_in(section):
        raise ConfigError(
            f"{key}: {package(several[0])} names one of its own as the built-in one is called: uninstall it, or name it by "
            f"{several[0].value}"
        )
    if len(several) > 1:
        raise ConfigError(
            f"{key}: {' and '.join(sorted(map(package, several)))} both have that name: uninstall one of them"
        )


def entry(section: str, name: str) -> EntryPoint | None:
    """Return the entry point of a name that a package gives; None for others."""
    return None if name in built_in(section) else next(iter(packaged(section).get(name, ())), None)


def path_of(section: str, name: str) -> str:
    """Return the ``module:name`` that a name stands for, an author's or a package's."""
    found = None if is_path(name) else entry(section, name)
    return name if found is None else found.value


OTHERWISE = {
    **{f"fed{rule}": f"fedopt with algorithm.server_optimizer={rule}" for rule in ("adam", "yogi", "adagrad")},
    "fedavgm": "fedopt with algorithm.server_optimizer={name: sgd, momentum: 0.9}",
    **{
        rule: f"robust with algorithm.rule={rule}"
        for rule in ("krum", "multi_krum", "trimmed_mean", "median", "fltrust")
    },
}
"""Algorithms that go by another name here, and an option."""


def kind_of(section: str, kinds: Mapping[str, type[BaseModel]], name: Any) -> type[BaseModel] | None:
    """Return the options of a name in a section, of whose built-in names ``kinds`` are; None where there is no such name."""
    if not isinstance(name, str):
        return None
    if name in kinds:
        return kinds[name]
    if section in BY_PATH and (is_path(name) or entry(section, name) is not None):
        return BY_PATH[section].options
    return None


def known(section: str, kinds: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """Yield every name that a section knows."""
    yield from dict.fromkeys([*kinds, *packaged(section)])


def listed(section: str, given: Any, example: str) -> list[tuple[str, str, Any]]:
    """Return the key, the name and the typed options of each item of a list of names, or of mappings of a name and options.

    Raises ConfigError.
    """
    found = []
    for i, item in enumerate(given):
        key = f"{section}[{i}]"
        said = {"name": item} if isinstance(item, str) else item
        if not isinstance(said, dict) or "name" not in said:
            raise ConfigError(
                f"{key}={show(item)}: give a name, such as {example}, or a mapping of that and its options"
            )
        name, kinds = said["name"], LISTS[section]
        kind = kind_of(section, kinds, name)
        if kind is None:
            there = list(known(section, kinds))
            if not there:
                raise ConfigError(f"{key}.name={show(name)}: give module:name, such as {example}")
            raise ConfigError(unknown(f"{key}.name", name, there))
        check_clear(section, name)
        options = {k: v for k, v in said.items() if k != "name"}
        found.append((key, name, validated(kind, options, f"{key}.")))
    return found
