"""Write what the engine remembers as JSON and tensors, and read it back; nothing is pickled.

A value is ``None``, a number, text, a tensor, or a tuple, NamedTuple, list or mapping of values, or a ``Message``. Types are
read back by name among the NamedTuples of modules that are already imported, so that reading a file runs no code of its.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedfleet.simulator.errors import FedfleetError, of_kind
from fedfleet.simulator.work import Message


class CodecError(FedfleetError):
    """A value cannot be written, or what was written cannot be read."""


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return ``(plain data, tensors by name)``; a tensor that occurs twice is written once. Raises CodecError."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def write(node: Any, path: str) -> Any:
        match node:
            case None | bool() | int() | float() | str():
                return node
            case Tensor():
                if id(node) not in names:
                    names[id(node)] = path
                    tensors[path] = node.detach().cpu().contiguous()
                return {"tensor": names[id(node)]}
            case Message():
                parts = ("send", "config", "known")
                return {"message": [write(dict(getattr(node, p)), f"{path}.{p}") for p in parts]}
            case tuple() if hasattr(node, "_fields"):
                return {"type": _name(type(node)), "fields": _each(node, type(node)._fields, path)}  # pyright: ignore
            case tuple() | list():
                return {"tuple" if isinstance(node, tuple) else "list": _each(node, range(len(node)), path)}
            case Mapping():
                if not all(isinstance(k, str | int) for k in node):
                    raise CodecError(f"{path}: a mapping whose keys are neither text nor whole numbers cannot be kept")
                return {"dict": [[k, write(v, f"{path}.{k}")] for k, v in node.items()]}
        raise CodecError(
            f"{path}: {of_kind(node)} cannot be kept in a checkpoint: use tensors, numbers, text, tuples or mappings"
        )

    def _each(values: Any, keys: Any, path: str) -> list[Any]:
        return [write(v, f"{path}.{k}") for k, v in zip(keys, values, strict=True)]

    return write(value, "state"), tensors


def decode(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was encoded. Raises CodecError for anything that ``encode`` does not write."""
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"message": [send, config, known]}:
            return Message(*(decode(part, tensors) for part in (send, config, known)))
        case {"type": str(name), "fields": list(fields)}:
            return _type(name, len(fields))(*(decode(v, tensors) for v in fields))
        case {"tuple": list(values)}:
            return tuple(decode(v, tensors) for v in values)
        case {"list": list(values)}:
            return [decode(v, tensors) for v in values]
        case {"dict": list(items)} if all(isinstance(i, list) and len(i) == 2 for i in items):
            return {k: decode(v, tensors) for k, v in items}
    raise CodecError(f"not what a checkpoint holds: {str(plain)[:60]}")


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise CodecError(
            f"{name}: a checkpoint cannot hold this type: define it as a NamedTuple at the top of its module"
        )
    return name


def _type(name: str, size: int) -> type:
    kind = _found(name)
    if kind is None or len(kind._fields) != size:  # pyright: ignore[reportAttributeAccessIssue]
        raise CodecError(f"{name}: no NamedTuple of {size} fields here: import the module that defines it")
    return kind


def _found(name: str) -> type | None:
    """Return a NamedTuple of an imported module. One with bases of its own could run code when it is made."""
    module, _, qualname = name.partition(":")
    kind = vars(sys.modules[module]).get(qualname) if module in sys.modules else None
    plain = isinstance(kind, type) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    return kind if plain else None
