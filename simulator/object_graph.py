"""The graph of objects: a function's closure, its defaults and the globals it names, and an object's attributes.

Authors give functions; these reach their options, their nets and other functions through closures. Follow ``parts``
to find all that a function may touch, or what it was made with.
"""

from __future__ import annotations

import copyreg
import dis
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

LIBRARIES = sys.stdlib_module_names | {
    "cloudpickle",
    "fedfleet",
    "lightning_utilities",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "pydantic_core",
    "ray",
    "safetensors",
    "scipy",
    "sklearn",
    "torch",
    "torchmetrics",
    "torchvision",
    "transformers",
}
"""Top-level modules whose functions an author calls, but has not written."""
LARGEST = 200_000  # objects that are looked at
HEAP = 1 << 9  # of the flags of a class: made by a statement
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OperatorBase)
"""Things of torch that are what their text says."""
PLACED = {
    "__module__",
    "__qualname__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__slots__",
    "__annotations__",
    "_abc_impl",
}
PLACED |= {"__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__match_args__"}
PLACED |= {"__orig_bases__", "__parameters__", "__type_params__", "__dataclass_fields__", "__dataclass_params__"}
PLACED |= {"__pydantic_fields_set__", "__class_vars__", "__private_attributes__", "__signature__"}
"""What Python, dataclasses and pydantic put into a class or object beside what its author wrote."""
DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
LOOKUPS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__")


class Hidden:
    """Stands for what a thing holds that it does not show, such as a lock or an open file."""

    def __init__(self, x: Any):
        self.of = type(x).__qualname__


def written(x: Any) -> bool:
    """Say whether a function, class or module is an author's, rather than of fedfleet or another library."""
    module = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None) or ""
    if module == "builtins":  # or made by exec, without a module
        return isinstance(x, FunctionType) or (isinstance(x, type) and bool(x.__flags__ & HEAP))
    return module.partition(".")[0] not in LIBRARIES


def atomic(x: Any) -> bool:
    """Say whether a thing is what its text says, and holds nothing."""
    return type(x) in ATOMS or isinstance(x, NAMED)


def known_by_name(x: Any) -> bool:
    """Say whether a function or class is of a library, where its name finds it."""
    if written(x):
        return False
    result: Any = sys.modules.get(x.__module__ or "")
    for name in x.__qualname__.split("."):
        result = getattr(result, name, None)
    return result is x or isinstance(x, type)


def parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by name; of an author's function also the globals it names, of an author's class its methods.

    What does not lie open is what the object would be pickled from, and ``Hidden`` where it cannot be.
    """
    if atomic(x) or isinstance(x, Tensor | CodeType | Hidden):
        return
    match x:
        case FunctionType():
            if not known_by_name(x):
                yield from _function(x)
        case MethodType():
            yield from (("", x.__func__), ("", x.__self__))
        case _ if isinstance(x, DESCRIPTORS):
            yield from (("", x.__objclass__), ("", x.__name__))
        case staticmethod() | classmethod():
            yield "", x.__func__
        case property():
            yield from (("", f) for f in (x.fget, x.fset, x.fdel) if f is not None)
        case cached_property():
            yield "", x.func
        case partial():
            yield from (("", x.func), *((f"[{i}]", a) for i, a in enumerate(x.args)), *x.keywords.items())
        case _ if "__wrapped__" in getattr(x, "__dict__", ()) and not isinstance(x, type):  # such as functools.cache
            yield from (("", type(x)), *vars(x).items())
        case ModuleType():
            if written(x):
                yield from ((k, v) for k, v in vars(x).items() if not k.startswith("__"))
        case type():
            if written(x):
                yield from of_class(x)
                yield from (("", base) for base in x.__bases__)
        case _:
            yield from _object(x)


def of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what the author of a class wrote into it."""
    yield from (
        (k, v) for k, v in vars(kind).items() if k not in PLACED and not k.startswith(("__pydantic_", "__abstract"))
    )


def _object(x: Any) -> Iterator[tuple[str, Any]]:
    if buffer(x) is not None:
        return
    kind, items, mine = type(x), _items(x), written(type(x))
    if items is not None and kind in (dict, list, tuple, set, frozenset):
        yield from items
        return
    yield "", kind
    own = [f for how in PICKLING if (f := getattr(kind, how)) is not getattr(object, how)]
    if mine:  # what an author leaves out when it is sent is there all the same
        own = [f for f in own if not isinstance(f, FunctionType)]
    says = not isinstance(x, set | frozenset) and (bool(own) or kind in copyreg.dispatch_table)
    shown = list(_attributes(x)) if mine or not (says or items is not None) else []
    yield from shown
    if says:
        yield from _reduced(x)
    elif items is not None:
        yield from items
    elif not shown and any(isinstance(part, Hidden) for _, part in _reduced(x)):
        yield "", Hidden(x)


def buffer(x: Any) -> memoryview | None:
    """Return the bytes of what is nothing else, such as an array of numbers; None for other objects."""
    try:
        result = memoryview(x)
    except (TypeError, ValueError, BufferError):
        return None
    return None if "O" in result.format else result


def _items(x: Any) -> Iterable[tuple[str, Any]] | None:
    """Return what a container contains, None for what is none."""
    match x:
        case Mapping():
            pairs = list(x.items())
            plain = [(str(k), v) for k, v in pairs]
            return plain + [("", k) for k, _ in pairs if not atomic(k)]
        case tuple() if hasattr(x, "_fields"):
            return zip(type(x)._fields, x, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        case list() | tuple():
            return ((f"[{i}]", v) for i, v in enumerate(x))
        case set() | frozenset():
            return (("", v) for v in sorted(x, key=repr))
    return None


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    mro = type(x).__mro__
    cached = {k for kind in mro for k, v in vars(kind).items() if isinstance(v, cached_property)}
    yield from ((k, v) for k, v in getattr(x, "__dict__", {}).items() if k not in cached)
    for kind in mro:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            real = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if name not in PLACED and hasattr(x, real):
                yield name, getattr(x, real)


def _reduced(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object would be pickled from."""
    reduce = copyreg.dispatch_table.get(type(x), lambda x: x.__reduce_ex__(4))
    try:
        result = reduce(x)
        made = (
            (result,)
            if isinstance(result, str)
            else (*result[:3], *(None if i is None else list(i) for i in result[3:5]))
        )
    except Exception:
        made = (Hidden(x),)
    yield from (("", part) for part in made if part is not None)


def _function(f: FunctionType) -> Iterator[tuple[str, Any]]:
    code, held = f.__code__, {}
    for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            held[name] = cell.cell_contents
    modules = {name: v for name, v in held.items() if isinstance(v, ModuleType)}
    yield from ((name, v) for name, v in held.items() if name not in modules)
    if f.__defaults__:
        yield from zip(code.co_varnames[: code.co_argcount][-len(f.__defaults__) :], f.__defaults__, strict=True)
    yield from (f.__kwdefaults__ or {}).items()
    yield from vars(f).items()  # what a decorator wraps
    if written(f):
        yield from dict(_looked_up(code, f.__globals__, modules)).values()


def _looked_up(
    code: CodeType, space: dict[str, Any], modules: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield what code, and functions written inside it, look up by name: what it is called there, its last name, itself.

    Of an author's modules, what is taken from them: those in ``space``, those that local names mean, those imported on the way.
    """
    modules, top, base = dict(modules), None, None
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
    for at, step in enumerate(steps):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # two where Python joins two steps
        if step.opname == "IMPORT_NAME":
            top = base = _imported(names[0], steps[at - 1].argval, steps[at - 2].argval, space)
        elif step.opname == "IMPORT_FROM":
            top = getattr(top, names[0], None)
        elif step.opname.startswith("STORE_") and steps[at - 1].opname.startswith("IMPORT_"):
            if isinstance(top, ModuleType):
                modules[names[0]] = top
            elif top is not None:
                yield f"import {names[0]}", (names[0], top)
            top = base
        if step.opname in LOOKUPS and names[0] in space:
            yield from _taken(names[0], space[names[0]], steps[at + 1 :])
        elif "LOAD_FAST" in step.opname or "LOAD_DEREF" in step.opname:
            yield from (result for n in names if n in modules for result in _taken(n, modules[n], steps[at + 1 :]))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _looked_up(constant, space, modules)


def _taken(name: str, x: Any, rest: list[dis.Instruction]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield a thing that is looked up, or if it is an author's module what is taken from it next."""
    path = name
    for step in rest:
        if not (isinstance(x, ModuleType) and written(x) and step.opname in ATTRIBUTES):
            break
        name, path = step.argval, f"{path}.{step.argval}"
        x = getattr(x, name, None)
    if not isinstance(x, ModuleType) or written(x):
        yield path, (name, x)


def _imported(name: str, wanted: Any, level: Any, space: dict[str, Any]) -> Any:
    """Return what an import inside a function gives, where it is of an author's module."""
    if not level and name.partition(".")[0] in LIBRARIES:
        return None
    with suppress(Exception):
        return __import__(name, space, None, wanted or (), level)
    return None


def walk(*roots: Any) -> Iterator[tuple[Any, list[tuple[str, Any]]]]:
    """Yield everything that is held by some objects, however deep, each once, with its ``parts``; no more than ``LARGEST``.

    Atoms are left out.
    """
    waiting, seen = list(reversed(roots)), {}
    while waiting and len(seen) < LARGEST:
        x = waiting.pop()
        if id(x) in seen or atomic(x):
            continue
        seen[id(x)] = x  # kept, so that no other object is given its number
        held = list(parts(x))
        yield x, held
        waiting += [part for _, part in reversed(held)]
