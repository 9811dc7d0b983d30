"""Check plain data against a model, and say in one line what is wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fedfleet.config.reading import show
from fedfleet.simulator.errors import ConfigError

USUALLY = {
    "learning_rate": "lr",
    "eta": "lr",
    "momentum": "client_optimizer.momentum",
    "weight_decay": "client_optimizer.weight_decay",
}
"""What is called otherwise elsewhere, and what it is here."""


def unknown(key: str, value: Any, known: Iterable[str]) -> str:
    """Say that a value is none of those known, which one it resembles, and which there are."""
    known = list(known)
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.4) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{key}={show(value)}: unknown; {hint}choose one of {', '.join(known)}"


def validated(
    model: type[BaseModel],
    mapping: dict[str, Any],
    prefix: str,
    others: Mapping[str, type[BaseModel]] | None = None,
    rounds: int | None = None,
) -> Any:
    """Check plain data against a model: no text for a number, no 0 for false (JSON is where pydantic is that strict).

    ``others`` are what might stand in its place, by what one would set: who has a key that is unknown here is told. ``rounds`` are
    those of the run, where they are known: some options are by default as long.
    """
    try:
        return model.model_validate_json(json.dumps(mapping), strict=True, context={"rounds": rounds})
    except ValidationError as e:
        raise ConfigError(_explain(e.errors(), model, mapping, prefix, others or {})) from None


def _explain(
    errors: list[Any],
    model: type[BaseModel],
    mapping: dict[str, Any],
    prefix: str,
    others: Mapping[str, type[BaseModel]],
) -> str:
    """Return one line on one mistake: an unknown key if there is one, for others may follow from it."""
    error = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    keys = _path(error, mapping)
    path = f"{prefix}{'.'.join(keys)}".rstrip(".")
    if error["type"] == "extra_forbidden":
        names = _fields(model, keys[:-1])
        usual = USUALLY.get(keys[-1], "")
        near = [usual] if usual.partition(".")[0] in names else []
        near = near or difflib.get_close_matches(keys[-1], names, n=1, cutoff=0.5)
        have = [name for name, other in others.items() if keys[0] in other.model_fields] if len(keys) == 1 else []
        mend = f"known here: {', '.join(names)}" if names else "there are none here"
        if near:
            mend = f"did you mean {path.removesuffix(keys[-1])}{near[0]}?"
        elif have:
            mend += f"; it is for {have[0] if len(have) == 1 else 'one of ' + ', '.join(have)}"
        return f"{path}={show(error['input'])}: unknown key; {mend}"
    if error["type"] == "missing":
        return f"{path}: missing: give it"
    messages = dict.fromkeys(e["msg"] for e in errors if _path(e, mapping) == keys)  # one an alternative
    text = " or ".join(m[0].lower() + m[1:] for m in messages).removeprefix("value error, ")
    text = text.replace("an object", "a mapping").replace("a valid array", "a list")
    return f"{path}={show(error['input'])}: {text}" if keys else f"{path}: {text}"


def _path(error: Any, node: Any) -> list[str]:
    """Return the keys that lead to an error, without pydantic's names of the alternatives it tried."""
    found = []
    for part in error["loc"]:
        inside = (isinstance(node, dict) and part in node) or (isinstance(node, list) and part in range(len(node)))
        if not inside and error["type"] != "missing":
            continue
        found.append(str(part))
        node = node[part] if inside else None
    return found


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the keys of the model that stands at ``path`` below ``model``."""
    for name in path:
        if name in model.model_fields:  # else a place in a list
            model = _section(model.model_fields[name].annotation) or model
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation has somewhere in it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section, get_args(annotation))), None)
