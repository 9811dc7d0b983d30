"""Provenance of parts made in Python: name, module, a digest of the source, and options.

The source is what was compiled, not a file. It is the same for a module, a notebook or a prompt, and does not change
with a comment or with another line of the script. It is what ran even if the file has changed since. It covers all
functions and classes of the author's that are reached. Those of fedfleet and other libraries have versions, in
``environment.json``.

Options are for people: what functions close over, the globals they name, and what objects hold, as far as it is
plain. The ``digest`` of everything, each thing at its place (``identity``), tells two parts apart. Nothing depends on
the process.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import json
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from fedfleet.assembly.identity import Texts, identity, simple
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.object_graph import LARGEST, NAMED, known_by_name, of_class, parts, written

LONGEST = 300  # of an option as JSON; a longer one is a digest
DEEPEST = 6  # values within values
MOST = 100  # options; of more, only the digest tells
FEW = 32  # numbers of a tensor that are said one by one
SHORT = 8  # digits of a digest, where people read it
VALUES = (numbers.Number, range, slice, datetime.date, datetime.time, datetime.timedelta)
"""Objects of libraries that are said as Python writes them."""
_NOTHING = object()


def describe(x: Any, of: Any = None) -> dict[str, Any]:
    """Return as plain data what an algorithm, a task or data are, called after ``of``, if that is not ``x`` itself.

    The source is None if all is fedfleet's. ``not_recorded`` are the types of what could not be looked into.
    """
    named = x if of is None else of
    named = named.round if isinstance(named, Algorithm) else named
    while isinstance(named, partial):
        named = named.func
    if isinstance(named, MethodType) or not isinstance(named, FunctionType | type):
        named = type(named.__self__ if isinstance(named, MethodType) else named)
    given, local = getattr(x, "name", None), named.__qualname__.split(".<locals>.")
    name = given if given and isinstance(given, str) else local[0] if isinstance(named, FunctionType) else local[-1]
    texts = Texts()
    whole = identity(x, texts)
    return {
        "name": name,
        "module": named.__module__,
        "source": whole.source,
        "options": _options(x, _Plain(texts)),
        "digest": whole.digest,
        "not_recorded": list(whole.hidden),
    }


def same(was: Any, now: Any) -> bool:
    """Say whether two descriptions are of the same part; NaN is NaN here."""
    return json.dumps(was, sort_keys=True) == json.dumps(now, sort_keys=True)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    """Say of two descriptions in which they differ, of each as much; by the digest, if what people read is the same."""
    keys = [k for k in ("name", "source") if was.get(k) != now.get(k)]
    options = [
        k for k in {**was["options"], **now["options"]} if not same(was["options"].get(k), now["options"].get(k))
    ]
    keys += [] if keys or options else ["digest"]
    return tuple(  # pyright: ignore[reportReturnType]
        ", ".join(
            [*(f"{k} {str(d.get(k))[: None if k == 'name' else SHORT]}" for k in keys), *_some(d["options"], options)]
        )
        for d in (was, now)
    )


def _some(options: Mapping[str, Any], keys: list[str]) -> Iterator[str]:
    for key in keys[:3]:
        yield f"{key}={json.dumps(options[key])}" if key in options else f"no {key}"
    if len(keys) > 3:
        yield "…"


def _options(x: Any, plain: _Plain) -> dict[str, Any]:
    """Return the plain things that are held by what is not plain itself, by name; fedfleet's own defaults are left out."""
    result: dict[str, Any] = {}
    waiting, seen = [x], {}
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)], defaults, below = part, _defaults(part), []
        for key, value in _shown(part):
            said = plain(value)
            by_default = key in defaults and said == plain(defaults[key])
            by_its_name = key == getattr(value, "__name__", None) or (part is x and key == "name")
            if said is _NOTHING or isinstance(value, nn.Module):
                below.append(value)
            if key and not (said is _NOTHING or by_default or by_its_name or key.startswith("__")):
                _enter(result, key, _short(said))
        if len(result) > MOST or len(seen) > LARGEST:
            return {**dict(list(result.items())[:MOST]), "…": "more, which only the digest tells"}
        waiting += reversed(below)
    return result


def _shown(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a thing that people may have chosen.

    Not the defaults of what made it, a class's own value of what an object has another of, or the inside of libraries' objects.
    """
    kind = type(x)
    match x:
        case FunctionType():
            made = x.__code__.co_varnames if x.__name__ in ("__init__", "__new__") else ()
            yield from ((k, v) for k, v in parts(x) if k not in made and k != "__class__")
        case nn.Module():
            for module in x.modules():
                if written(type(module)):
                    yield from ((k, v) for k, v in _of_object(module) if k not in _INNER)
        case type():
            yield from ((k, v) for k, v in parts(x) if k not in getattr(x, "__dataclass_fields__", ()))
        case _ if written(kind):
            yield from _of_object(x)
        case _ if _foreign(x):
            return
        case _:
            yield from parts(x)


_INNER = frozenset(vars(nn.Module()))


def _of_object(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an author's object holds, and of its classes what it has no value of its own for."""
    mine = [(k, v) for k, v in parts(x) if v is not type(x)]
    held = {k for k, _ in mine}
    for kind in type(x).__mro__:
        if written(kind):
            yield from ((k, v) for k, v in of_class(kind) if k not in held)
            held |= set(vars(kind))
    yield from mine


def _foreign(x: Any) -> bool:
    """Say whether something is an object of a library, whose parts mean nothing to its user."""
    if isinstance(
        x, type | FunctionType | MethodType | ModuleType | partial | list | tuple | set | frozenset | Mapping
    ):
        return False
    kind = type(x)
    return not (written(kind) or kind.__module__.startswith("fedfleet.") or hasattr(x, "__get__"))


def _enter(options: dict[str, Any], key: str, value: Any) -> None:
    """Enter an option; another one of that name gets a number."""
    number, name = 1, key
    while name in options and not same(options[name], value):
        number += 1
        name = f"{key}_{number}"
    options[name] = value


def _defaults(x: Any) -> Mapping[str, Any]:
    """Return the defaults of fields that need not be said: those of fedfleet's own descriptions."""
    if written(type(x)):
        return {}
    if hasattr(x, "_field_defaults") and not isinstance(x, type):
        return x._field_defaults
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: f.default for f in fields(x) if f.default is not MISSING}
    return {}


class _Plain:
    """Returns a value as JSON would have it, ``_NOTHING`` where it is not plain; looks at each thing once."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, x: Any, depth: int = 0) -> Any:
        if id(x) not in self._known:
            self._known[id(x)] = x, self._of(x, depth)
        return self._known[id(x)][1]

    def _of(self, x: Any, depth: int) -> Any:
        match x:
            case enum.Enum():
                return x.name
            case np.generic():
                value = x.item()
                return repr(x) if isinstance(value, np.generic) else self(value, depth)
            case None | bool():
                return x
            case int() | float() | str():
                return next(kind(x) for kind in (int, float, str) if isinstance(x, kind))  # not one of a library's own
            case PurePath() | complex():
                return str(x)
            case bytes():
                return f"{len(x)} bytes sha256:{hashlib.sha256(x).hexdigest()}"
            case nn.Module():
                return self._digest(x)
            case type() | FunctionType() | BuiltinFunctionType() | np.ufunc():
                return _called(x)
        if isinstance(x, NAMED):
            return str(x)
        if (few := _few(x)) is not None:
            return few
        if (text := self._texts(x)) is not None:
            return text
        if isinstance(x, list | tuple | dict) and len(x) > LONGEST and simple(x) is not None:
            return self._digest(x)
        if depth > DEEPEST:
            return _NOTHING
        typed = is_dataclass(x) or hasattr(x, "_fields")
        if typed or isinstance(x, Mapping | BaseModel):
            defaults = _defaults(x)
            held = dict(x) if isinstance(x, BaseModel) else dict((k, v) for k, v in parts(x) if k)
            result = {k: self(v, depth + 1) for k, v in held.items() if k not in defaults or v is not defaults[k]}
            is_plain = all(v is not _NOTHING for v in result.values())
            return ({"type": type(x).__name__, **result} if typed else result) if is_plain else _NOTHING
        if isinstance(x, list | tuple | set | frozenset):
            several = [self(v, depth + 1) for _, v in parts(x)]
            return _NOTHING if any(v is _NOTHING for v in several) else several
        return (repr(x) if isinstance(x, VALUES) else self._digest(x)) if _foreign(x) else _NOTHING

    def _digest(self, x: Any) -> str:
        result = identity(x, self._texts)
        left = f" (not recorded: {', '.join(result.hidden)})" if result.hidden else ""
        return f"{type(x).__name__} sha256:{result.digest}{left}"


def _few(x: Any) -> Any:
    """Return the numbers of a tensor or array of at most ``FEW``, such as a loss's weights of classes; None for what is none."""
    dense = type(x) is np.ndarray or (
        type(x) in (torch.Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta
    )
    if not dense or x.ndim > 1 or math.prod(x.shape) > FEW:
        return None
    values = x.tolist()
    known = all(isinstance(each, int | float) and math.isfinite(each) for each in np.atleast_1d(values).tolist())
    return values if known else None


def _called(x: Any) -> Any:
    """Return the full name of a library's function or class."""
    bound = getattr(x, "__self__", None)
    by_name = not written(x) if isinstance(x, type) else known_by_name(x) if isinstance(x, FunctionType) else True
    if not by_name or not (bound is None or isinstance(bound, ModuleType)):
        return _NOTHING
    return f"{getattr(x, '__module__', None) or type(x).__module__}.{x.__name__}"


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return (
        value if len(text) <= LONGEST else f"{len(text)} characters sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    )
