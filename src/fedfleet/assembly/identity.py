"""Identity of things made in Python: a digest of all that is reached from them, each at its place.

It covers what was compiled of the author's functions, the names of libraries' functions, and what objects hold or
would be pickled from. Nothing in it depends on the process. What cannot be looked into counts by its type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.object_graph import LARGEST, Hidden, atomic, buffer, known_by_name, parts, written

WHOLE = 1 << 26  # elements of a tensor; of a larger one as many at most are looked at, evenly spaced
DEEPEST = 6  # containers within containers that are taken as one


class Identity(NamedTuple):
    """What is known of a thing: of everything, of the author's source (None if there is none), types of what is not known."""

    digest: str
    source: str | None
    hidden: tuple[str, ...]


class Texts:
    """The texts of tensors and arrays, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def __call__(self, x: Any) -> str | None:
        """Return the type, the shape and a digest of the elements, None for what is no array."""
        if id(x) not in self._known:
            text = _tensor(x) if isinstance(x, Tensor) else _array(x)
            if text is None:
                return None
            self._known[id(x)] = x, text
        return self._known[id(x)][1]


def identity(x: Any, texts: Texts | None = None) -> Identity:
    """Return what tells a thing from others."""
    reading = _Reading(texts or Texts(), {})
    reading.read(x)
    codes = "\n".join(sorted(reading.codes))
    source = hashlib.sha256(codes.encode()).hexdigest() if codes else None
    return Identity(reading.hash.hexdigest(), source, tuple(sorted(reading.hidden)))


class _Reading:
    """Goes through all that is held by a thing, in the order of its parts; what is met again is said by its number."""

    def __init__(self, texts: Texts, numbers: Mapping[int, tuple[int, Any]]):
        self.hash = hashlib.sha256()
        self.codes: set[str] = set()
        self.hidden: set[str] = set()
        self._texts, self._numbers = texts, dict(numbers)

    def read(self, root: Any) -> None:
        under_way = [iter([("", root)])]
        while under_way:
            for name, x in under_way[-1]:
                if self._enters(name, x):
                    under_way.append(iter(self._parts(x)))
                    break
            else:
                under_way.pop()
                self._say(")")

    def _say(self, text: str) -> None:
        self.hash.update(f"{len(text)}:{text}".encode(errors="backslashreplace"))

    def _parts(self, x: Any) -> list[tuple[str, Any]]:
        try:
            return list(parts(x))
        except Exception:  # of a property or a mapping that computes
            return [("", Hidden(x))]

    def _enters(self, name: str, x: Any) -> bool:
        """Say what a thing is, and return whether its parts are to be said too."""
        self._say(name)
        if (text := self._plain(x)) is not None:
            self._say(text)
        elif id(x) in self._numbers:
            self._say(f"#{self._numbers[id(x)][0]}")
        elif len(self._numbers) == LARGEST:
            self.hidden.add(f"what comes after {LARGEST:,} objects")
        else:
            self._numbers[id(x)] = len(self._numbers), x  # kept, so that no other object is given its number
            self._say(self._own(x))
            return not isinstance(x, set | frozenset)
        return False

    def _plain(self, x: Any) -> str | None:
        """Return the text of what has no parts; however long it is, it is one."""
        if atomic(x):
            return _atom(x)
        if isinstance(x, Hidden):
            self.hidden.add(x.of)
            return f"hidden {x.of}"
        if isinstance(x, FunctionType) and known_by_name(x):
            return f"function {x.__module__}.{x.__qualname__}"
        if isinstance(x, type) and not written(x):
            return f"class {x.__module__}.{x.__qualname__}"
        return simple(x) or self._texts(x)

    def _own(self, x: Any) -> str:
        """Return what a thing is beside its parts."""
        match x:
            case FunctionType():
                if not written(x):
                    return f"function {x.__module__}.{x.__qualname__}"
                result = f"{x.__qualname__} {code_digest(x.__code__)}"
                self.codes.add(result)
                return f"function {result}"
            case type():
                return f"class {x.__qualname__}"
            case CodeType():
                return code_digest(x)
            case ModuleType():
                return f"module {x.__name__}"
            case set() | frozenset():
                return f"{type(x).__name__} {sorted(self._element(v) for v in x)}"
        return type(x).__name__

    def _element(self, x: Any) -> str:
        """Return the digest of what stands in no order."""
        reading = _Reading(self._texts, self._numbers)
        reading.read(x)
        self.codes |= reading.codes
        self.hidden |= reading.hidden
        return reading.hash.hexdigest()


def _atom(x: Any) -> str:
    return (
        f"int {x:x}"
        if type(x) is int
        else f"{type(x).__name__} {x!s}"
        if type(x) is str
        else f"{type(x).__name__} {x!r}"
    )


def simple(x: Any, depth: int = 0) -> str | None:
    """Return the text of a container of atoms alone, or of such containers; None for what holds anything else."""
    kind = type(x)
    if kind not in (list, tuple, dict, set, frozenset) or depth > DEEPEST:
        return None
    texts = []
    for each in x.items() if kind is dict else x:
        text = _atom(each) if atomic(each) else simple(each, depth + 1)
        if text is None:
            return None
        texts.append(text)
    return f"{kind.__name__} {sorted(texts) if kind in (set, frozenset) else texts}"


def _tensor(x: Tensor) -> str:
    kind = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    if x.is_meta:
        return f"{kind} without elements"
    flat = (x.detach().coalesce().to_dense() if x.is_sparse else x.detach()).reshape(-1)
    every = -(-len(flat) // WHOLE)
    some = flat[::every] if every > 1 else flat
    return f"{kind} sha256{_spaced(every)}:{digest('', {'': some.cpu()})}"


def _array(x: Any) -> str | None:
    result = buffer(x)
    if result is None:
        return None
    flat = np.asarray(x if isinstance(x, np.ndarray) else result).reshape(-1)
    every = -(-len(flat) // WHOLE)
    some = np.ascontiguousarray(flat[::every] if every > 1 else flat)
    kind = f"{flat.dtype} {tuple(result.shape or ())}"
    return f"{kind} sha256{_spaced(every)}:{hashlib.sha256(some.view(np.uint8).data).hexdigest()}"


def _spaced(every: int) -> str:
    return f" of one element in {every}" if every > 1 else ""


def code_digest(code: CodeType) -> str:
    """Return a digest of what code does: no line numbers, no file names."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    text = f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {counts} {_constant(code.co_consts)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _constant(x: Any) -> str:
    match x:
        case CodeType():
            return code_digest(x)
        case tuple():
            return f"({', '.join(map(_constant, x))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(_constant, x)))}}}"
    return repr(x)
