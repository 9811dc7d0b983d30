"""The configuration as JSON Schema, for editors: made of the types that check it, so that it has every key and every name.

It says less than the reader, which also knows rules over several keys; and it is draft 2020-12 in keywords that editors of
draft 7 understand, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from fedfleet.commands.docstrings import WithDocstrings
from fedfleet.commands.paper import PaperTable
from fedfleet.config.schema import SCHEMA_VERSION, Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SEVERAL = ("compare", "vary")
CHANGES = "changes"
"""Of the definitions, that of overrides; ``changes.algorithm`` is that of a section of them."""

Schema = dict[str, Any]


def config() -> Schema:
    """Return the schema of a configuration."""
    root = Config.model_json_schema(schema_generator=WithDocstrings)
    defs: dict[str, Schema] = root.pop("$defs")
    root["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    _with_overrides(root, defs)
    return _finished("config", root, defs)


def table() -> Schema:
    """Return the schema of a table, what ``fedfleet paper`` takes."""
    result = PaperTable.model_json_schema(schema_generator=WithDocstrings)
    return _finished("table", result, result.pop("$defs", {}))


KINDS = {"config": config, "table": table}


def _with_overrides(root: Schema, defs: dict[str, Schema]) -> None:
    """Let ``compare`` and ``vary`` take overrides, nested or dotted, and the configuration itself dotted keys."""
    properties = {k: v for k, v in root["properties"].items() if k not in SEVERAL}
    _changes(CHANGES, properties, defs)
    changes = defs[CHANGES]
    dotted = {k: {"$ref": f"#/$defs/{CHANGES}/properties/{k}"} for k in changes["properties"]}
    below = changes["patternProperties"]
    compare, vary = (root["properties"][key] for key in SEVERAL)
    _mapping(compare)["additionalProperties"] = {"$ref": f"#/$defs/{CHANGES}"}
    several: Schema = {"type": "array", "minItems": 1}
    _mapping(vary).update(
        properties={k: several | {"items": v} for k, v in dotted.items()},
        patternProperties={k: several | {"items": v} for k, v in below.items()},
        additionalProperties=False,
    )
    values = {f"vary.{k}": several | {"items": v} for k, v in dotted.items()}
    root["patternProperties"] = {
        **{f"^{re.escape(k)}$": v for k, v in {**dotted, **values}.items() if "." in k},
        **below,
    }


def _changes(where: str, properties: Mapping[str, Schema], defs: dict[str, Schema]) -> None:
    """Define what overrides may say of a section, below definitions of the sections in it: any of its keys, none of them needed."""
    result, below = {}, {}
    for key, given in properties.items():
        inside, others = _inside(given, defs)
        result[key] = given
        if inside:
            name = f"{where}.{key}"
            _changes(name, inside, defs)
            result[key] = _told(given) | {"anyOf": [*others, {"$ref": f"#/$defs/{name}"}]}
            for each in defs[name]["properties"]:
                result[f"{key}.{each}"] = {"$ref": f"#/$defs/{name}/properties/{each}"}
            below |= {f"^{key}\\.{k[1:]}": v for k, v in defs[name]["patternProperties"].items()}
        elif (free := _free(given, defs)) is not None:
            below[f"^{key}\\."] = free
    defs[where] = {
        "type": "object",
        "properties": result,
        "patternProperties": below,
        "additionalProperties": False,
    }


def _inside(given: Schema, defs: dict[str, Schema]) -> tuple[dict[str, Schema], list[Schema]]:
    """Return the keys of a section, those of all its names together, if it is one, and what else may stand in its place."""
    result: dict[str, list[Schema]] = {}
    others = []
    for alternative in _alternatives(given, defs):
        if not alternative.get("properties"):
            others.append(alternative)
        for key, each in alternative.get("properties", {}).items():
            known = result.setdefault(key, [])
            if each not in known:
                known.append(each)
    return {k: each[0] if len(each) == 1 else {"anyOf": each} for k, each in result.items()}, others


def _alternatives(given: Schema, defs: dict[str, Schema]) -> Iterator[Schema]:
    """Yield what a schema comes to, one alternative after the other, without references."""
    if "$ref" in given:
        yield from _alternatives(defs[_name(given)], defs)
    elif "anyOf" in given:
        for each in given["anyOf"]:
            yield from _alternatives(each, defs)
    else:
        yield given


def _free(given: Schema, defs: dict[str, Schema]) -> Schema | None:
    """Return what the values of a mapping of any keys are; None of anything else."""
    for each in _alternatives(given, defs):
        if each.get("type") == "object" and "properties" not in each:
            more = each.get("additionalProperties", True)
            return more if isinstance(more, dict) else {}
    return None


def _mapping(given: Schema) -> Schema:
    return next(each for each in given["anyOf"] if each.get("type") == "object")


def _told(given: Schema) -> Schema:
    return {k: v for k, v in given.items() if k in ("description", "default")}


def _name(ref: Mapping[str, Any]) -> str:
    return str(ref["$ref"]).removeprefix("#/$defs/")


def _finished(what: str, root: Schema, defs: dict[str, Schema]) -> Schema:
    """Return a schema with the definitions that are referred to, and a name of its own."""
    used: dict[str, Schema] = {}
    todo = [root]
    while todo:
        for name in _referred(todo.pop()):
            if name not in used:
                used[name] = defs[name]
                todo.append(defs[name])
    told = {"title": f"fedfleet {what}", "$comment": f"of fedfleet {version('fedfleet')}"}
    head = {"$schema": DIALECT, "$id": f"urn:fedfleet:{what}:{SCHEMA_VERSION}"}
    return head | _readable({**root, **told, "$defs": dict(sorted(used.items()))})


def _referred(node: Any) -> Iterator[str]:
    """Yield the names of definitions that are referred to."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield _name(node).split("/")[0]
        for value in node.values():
            yield from _referred(value)
    elif isinstance(node, list):
        for value in node:
            yield from _referred(value)


def _readable(node: Any) -> Any:
    """Return a schema without what only pydantic needs: titles of keys, and marks of code as reStructuredText has them."""
    if isinstance(node, dict):
        return {
            k: " ".join(v.replace("``", "`").split()) if k == "description" and isinstance(v, str) else _readable(v)
            for k, v in node.items()
            if not (k == "title" and isinstance(v, str) and v and v[0].isupper())
        }
    return [_readable(each) for each in node] if isinstance(node, list) else node
