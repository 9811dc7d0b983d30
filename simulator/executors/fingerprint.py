"""The fingerprint of a worker's process: all that bits depend on, compared with the driver's as the worker comes up.

On a cluster each node has its own fedfleet, its own packages and its own copy of a data folder. Without this check
one of them could differ, and the run would go on to other numbers without a word.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedfleet.simulator.errors import one_line

PACKAGES = (
    *("fedfleet", "ray", "torch", "torchvision", "numpy", "pandas", "pyarrow", "safetensors", "scikit-learn", "scipy"),
    "pydantic",
)
"""Those whose versions are on record."""
DATA = "data"
"""What a worker has under this name is compared whatever else may differ: other data are another run."""
FIX = "copy the driver's there, or give a path that all nodes share"
SHORT = 12  # digits of a digest
MODULE, CODE = "module ", (".py", ".pyc")
INSTALLED = {"site-packages", "dist-packages"}
ELSEWHERE = ("fedfleet", "torch", "__main__", "__mp_main__")  # told in other ways; torch writes modules as it compiles


class Place(NamedTuple):
    """What a worker tells of itself: its node's address, what it has by name, why it cannot run anything, if so, and its node's id
    in Ray.
    """

    node: str
    has: Mapping[str, str]
    fault: str | None = None
    id: str = ""


def unread(error: Exception) -> str:
    """Say that a process cannot read the clients' data."""
    return f"it cannot read the clients' data ({one_line(error)}): {FIX}"


def packages(*more: str) -> dict[str, str | None]:
    """Return the version of each of the packages, and of ``more``, None for one that is not there."""
    return {name: _version(name) for name in (*PACKAGES, *more)}


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def of_process() -> dict[str, str]:
    """Return what this process has: versions, a digest of fedfleet's source, the kind of processor."""
    return {
        "Python": platform.python_version(),
        **{name: result or "none" for name, result in packages().items()},
        "source of fedfleet": source(Path(sys.modules["fedfleet"].__path__[0])),
        "processor": _processor(),
    }


def source(folder: Path) -> str:
    """Return a digest of a package's modules: their names below the folder, and what they hold."""
    result = hashlib.sha256()
    below = (Path(at) / name for at, _, names in os.walk(folder, followlinks=True) for name in names)
    for path in sorted(p for p in below if p.suffix == ".py"):
        content = path.read_bytes()
        result.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return f"sha256 {result.hexdigest()[:SHORT]}"


_first_seen: dict[str, tuple[object, str]] = {}
"""The digest of each module's file as it was first looked at, and the module's spec, which a reload replaces."""


def of_modules() -> dict[str, str]:
    """Return a digest of each module that is loaded and neither installed nor fedfleet's: code of authors, a copy on each node.

    A file that is edited while a process runs is not what that process has loaded, so the first digest stays.
    """
    result = {}
    for name, module in sorted(sys.modules.items()):
        file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
        if isinstance(file, str) and file.endswith(CODE) and name.partition(".")[0] not in ELSEWHERE:
            with suppress(OSError):
                if _is_authors(file):
                    seen = _first_seen.get(name)
                    if seen is None or seen[0] is not spec:
                        _first_seen[name] = seen = (spec, _digest(file))
                    result[f"{MODULE}{name}"] = seen[1]
    return result


@cache
def _is_authors(file: str) -> bool:
    """Say whether a file is neither installed nor Python's."""
    path = Path(file).resolve()
    return not (INSTALLED & {*path.parts} or _installed() & {*path.parents})


@cache
def _installed() -> frozenset[Path]:
    """Return Python's folders, and those into which pip has installed something (``pip install --target``)."""
    targets = [Path(path) for path in sys.path if path and any(Path(path).glob("*.dist-info"))]
    return frozenset(path.resolve() for path in (*map(Path, sysconfig.get_paths().values()), *targets))


def _digest(file: str) -> str:
    told = Path(file).stat()
    return _digest_of(file, told.st_mtime_ns, told.st_size)


@lru_cache(1 << 12)
def _digest_of(file: str, mtime_ns: int, size: int) -> str:
    return f"sha256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:SHORT]}"


def to_load(names: Iterable[str]) -> dict[str, str]:
    """Return a digest of each of the author's modules that this process would load; of one that it cannot find, none."""
    loaded = of_modules()
    found = ((name, loaded.get(name) or on_path(name.removeprefix(MODULE))) for name in names)
    return {name: digest for name, digest in found if digest is not None}


def on_path(name: str) -> str | None:
    """Return the digest of the module that this process would load by a name, which it does not load; None where there is none."""
    result = _spec(name)
    with suppress(OSError):
        return _digest(result.origin) if result is not None and result.origin is not None else None
    return None


def _spec(name: str) -> ModuleSpec | None:
    """Find a module in its package, and that in its own, without loading any."""
    places, result = sys.path, None
    for part in name.split("."):
        if places is None or (result := PathFinder.find_spec(part, places)) is None:
            return None
        bare = result.origin is None  # a folder without __init__.py, whose places Python knows only once it is loaded
        places = [str(Path(at, part)) for at in places] if bare else result.submodule_search_locations
    return result


class LoadedModules:
    """The author's modules that this process has loaded, of which each is told once."""

    def __init__(self) -> None:
        self._count = 0
        self._told: dict[str, str] = {}

    def new(self) -> dict[str, str]:
        """Return the digests of those that were loaded since the last call; where none was, that costs next to nothing."""
        if len(sys.modules) == self._count:
            return {}
        self._count = len(sys.modules)
        result = {name: digest for name, digest in of_modules().items() if self._told.get(name) != digest}
        self._told |= result
        return result


def _processor() -> str:
    """Return the model of the processor, and which of its instructions torch takes: kernels, and the order of sums, go by both."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} {torch.backends.cpu.get_cpu_capability()}"


class Fingerprint:
    """Compares workers with the driver, and in what the driver has not, such as a GPU, with the first that came.

    Where versions and machines may differ (``allow``), each node that does is an event, which says that bits may be others.
    """

    def __init__(self, mine: Mapping[str, str], events: list[dict[str, Any]], *, allow: bool):
        self._wanted, self._events, self._allow = dict(mine), events, allow
        self._said: set[tuple[str, str]] = set()  # nodes, and in what they differ
        self._loaded = LoadedModules()

    def modules(self) -> list[str]:
        """Return the names of the author's modules that any process has loaded so far."""
        self._note()
        return [name for name in self._wanted if name.startswith(MODULE)]

    def _note(self) -> None:
        """Take note of modules that the driver has loaded since."""
        self._wanted = {**self._loaded.new(), **self._wanted}

    def fault(self, place: Place) -> str | None:
        """Return in one line why a worker is not taken; None where it is."""
        lacking = [name for name in place.has if name not in self._wanted]
        self._note()
        for name in lacking:
            if name not in self._wanted and name.startswith(MODULE) and (here := on_path(name.removeprefix(MODULE))):
                self._wanted[name] = here
        differs = {k: v for k, v in place.has.items() if self._wanted.setdefault(k, v) != v}
        data = differs.pop(DATA, None)
        if differs and not self._allow:
            each = "; ".join(f"{name}: {there}, here {self._wanted[name]}" for name, there in differs.items())
            return (
                f"executor: node {place.node} is not like the driver's ({each}): bits may differ: give both the same, or set "
                f"executor.allow_differences=true"
            )
        if data is not None:
            return (
                f"executor: node {place.node} has other data than the driver ({data}, here {self._wanted[DATA]}): {FIX}"
            )
        if place.fault is not None:
            return f"executor: node {place.node} cannot take part: {place.fault}"
        if both := {k: [self._wanted[k], v] for k, v in differs.items() if (place.node, k) not in self._said}:
            self._said |= {(place.node, name) for name in both}
            self._events.append({"event": "unlike_node", "node": place.node, "differs": both, "bit_exact": False})
        return None
