"""What a shell completes: names and run folders. A key press waits for it, so nothing that imports PyTorch is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import click

HERE = Path(__file__).resolve().parents[1]
REGISTRIES = {
    "task": ("tasks/registry.py:TASKS",),
    "algorithm": ("algorithms/registry.py:ALGORITHMS",),
    "dataset": ("datasets/registry.py:ABOUT", "datasets/registry.py:FEDERATED", "datasets/sources.py:SOURCES"),
    "partition": ("datasets/partition_config.py:PARTITIONS",),
    "domains": ("datasets/domain_config.py:DOMAINS",),
    "availability": ("config/availability.py:AVAILABILITY",),
    "selection": ("config/selection.py:SELECTIONS",),
    "devices": ("config/devices.py:DEVICES",),
    "attack": ("attacks/registry.py:ATTACKS",),
    "transform": ("transforms/registry.py:TRANSFORMS",),
    "tracker": ("tracking/registry.py:TRACKERS",),
    "callback": (),
}
"""Kind of thing -> the dictionaries that have its names, which are read as text; names that are computed are left out."""
RUN = ("config.yaml", "campaign.yaml", "tune.yaml")
LOOKED_AT = 2_000  # folders, at most


def kinds(incomplete: str) -> list[str]:
    """Return what `list` lists."""
    return _begun(REGISTRIES, incomplete)


def shown(incomplete: str) -> list[str]:
    """Return what `show` shows, but for sections."""
    return _begun(("data", "config", *REGISTRIES), incomplete)


def named(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the names of the kind that stands before; where it is data, nothing, and the shell completes files."""
    word = str(ctx.params.get("what"))
    kind = next((each for each in (word, word.removesuffix("s")) if each in REGISTRIES), None)
    return [] if kind is None else _begun(names(kind), incomplete)


def names(kind: str) -> list[str]:
    """Return the names of a kind that are written out, and those of installed packages."""
    from importlib.metadata import entry_points  # here, for no command but this one needs what it imports

    built_in = [name for place in REGISTRIES[kind] for name in _keys(*place.split(":"))]
    groups = (f"fedfleet.{kind}", f"fedfleet.{kind}s")
    return [*dict.fromkeys([*built_in, *(each.name for group in groups for each in entry_points(group=group))])]


def runs(incomplete: str) -> list[str]:
    """Return the run folders whose path begins so, up to two levels below; where there are none, the shell completes files."""
    return sorted(str(path) for path in islice(_below(incomplete), LOOKED_AT) if any((path / f).exists() for f in RUN))


def _below(incomplete: str) -> Iterator[Path]:
    head, _, begun = incomplete.rpartition("/")
    first = _folders(Path(head or ("/" if incomplete.startswith("/") else ".")))
    for one in (path for path in first if path.name.startswith(begun)):
        yield one
        for two in _folders(one):
            yield two
            yield from _folders(two)


def _folders(path: Path) -> Iterator[Path]:
    try:
        yield from (each for each in path.iterdir() if not each.name.startswith(".") and each.is_dir())
    except OSError:
        return


def _keys(file: str, variable: str) -> Iterator[str]:
    """Yield the keys that are written in a dictionary of a module, which is not imported."""
    for node in ast.parse((HERE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == variable:
            keys = node.value.keys if isinstance(node.value, ast.Dict) else ()
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
