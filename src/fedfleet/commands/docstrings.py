"""Docstrings of options: what stands below each field of a section, read from the source when it is asked for.

pydantic's own way (``use_attribute_docstrings``) reads them as each class is made, which takes a third of the time in which
a configuration is imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

Json = dict[str, Any]


def described(options: type[BaseModel], name: str) -> str | None:
    """Return what a field is, by ``Field(description=)`` or the docstring below it; None where neither is there."""
    if (said := options.model_fields[name].description) is not None:
        return said
    of = next((base for base in options.__mro__ if name in vars(base).get("__annotations__", {})), None)
    return None if of is None else _by_class(of.__module__).get(of.__qualname__, {}).get(name)


class WithDocstrings(GenerateJsonSchema):
    """JSON Schema in which fields have their docstrings."""

    def model_schema(self, schema: Any) -> Json:
        """Return the schema of a class of options."""
        result = super().model_schema(schema)
        for name, of in result.get("properties", {}).items():
            if name in schema["cls"].model_fields and (said := described(schema["cls"], name)) is not None:
                of.setdefault("description", said)
        return result


@cache
def _by_class(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of a module's fields, by class."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # of a notebook, or made without a file
        return {}
    result: dict[str, Mapping[str, str]] = {}
    todo = [("", tree.body)]
    while todo:
        prefix, body = todo.pop()
        for node in body:
            if isinstance(node, ast.ClassDef):
                result[prefix + node.name] = _fields(node.body)
                todo.append((f"{prefix}{node.name}.", node.body))
    return result


def _fields(body: list[ast.stmt]) -> Mapping[str, str]:
    result = {}
    for node, below in pairwise(body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                result[name] = inspect.cleandoc(text)
            case _:
                pass
    return result
