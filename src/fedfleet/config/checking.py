"""Check plain data against a model, and say in one line what is wrong with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from fedfleet.algorithms.options import ByName
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.registry import Registry, choices

NAMED = 6  # parts that have an option
USUALLY = {
    "learning_rate": "lr",
    "eta": "lr",
    "momentum": "client_optimizer.momentum",
    "weight_decay": "client_optimizer.weight_decay",
    "invite": "size",
    "respond": "wait_for",
    "void": "on_abort",
    "kind": "name",
    "name": "kind",
    "feedback": "error_feedback",
}
"""What is called otherwise elsewhere, and what it is here."""


class Section(NamedTuple):
    """A key whose value names a part, or parts: its registry, and whether it is a list of them."""

    registry: Registry[Any]
    listed: bool


def section(annotation: Any, metadata: Iterable[Any] = ()) -> Section | None:
    """Return what a field's type says that it names; None where it names nothing."""
    for each in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(each, Registry):
            return Section(each, listed=False)
    inner = next(filter(None, map(section, get_args(annotation))), None)
    return inner and inner._replace(listed=True)


def sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, Section]]:
    """Yield the sections of a model, and those that parts in them have, by their dotted keys."""
    for name, field in model.model_fields.items():
        if (result := section(field.annotation, field.metadata)) is not None:
            yield f"{at}{name}", result
            if not result.listed:
                within = (
                    each for entry in result.registry.values() for each in sections(entry.options, f"{at}{name}.")
                )
                yield from dict(within).items()
        elif (inner := model_in(field.annotation)) is not None:
            yield from sections(inner, f"{at}{name}.")


def short_forms(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys, dotted, at which a name may stand for a mapping, and the option of the mapping that it then is."""
    for name, field in model.model_fields.items():
        if (named := section(field.annotation, field.metadata)) is not None and not named.listed:
            yield f"{at}{name}", named.registry.key
            within = (each for entry in named.registry.values() for each in short_forms(entry.options, f"{at}{name}."))
            yield from dict(within).items()
        elif named is None and (inner := model_in(field.annotation)) is not None:
            if issubclass(inner, ByName):
                yield f"{at}{name}", inner.naming
            yield from short_forms(inner, f"{at}{name}.")


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that an annotation has somewhere in it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_in, get_args(annotation))), None)


def unknown(key: str, value: Any, known: Iterable[str]) -> str:
    """Say that a value is none of those known, which one it resembles, and which there are."""
    return f"{key}={show(value)}: {choices(value, known)}"


def validated(
    model: type[BaseModel], mapping: dict[str, Any], context: Mapping[str, Any] | None = None, *, at: str = ""
) -> Any:
    """Check plain data against a model: no text for a number, no 0 for false (JSON is where pydantic is that strict).

    ``context`` is what some options depend on: ``rounds``, those of the run. ``at`` is the section that the data are, in messages.
    Raises ConfigError.
    """
    try:
        return model.model_validate_json(json.dumps(mapping), strict=True, context=dict(context or {}))
    except ValidationError as e:
        raise ConfigError(_explain(e.errors(), model, mapping, at)) from None


class _Place(NamedTuple):
    """Where an error is: its key as a message has it, the last part of that, and what is known of the mapping it is in."""

    path: str = ""
    last: str = ""
    above: str = ""
    model: type[BaseModel] | None = None
    names: Section | None = None
    whole: bool = False
    """Whether it is a section that names a part, which is too long to be shown."""


def _explain(errors: list[Any], model: type[BaseModel], mapping: dict[str, Any], at: str) -> str:
    """Return one line on one mistake: an unknown key if there is one, for others may follow from it."""
    error = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    if isinstance(told := error.get("ctx", {}).get("error"), ConfigError):
        return str(told)
    place = _place(error, model, mapping, at)
    if error["type"] == "extra_forbidden" and ":" in place.last:
        return f"{place.path}: unknown key: put a space after the colon"
    if error["type"] == "extra_forbidden":
        return (
            f"{place.path}={show(error['input'])}: unknown key; {_instead(place, mapping if not place.above else None)}"
        )
    if error["type"] == "missing":
        return f"{place.path}: missing: give it"
    messages = dict.fromkeys(
        e["msg"] for e in errors if _place(e, model, mapping, at).path == place.path
    )  # one an alternative
    text = " or ".join(m[0].lower() + m[1:] for m in messages).removeprefix("value error, ")
    text = text.replace("an object", "a mapping").replace("a valid array", "a list")
    if text == "input should be a list" and not isinstance(error["input"], dict | list):
        text += f": write [{error['input']}]"
    text = text.replace("input should be a valid string", "input should be text: quote it")
    long = place.whole and isinstance(error["input"], dict) and error["type"] != "refused"
    shown = "" if long else f"={show(error['input'])}"
    return f"{place.path}{shown}: {text}" if place.path else text


def _instead(place: _Place, top: Mapping[str, Any] | None) -> str:
    """Say what was meant by an unknown key: one like it, one of that name elsewhere, or which there are."""
    tag = place.names.registry.key if place.names is not None else None
    names = [key for key in place.model.model_fields if key != tag] if place.model is not None else []
    for key, field in place.model.model_fields.items() if place.model is not None else ():
        inner = _inner(field.annotation, field.metadata, top.get(key))[0] if top is not None else None
        if inner is not None and place.last in inner.model_fields:
            return f"did you mean {key}.{place.last}?"
    usual = USUALLY.get(place.last, "")
    near = [usual] if usual.partition(".")[0] in (*names, tag) else difflib.get_close_matches(place.last, names, 1, 0.5)
    if near:
        return f"did you mean {f'{place.above}.' if place.above else ''}{near[0]}?"
    known = f"known here: {', '.join(names)}" if names else "there are none here"
    if place.names is None:
        return known
    kinds = place.names.registry
    have = [f"{place.above}.{kinds.key}={n}" for n, entry in kinds.items() if place.last in entry.options.model_fields]
    more = f" and {len(have) - NAMED} more" if len(have) > NAMED else ""
    return known + (f"; it is for {'one of ' * (len(have) > 1)}{', '.join(have[:NAMED])}{more}" if have else "")


def _place(error: Any, model: type[BaseModel], node: Any, at: str) -> _Place:
    """Return where an error is, without pydantic's names of the alternatives it tried."""
    result = _Place(at, model=model)
    inner: tuple[Any, Section | None] = (model, None)
    item: Any = None  # what a list has the type of
    for part in error["loc"]:
        inside = (isinstance(node, dict) and part in node) or (isinstance(node, list) and part in range(len(node)))
        if not inside and (isinstance(part, int) or error["type"] not in ("missing", "refused")):
            continue
        of, names = inner
        above = result.path
        numbered = isinstance(part, int) and names is not None and names.listed
        path = f"{above}[{part}]" if numbered else f"{above}.{part}".lstrip(".")
        result = _Place(path, str(part), above, of, None if names is None or names.listed else names)
        node = node[part] if inside else None
        if isinstance(part, int):
            inner = _inner(item, (), node) if numbered else (of, names)
            continue
        field = of.model_fields.get(part) if of is not None else None
        if field is None:
            inner = (None, None)
            continue
        item = field.annotation
        inner = _inner(field.annotation, field.metadata, node)
    return result._replace(whole=inner[1] is not None or result.path == at)


def _inner(annotation: Any, metadata: Iterable[Any], node: Any) -> tuple[type[BaseModel] | None, Section | None]:
    """Return the model of what stands at a field, and the section that it is of."""
    names = section(annotation, metadata)
    if names is None:
        return model_in(annotation), None
    if isinstance(node, list):
        return None, names
    said = {names.registry.key: node} if isinstance(node, str) else node if isinstance(node, Mapping) else {}
    return names.registry.find(said.get(names.registry.key, names.registry.default)), names._replace(listed=False)
