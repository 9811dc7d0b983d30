"""What functions and objects hold: what a function closes over, its defaults and the globals it names, an object's attributes.

Authors give functions; these reach their options, their nets and other functions through closures. Whoever has to know all that
a function may touch, or what it was made with, walks along ``parts``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

LIBRARIES = sys.stdlib_module_names | {
    "fedfleet",
    "torch",
    "torchvision",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "ray",
}
"""Top-level modules whose functions an author calls, but has not written."""
LARGEST = 100_000  # objects that are looked at
HEAP = 1 << 9  # of the flags of a class: made by a statement


def written(x: Any) -> bool:
    """Say whether a function or class is an author's, rather than of fedfleet or another library."""
    module = getattr(x, "__module__", None) or ""
    if module == "builtins":  # or made by exec, without a module
        return isinstance(x, FunctionType) or (isinstance(x, type) and bool(x.__flags__ & HEAP))
    return module.partition(".")[0] not in LIBRARIES


def parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name; of an author's function also the globals it names, of an author's class its methods."""
    match x:
        case None | bool() | int() | float() | complex() | str() | bytes() | Tensor() | ModuleType() | CodeType():
            return
        case FunctionType():
            yield from _function(x)
        case MethodType():
            yield from (("", x.__func__), ("", x.__self__))
        case partial():
            yield from (("", x.func), *((f"[{i}]", a) for i, a in enumerate(x.args)), *x.keywords.items())
        case Mapping():
            yield from ((str(k), v) for k, v in x.items())
        case tuple() if hasattr(x, "_fields"):
            yield "", type(x)
            yield from zip(type(x)._fields, x, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        case list() | tuple():
            yield from ((f"[{i}]", v) for i, v in enumerate(x))
        case set() | frozenset():
            yield from (("", v) for v in sorted(x, key=repr))
        case type():
            if written(x):
                yield from ((k, _bare(v)) for k, v in vars(x).items() if not k.startswith("__") or callable(_bare(v)))
                yield from (("", base) for base in x.__bases__)
        case _:
            yield "", type(x)
            cached = {k for kind in type(x).__mro__ for k, v in vars(kind).items() if isinstance(v, cached_property)}
            yield from ((k, v) for k, v in getattr(x, "__dict__", {}).items() if k not in cached)
            slots = [k for kind in type(x).__mro__ for k in _names(vars(kind).get("__slots__", ()))]
            yield from ((k, getattr(x, k)) for k in slots if not k.startswith("__") and hasattr(x, k))


def _function(f: FunctionType) -> Iterator[tuple[str, Any]]:
    code = f.__code__
    for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    if f.__defaults__:
        yield from zip(code.co_varnames[: code.co_argcount][-len(f.__defaults__) :], f.__defaults__, strict=True)
    yield from (f.__kwdefaults__ or {}).items()
    yield from vars(f).items()  # what a decorator wraps
    if written(f):
        names = list(_named(code))
        known = [(name, f.__globals__[name]) for name in names if name in f.__globals__]
        for name, value in known:
            if isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] not in LIBRARIES:
                    yield from ((n, vars(value)[n]) for n in names if n in vars(value))
            else:
                yield name, value


def _named(code: CodeType) -> Iterator[str]:
    """Yield the names that code, and functions written inside it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)


def _bare(x: Any) -> Any:
    """Return the function of a method as a class holds it."""
    if isinstance(x, staticmethod | classmethod):
        return x.__func__
    if isinstance(x, cached_property):
        return x.func
    return x.fget if isinstance(x, property) else x


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def walk(*roots: Any) -> Iterator[Any]:
    """Yield everything that is held by some objects, however deep, each once; no more than ``LARGEST``."""
    waiting, seen = list(reversed(roots)), {}
    while waiting and len(seen) < LARGEST:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x  # kept, so that no other object is given its number
        yield x
        waiting += [part for _, part in reversed(list(parts(x)))]
