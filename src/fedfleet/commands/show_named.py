"""Names that a configuration may use, each with its options, and the other sections, as the code has them."""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Group, RenderableType
from rich.text import Text

from fedfleet.algorithms.bibtex import Paper
from fedfleet.algorithms.papers import CORRECTIONS, PAPERS
from fedfleet.algorithms.participation import Correction
from fedfleet.commands.docstrings import described
from fedfleet.commands.terminal import table
from fedfleet.config.checking import model_in, section, unknown
from fedfleet.config.plugins import OPTIONS, options_of
from fedfleet.config.schema import SECTIONS, Config
from fedfleet.files.documents import dump
from fedfleet.middleware.compression.codecs.delta import Delta
from fedfleet.simulator import named
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.registry import Registry, package

BOUNDS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
CORRECTION = "correction"
"""A kind that is no section of its own, but an option of many algorithms."""
PAGE_WIDTH = 80
OF_CONFIG = {
    "data CONFIG": "who holds what",
    "availability CONFIG": "who is online",
    "compatibility": "which features go with which algorithms",
}
OPTION = ("option", "type", "default", "")


class Page(NamedTuple):
    """What there is to say of a name, or of a section: on a terminal it prints as text and a table."""

    name: str
    about: str
    source: str
    """Formulas and citation."""
    options: tuple[tuple[str, str, str, str], ...]
    example: str
    """YAML; nothing of a section."""

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows."""
        parts: list[RenderableType] = [Text.assemble((self.name, "bold"), f"  {self.about}")]
        for more in (self.source, self.options and table(OPTION, self.options), self.example):
            parts += [Text(""), Text(more) if isinstance(more, str) else more] if more else []
        return Group(*parts)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, the example as the value that its YAML has."""
        options = [dict(zip(("option", "type", "default", "about"), row, strict=True)) for row in self.options]
        return {**self._asdict(), "options": options, "example": yaml.safe_load(self.example)}


class Kind(NamedTuple):
    """A kind of part: the section that names one, or is a list of them, and its registry."""

    section: str
    listed: bool
    registry: Registry[Any]


def kinds() -> dict[str, Kind]:
    """Return every kind by what it is called on the command line."""
    result: dict[str, Kind] = {}
    for key, of in SECTIONS.items():
        result.setdefault(of.registry.kind, Kind(key, of.listed, of.registry))
    return result


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of a configuration with keys of their own, and as "config" the whole."""
    inner = {key: model_in(field.annotation) for key, field in Config.model_fields.items() if key not in SECTIONS}
    return {"config": Config} | {key: of for key, of in inner.items() if of is not None}


def everything() -> dict[str, Any]:
    """Return all that can be shown: pictures of a configuration, kinds with how many names each has, sections."""
    many = {kind: len(named_of(kind)) for kind in [*kinds(), CORRECTION]}
    return {"of_a_configuration": OF_CONFIG, "kinds": many, "sections": [*sections()]}


def overview() -> str:
    """Return all that can be shown as text, with how it is asked for."""
    found = everything()
    rows = {f"show {what}": about for what, about in OF_CONFIG.items()}
    rows |= {
        "show KIND": "names of a kind: " + ", ".join(f"{kind} ({many})" for kind, many in found["kinds"].items()),
        "show KIND NAME": "options, source and an example of one",
        "show SECTION": "keys of a section: " + ", ".join(found["sections"]),
    }
    width = max(map(len, rows))
    lines = [textwrap.wrap(about, PAGE_WIDTH - width - 2) for about in rows.values()]
    shown = zip(rows, lines, strict=True)
    return "\n".join(
        f"{what if i == 0 else '':{width}}  {line}" for what, several in shown for i, line in enumerate(several)
    )


def called(word: str, known: Container[str]) -> str | None:
    """Return which of those known a word means, in the singular or in the plural."""
    return next((each for each in (word, word.removesuffix("s")) if each in known), None)


def section_page(name: str) -> Page:
    """Return what there is to say of a section: its keys; of the whole configuration those at the top."""
    of = sections()[name]
    whole = of is Config
    rows = tuple(row for row in fields(of) if not (whole and "." in row[0]))
    more = "fedfleet show KEY, or KIND and NAME, says what is below a mapping." if whole else _sentence(of)
    return Page(name, more, "", rows, "")


def _packaged(of: Registry[Any]) -> dict[str, str]:
    """Return the names that installed packages add to those of fedfleet, and of each which package."""
    result = {}
    for name, several in of.packaged().items():
        told = " and ".join(map(_whose, several))
        result[name] = told
        if of.unclear(name) is not None:
            mine = of.about(name) if name in of else None
            result[name] = f"refused, since it is not clear which: {'; '.join(filter(None, [mine, told]))}"
    return result


def named_of(kind: str) -> dict[str, str]:
    """Return a line on each name of a kind, those of installed packages too, and whose they are."""
    if kind == CORRECTION:
        return {
            name: ", ".join(paper.title.replace("{", "").replace("}", "") for paper in CORRECTIONS[name])
            for name in CORRECTIONS
        }
    of = kinds()[kind].registry
    return {name: of.about(name) for name in of} | _packaged(of)


def listed(kind: str) -> str:
    """Return a line a name of a kind; callbacks have none but those of packages."""
    result = named_of(kind)
    if not result:
        return f"none has a name: give module:name of your own, or install a package that adds {kind}s (docs/guides/own_parts.md)"
    width = max(map(len, result), default=0)
    return "\n".join(f"{name:{width}}  {line}".rstrip() for name, line in result.items())


def page(kind: str, name: str) -> Page:
    """Return what there is to say of a name. Raises ConfigError."""
    if kind == CORRECTION:
        return _correction(name)
    of = kinds()[kind]
    registry = of.registry
    if (wrong := registry.unclear(name)) is not None:
        raise ConfigError(f"{of.section}={name!r}: {wrong}")
    if (given := registry.entry(name)) is not None:
        return _page_of(of, name, named.found(f"{of.section}: {name}, {package(given)}", given.value), _whose(given))
    if registry.group is not None and named.is_path(name):
        return _page_of(of, name, named.found(f"show {kind}", name), "of your own")
    if name not in registry:
        there = registry.known()
        raise ConfigError(f"show {kind}={name!r}: {registry.unknown(name) if there else listed(kind)}")
    entry = registry[name]
    return Page(name, registry.about(name), entry.source, tuple(fields(entry.options)), example(kind, name))


def _correction(name: str) -> Page:
    if name not in CORRECTIONS:
        raise ConfigError(unknown(f"show {CORRECTION}", name, CORRECTIONS))
    rows = tuple(row for row in fields(Correction) if row[0] in {"kind", *Correction.used[name]})
    about = "of an algorithm's mean, for clients that are heard less often than others (docs/algorithms/dropout.md)"
    return Page(name, about, "", rows, f"algorithm: {{name: fedavg, correction: {{kind: {name}}}}}")


def _page_of(of: Kind, name: str, make: Callable[..., Any], whose: str) -> Page:
    """Return what there is to say of code that is not fedfleet's: whose it is, its own words, what it is called with."""
    takes = [p for p in named.parameters(make).values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    options = options_of(make) if of.registry.usual is not None else None
    rows = [] if options is None else [*fields(options)]
    rows += [
        (f"arguments.{p.name}", _annotated(p), _given(p), "") for p in takes if options is None or p.name != OPTIONS
    ]
    said = {of.registry.key: name}
    text = _yaml(of.section, [said] if of.listed else said)
    return Page(name, whose, inspect.getdoc(make) or "", tuple(rows), text)


def papers(kind: str, name: str) -> tuple[Paper, ...]:
    """Return the papers of an algorithm, or of a correction; none of other parts."""
    return {"algorithm": PAPERS, CORRECTION: CORRECTIONS}.get(kind, {}).get(name, ())


def bibtex(kind: str, name: str) -> str:
    """Return the papers of an algorithm or a correction as BibTeX. Raises ConfigError where there are none."""
    page(kind, name)  # which refuses a name that is none
    if not (cited := papers(kind, name)):
        raise ConfigError(f"--bibtex: show {kind} {name} has no papers here: leave it out, and see its text")
    return "\n\n".join(paper.bibtex for paper in cited)


def _annotated(p: inspect.Parameter) -> str:
    return "" if p.annotation is p.empty else p.annotation if isinstance(p.annotation, str) else _told(p.annotation)


def _given(p: inspect.Parameter) -> str:
    return "told by fedfleet, or to be given" if p.default is p.empty else f"{p.default}"


def _whose(entry: EntryPoint) -> str:
    return f"{entry.value} of {package(entry)}"


def fields(options: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield every option, those of nested sections below them: dotted name, type, default, line."""
    for name, field in options.model_fields.items():
        inner = model_in(field.annotation)
        line = " ".join((described(options, name) or (_sentence(inner) if inner else "")).replace("``", "").split())
        default = "" if inner and isinstance(field.default, BaseModel) else _default(field)
        yield f"{prefix}{name}", _type(field), default, line
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


def example(kind: str, name: str) -> str:
    """Return YAML with the name, what it needs, and its defaults."""
    of = kinds()[kind]
    key, options = of.registry.key, of.registry[name].options
    given: dict[str, Any] = {}
    for option, field in options.model_fields.items():
        if field.is_required():
            given[option] = _made_up(field)
        elif field.default is not None and isinstance(field.default, int | float | str):
            given[option] = field.default
    said = {key: name, **_completed(given, options)}
    value: Any = [said] if of.listed else said
    section = of.section
    if options is Delta:  # which is for the other way, and wants something behind it
        section, value = "transforms.down", [said, "bf16"]
    return _yaml(section, value)


def _yaml(section: str, value: Any) -> str:
    """Return YAML of a section."""
    for part in reversed(section.split(".")):
        value = {part: value}
    return dump(value, default_flow_style=False, allow_unicode=True).rstrip()


def _completed(given: dict[str, Any], options: type[BaseModel]) -> dict[str, Any]:
    """Return what is given, with one option more where a name wants one of several, such as a share or a number."""
    fields = {k: f for k, f in options.model_fields.items() if not f.is_required() and not f.default}
    for more in ({}, *({k: _made_up(f)} for k, f in fields.items())):
        with suppress(ValidationError):
            options.model_validate({**given, **more})
            return {**given, **more}
    return given


def _sentence(options: type[BaseModel]) -> str:
    own = options.__doc__ or ""
    return " ".join(own.replace("``", "").split()) if own and options.__doc__ != BaseModel.__doc__ else ""


def _type(field: FieldInfo) -> str:
    bounds = _bounds(field.metadata)
    text = _told(field.annotation)
    return f"{text} {bounds}" if bounds else text


def _bounds(metadata: Any) -> str:
    result = []
    for each in metadata:
        if type(each) in BOUNDS:
            sign, attribute = BOUNDS[type(each)]
            result.append(f"{sign} {getattr(each, attribute)}")
        elif isinstance(each, FieldInfo):
            result.append(_bounds(each.metadata))
    return ", ".join(filter(None, result))


def _told(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if annotation is Any:  # a section that names a part
        return "mapping"
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_told, args))
    if hasattr(annotation, "__metadata__"):
        bounds = _bounds(annotation.__metadata__)
        return _told(annotation.__origin__) + (f" {bounds}" if bounds else "")
    if origin is list:
        return f"list of {_told(args[0])}"
    if origin is tuple:
        return f"list of {' and '.join(_told(a) for a in args if a is not ...)}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type):
        names = {int: "integer", float: "number", str: "text", bool: "true | false"}
        return names.get(annotation, "mapping" if issubclass(annotation, dict | BaseModel) else annotation.__name__)
    return str(annotation)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "to be given"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "null"
    named = section(field.annotation, field.metadata)
    if named is not None and isinstance(value, BaseModel):
        return named.registry.name_of(value)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}"


def _made_up(field: FieldInfo) -> Any:
    """Return a value of a required option's kind."""
    if field.examples:
        return field.examples[0]
    told = _told(field.annotation)
    section = model_in(field.annotation)
    if told.startswith("list"):
        of = get_args(field.annotation) or ("",)
        return [_made_up_section(section)] if section else ["…" if "text" in _told(of[0]) else 1]
    if section is not None:
        return _made_up_section(section)
    bounds = dict.fromkeys(("ge", "gt"), None)
    for each in field.metadata:
        for name in bounds:
            bounds[name] = getattr(each, name, bounds[name])
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)[0]
    if "text" in told:
        return "…"
    least = max((b for b in bounds.values() if b is not None), default=0)
    most = [getattr(m, n) for m in field.metadata for n in ("le", "lt") if getattr(m, n, None) is not None]
    return 1 if "integer" in told or not most or min(most) > 1 else (least + min(most)) / 2


def _made_up_section(section: type[BaseModel]) -> dict[str, Any]:
    return {k: _made_up(f) for k, f in section.model_fields.items() if f.is_required()}
