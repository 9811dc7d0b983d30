"""What really ran, where a part of a run was made in Python: its name, its module, a digest of its source, its options.

The source is what was compiled, not a file: it is the same for a module, a notebook or a prompt, does not change with a comment or
with another line of the script, and is what ran even if the file has changed since. It covers all functions and classes of the
author's that are reached; those of fedfleet and other libraries have versions, in ``environment.json``. Options are what the
functions close over, the globals they name, and what objects hold, as far as it is plain. Nothing depends on the process.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.closures import parts, walk, written

LONGEST = 300  # of an option as JSON; a longer one is a digest
DEEPEST = 6  # values within values
WHOLE = 1 << 26  # elements of a tensor; of a larger one as many at most are looked at, evenly spaced
SHORT = 8  # digits of a digest, where people read it
_NOTHING = object()


def describe(x: Any) -> dict[str, Any]:
    """Return ``{name, module, source, options}`` of an algorithm, a task or data, as plain data; no source if all is fedfleet's."""
    named = x.round if isinstance(x, Algorithm) else x
    while isinstance(named, partial):
        named = named.func
    if isinstance(named, MethodType) or not isinstance(named, FunctionType | type):
        named = type(named.__self__ if isinstance(named, MethodType) else named)
    given, local = getattr(x, "name", None), named.__qualname__.split(".<locals>.")
    name = given if given and isinstance(given, str) else local[0] if isinstance(named, FunctionType) else local[-1]
    options: dict[str, Any] = {}
    codes: set[str] = set()
    plain = _Plain()
    for part in walk(x):
        if isinstance(part, FunctionType) and written(part):
            codes.add(f"{part.__qualname__} {_code(part.__code__)}")
        if part is x or plain(part) is _NOTHING:
            for key, value in _options(part, plain):
                if part is not x or key != "name":
                    _enter(options, key, value)
    source = hashlib.sha256("\n".join(sorted(codes)).encode()).hexdigest() if codes else None
    return {"name": name, "module": named.__module__, "source": source, "options": options}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str]:
    """Say of two descriptions in which they differ, of each as much."""
    keys = [k for k in ("name", "source") if was[k] != now[k]]
    options = [k for k in {**was["options"], **now["options"]} if was["options"].get(k) != now["options"].get(k)]
    return tuple(  # pyright: ignore[reportReturnType]
        ", ".join(
            [*(f"{k} {str(d[k])[:SHORT] if k == 'source' else d[k]}" for k in keys), *_some(d["options"], options)]
        )
        for d in (was, now)
    )


def _some(options: Mapping[str, Any], keys: list[str]) -> Iterator[str]:
    for key in keys[:3]:
        yield f"{key}={json.dumps(options[key])}" if key in options else f"no {key}"
    if len(keys) > 3:
        yield "…"


def _options(x: Any, plain: _Plain) -> Iterator[tuple[str, Any]]:
    """Yield the plain things that an object holds, if it is not plain itself; fields that are as by default are left out."""
    defaults = _defaults(x)
    for key, value in parts(x):
        found = plain(value) if key and not key.startswith("__") else _NOTHING
        if found is not _NOTHING and (key not in defaults or found != plain(defaults[key])):
            yield key, _short(found)


def _enter(options: dict[str, Any], key: str, value: Any) -> None:
    """Enter an option; another one of that name gets a number."""
    number, name = 1, key
    while name in options and options[name] != value:
        number += 1
        name = f"{key}_{number}"
    options[name] = value


def _defaults(x: Any) -> Mapping[str, Any]:
    if hasattr(x, "_field_defaults") and not isinstance(x, type):
        return x._field_defaults
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: f.default for f in fields(x) if f.default is not MISSING}
    return {}


class _Plain:
    """Returns a value as JSON would have it, ``_NOTHING`` where it is not plain; looks at the elements of a tensor once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, x: Any, depth: int = 0) -> Any:
        if id(x) not in self._known:
            self._known[id(x)] = x, self._of(x, depth)
        return self._known[id(x)][1]

    def _of(self, x: Any, depth: int) -> Any:
        match x:
            case enum.Enum():
                return x.name
            case None | bool() | int() | float() | str():
                return x
            case torch.dtype() | torch.device() | PurePath() | complex():
                return str(x)
            case bytes():
                return f"{len(x)} bytes sha256:{hashlib.sha256(x).hexdigest()}"
            case Tensor():
                return _tensor(x)
            case np.ndarray() if x.dtype != object:
                return f"{x.dtype} {x.shape} sha256:{hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()}"
            case np.generic():
                return self(x.item(), depth)
            case nn.Module():
                state = {name: t.detach().cpu() for name, t in x.state_dict().items()}
                return f"{type(x).__name__} sha256:{digest(f'{x} {x.training}', state)}"
            case BaseModel():
                return x.model_dump(mode="json")
        if depth > DEEPEST or isinstance(x, type):
            return _NOTHING
        typed = is_dataclass(x) or hasattr(x, "_fields")
        if typed or isinstance(x, Mapping):
            defaults = _defaults(x)
            found = {k: self(v, depth + 1) for k, v in parts(x) if k and (k not in defaults or v is not defaults[k])}
            is_plain = all(v is not _NOTHING for v in found.values())
            return ({"type": type(x).__name__, **found} if typed else found) if is_plain else _NOTHING
        if isinstance(x, list | tuple | set | frozenset):
            several = [self(v, depth + 1) for _, v in parts(x)]
            return _NOTHING if any(v is _NOTHING for v in several) else several
        return _NOTHING


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return (
        value if len(text) <= LONGEST else f"{len(text)} characters sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    )


def _tensor(x: Tensor) -> str:
    flat = x.detach().reshape(-1)
    some = flat[:: -(-len(flat) // WHOLE)] if len(flat) > WHOLE else flat
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} sha256:{digest('', {'': some.cpu()})}"


def _code(code: CodeType) -> str:
    """Return a digest of what code does: no line numbers, no file names."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    text = f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {counts} {_constant(code.co_consts)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _constant(x: Any) -> str:
    match x:
        case CodeType():
            return _code(x)
        case tuple():
            return f"({', '.join(map(_constant, x))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(_constant, x)))}}}"
    return repr(x)
