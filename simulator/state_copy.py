"""Copies of what functions and objects hold now, which say later what of it has changed."""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from fedfleet.simulator.object_graph import LARGEST, PICKLING, Hidden, parts

PLAIN = (str, int, float, bool, bytes, complex, type(None))
"""What holds nothing and cannot change."""
KNOWN = (Mapping, list, tuple, set, frozenset, type, FunctionType, MethodType, ModuleType)
"""What ``parts`` tells all of."""
LAST = ("_flat_weights", "_flat_weight_refs")
"""What torch's recurrent layers keep of the weights of the last call, and put in place at each."""


class _State(NamedTuple):
    names: list[Any]
    values: list[Any]


class StateCopy:
    """What some objects hold, however deep, at the moment this is made; of tensors their versions, not what is in them."""

    def __init__(self, *roots: Any) -> None:
        self._tensors: list[tuple[Any, Tensor, int]] = []
        self._others: list[tuple[Any, Any, _State]] = []  # what they hold is kept, lest another be given its number
        waiting, seen = [("", x) for x in reversed(roots)], set()
        while waiting and len(seen) < LARGEST:
            name, x = waiting.pop()
            if id(x) in seen or type(x) in PLAIN:
                continue
            seen.add(id(x))
            if isinstance(x, Tensor):
                self._tensors.append((name, x, x._version))
            else:
                state = _state(x)
                self._others.append((name, x, state))
                waiting += zip(reversed(state.names), reversed(state.values), strict=True)

    def changed(self) -> str | None:
        """Return the name and the kind of the first thing that has changed since; None for nothing."""
        for name, x, version in self._tensors:
            if x._version != version:
                return f"{name!r} (a tensor)"
        for name, x, before in self._others:
            if (part := _difference(before, _state(x))) is not None:
                return repr(part) if part and str(part)[0] != "[" else f"{name!r} (a {type(x).__name__})"
        return None


def _state(x: Any) -> _State:
    """Return what an object holds itself, by name, and what is in it that is no object, such as a generator's state."""
    if isinstance(x, dict):
        return _State(list(x), list(x.values()))
    result = list(_shown(x))
    if not isinstance(x, KNOWN) and _says_itself(type(x)):  # of which ``parts`` may make something for the occasion
        result = [a for a, b in zip(result, _shown(x), strict=True) if a[1] is b[1]]
        result.append(("", _pickled(x)))
    return _State([name for name, _ in result], [value for _, value in result])


def _shown(x: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, part) for name, part in parts(x) if name not in LAST and not isinstance(part, Hidden))


def _says_itself(kind: type) -> bool:
    """Say whether a class has its own way to be pickled, as those have that are not written in Python."""
    return kind in copyreg.dispatch_table or any(getattr(kind, how) is not getattr(object, how) for how in PICKLING)


class _Pickler(pickle.Pickler):
    """Writes tensors as their versions, and torch's generators, whose own bytes differ each time, as their states."""

    def persistent_id(self, obj: Any) -> Any:
        """Return what is written of such an object instead of it; None for all others."""
        if isinstance(obj, Tensor):
            return id(obj), obj._version
        return obj.get_state().numpy().tobytes() if isinstance(obj, torch.Generator) else None


def _pickled(x: Any) -> tuple[int, ...]:
    """Return a checksum of an object's content, empty where it cannot be told."""
    plain, buffers = io.BytesIO(), []
    try:
        with warnings.catch_warnings(action="ignore"):  # iterators warn that they will not always be pickled
            _Pickler(plain, 5, buffer_callback=buffers.append).dump(x)
        return crc32(plain.getbuffer()), *(crc32(b.raw()) for b in buffers)
    except Exception:
        return ()


def _difference(before: _State, now: _State) -> Any:
    """Return the name of the first part that is another, "" where they are named otherwise; None where all are the same."""
    try:
        if before.names != now.names:
            return ""
    except Exception:  # equality may mean anything
        return ""
    if all(map(operator.is_, before.values, now.values)):
        return None
    both = zip(before.names, before.values, now.values, strict=True)
    return next((name for name, a, b in both if not _same(a, b)), None)


def _same(a: Any, b: Any) -> bool:
    """Say whether two parts are one, or alike and without a tensor of their own, such as a shape that a net keeps of its input."""
    if a is b or type(a) is not type(b):
        return a is b
    try:
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(_same, a, b))
        if isinstance(a, dict):
            return list(a) == list(b) and all(map(_same, a.values(), b.values()))
        return (a == b) is True
    except Exception:  # as above; or it holds itself
        return False
