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
from collections.abc import Callable, Iterable, Mapping
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
MODULE, LIBRARY = "module ", "library "
INSTALLED = {"site-packages", "dist-packages"}
ELSEWHERE = ("fedfleet", "torch", "__main__", "__mp_main__")  # told in other ways; torch writes modules as it compiles
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that name folders of what torch compiles: its sources are compared, and each node has its own compiler."""


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

    They may be Python's, compiled, or in an archive; libraries that ``torch.ops.load_library`` has loaded are told, too. A file
    that is edited while a process runs is not what that process has loaded, so the first digest stays.
    """
    result = {}
    for name, module in sorted(sys.modules.items()):
        file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
        if isinstance(file, str) and name.partition(".")[0] not in ELSEWHERE:
            _add(result, f"{MODULE}{name}", file, spec)
    for file in sorted(torch.ops.loaded_libraries):
        _add(result, f"{LIBRARY}{Path(file).name}", file)
    return result


def _add(result: dict[str, str], name: str, file: str, spec: object = None) -> None:
    """Add the digest of a file of an author's, as it was first looked at."""
    with suppress(OSError):
        if _is_authors(file):
            seen = _first_seen.get(name)
            if seen is None or seen[0] is not spec:
                _first_seen[name] = seen = (spec, _digest(file, getattr(spec, "loader", None)))
            result[name] = seen[1]


@cache
def _is_authors(file: str) -> bool:
    """Say whether a file is neither installed, nor Python's, nor what torch has compiled."""
    path = Path(file).resolve()
    return not (INSTALLED & {*path.parts} or (_installed() | _compiled()) & {*path.parents})


def _compiled() -> frozenset[Path]:
    """Return the folders that torch has for what it compiles. It sets these variables before it loads anything from there."""
    return frozenset(Path(folder).resolve() for name in COMPILED if (folder := os.environ.get(name)))


@cache
def _installed() -> frozenset[Path]:
    """Return Python's folders, and those into which pip has installed something (``pip install --target``)."""
    targets = [Path(path) for path in sys.path if path and any(Path(path).glob("*.dist-info"))]
    of_python = (
        *sysconfig.get_paths().values(),
        sysconfig.get_config_var("DESTSHARED"),
    )  # the last has what is compiled
    return frozenset(Path(path).resolve() for path in (*of_python, *targets) if path)


def _digest(file: str, loader: object = None) -> str:
    """Return the digest of a module's file; one in an archive its ``loader`` reads. Raises OSError."""
    try:
        told = Path(file).stat()
    except OSError:
        read: Callable[[str], bytes] | None = getattr(loader, "get_data", None)
        if read is None:
            raise
        return _short(read(file))
    return _digest_of(file, told.st_mtime_ns, told.st_size)


@lru_cache(1 << 12)
def _digest_of(file: str, mtime_ns: int, size: int) -> str:
    return _short(Path(file).read_bytes())


def _short(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:SHORT]}"


def to_load(names: Iterable[str]) -> dict[str, str]:
    """Return a digest of each of the author's modules that this process would load; of one that it cannot find, none."""
    loaded = of_modules()
    found = ((name, loaded.get(name) or on_path(name.removeprefix(MODULE))) for name in names)
    return {name: digest for name, digest in found if digest is not None}


def on_path(name: str) -> str | None:
    """Return the digest of the module that this process would load by a name, which it does not load; None where there is none."""
    result = _spec(name)
    with suppress(OSError):
        return _digest(result.origin, result.loader) if result is not None and result.origin is not None else None
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
        self._count = (0, 0)
        self._told: dict[str, str] = {}

    def new(self) -> dict[str, str]:
        """Return the digests of those that were loaded since the last call; where none was, that costs next to nothing."""
        count = (len(sys.modules), len(torch.ops.loaded_libraries))
        if count == self._count:
            return {}
        self._count = count
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
        self._tellers: dict[str, Place] = {}  # the first node that has told each
        self._late: list[Place] = []

    def modules(self) -> list[str]:
        """Return the names of the author's modules that any process has loaded so far."""
        self._note()
        return [name for name in self._wanted if name.startswith(MODULE)]

    def _note(self) -> None:
        """Take note of modules that the driver has loaded since, and of nodes that had told others by those names."""
        for name, here in self._loaded.new().items():
            self._wanted[name] = here
            told = self._tellers.get(name)
            if told is not None and told.has[name] != here:
                self._late.append(told)

    def late_fault(self) -> str | None:
        """Return in one line why what the driver has loaded is not what workers had loaded before; None where it is."""
        self._note()
        return next((fault for place in self._late if (fault := self._compared(place)) is not None), None)

    def fault(self, place: Place) -> str | None:
        """Return in one line why a worker is not taken; None where it is."""
        lacking = [name for name in place.has if name not in self._wanted]
        self._note()
        for name in lacking:
            if name not in self._wanted and name.startswith(MODULE) and (here := on_path(name.removeprefix(MODULE))):
                self._wanted[name] = here
        for name, there in place.has.items():
            self._tellers.setdefault(name, Place(place.node, {name: there}))
        return self._compared(place)

    def _compared(self, place: Place) -> str | None:
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
