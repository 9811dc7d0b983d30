"""Registries: what a configuration can name, and the typed section that comes of a name.

A section such as ``algorithm: {name: fedprox, mu: 0.1}`` is a member of a discriminated union over one registry. Members are

- the options of a row, with the name as their first field;
- `ByPath`, code that is named as ``module:name`` or by an installed package;
- `MadeInPython`, where `fedfleet.run` was given an object.

A registry stands in an annotation, ``algorithm: Annotated[Any, ALGORITHMS]``, and pydantic asks it for the rest.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, create_model
from pydantic_core import PydanticCustomError, core_schema

from fedfleet.simulator.named import PATH, is_path

Build = TypeVar("Build")
YEAR = re.compile(r"\b(19|20)\d\d\b|arXiv")


class Options(BaseModel):
    """A section of a configuration: unknown keys are errors, values are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ByPath(Options):
    """What is named as ``module:name``, or by a package that is installed: a function or class that makes one."""

    arguments: dict[str, Any] | None = None
    """What it is called with."""
    source: str | None = None
    """Digest of its code; a run says here what it was."""
    version: str | None = None
    """The installed package that it is of, and its version; a run says here what it was."""


class ByPathWithOptions(ByPath):
    """Code whose function may take options at the keys of its section: which ones is known once the code is found."""

    model_config = ConfigDict(extra="allow")

    inherited: dict[str, Any] | None = None
    """Options given for another name, which an override then changed. The function gets those that it takes."""


class MadeInPython(Options):
    """What an object was that `fedfleet.run` was given in the place of a section."""

    own: dict[str, Any]
    """Its description: ``name``, ``digest`` and so on."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.own["name"]


def _itself(options: Any, *_: Any) -> Any:
    return options


ITSELF: Any = _itself
"""The ``build`` of options that are the part, too."""


class Entry(NamedTuple, Generic[Build]):
    """A row of a registry: its options, the function that builds the part from them, and a line for ``fedfleet list``."""

    options: type[BaseModel]
    build: Build = ITSELF
    about: str = ""
    description: str = ""
    """What ``fedfleet show`` prints below: formulas and citation; those of its module if not given."""

    @property
    def source(self) -> str:
        """Formulas and citation: its description, or what its module says of it; nothing where that cites nothing."""
        if self.description:
            return self.description
        apart = self.build is ITSELF or "<" in getattr(self.build, "__qualname__", "<")  # a lambda
        of: Any = self.options if apart else self.build
        text = inspect.getdoc(sys.modules[of.__module__]) or ""
        return text if YEAR.search(text) else ""


class Registry(Mapping[str, Entry[Build]]):
    """The parts of one kind by name, and the type of a section that names one.

    Args:
        kind: what ``fedfleet show`` calls them, such as "algorithm".
        rows: an entry a name.
        key: the key that holds the name.
        default: the name where none is given; None if one has to be.
        group: the entry points by which packages add names. None: code outside of fedfleet is no member.
        by_path: the options of such code.
        usual: options that functions of such code usually take at the keys of the section. None: they have ``arguments`` alone.
        given: arguments of ``fedfleet.run`` that take the place of the section.
        elsewhere: names that other programs use, and what to write here.

    """

    def __init__(
        self,
        kind: str,
        rows: dict[str, Entry[Build]],
        *,
        key: Literal["name", "kind"] = "kind",
        default: str | None = None,
        group: str | None = None,
        by_path: type[ByPath] = ByPath,
        usual: type[BaseModel] | None = None,
        given: tuple[str, ...] = (),
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.key, self.default, self.group, self.given = kind, key, default, group, given
        self.rows, self._by_path, self.elsewhere = rows, by_path, dict(elsewhere or {})
        self.usual = usual

    def __getitem__(self, name: str) -> Entry[Build]:
        return self.rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __hash__(self) -> int:  # annotations have to be hashable
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def about(self, name: str) -> str:
        """Return a line on a row: its own, or what its options say of themselves."""
        return self[name].about or " ".join((self[name].options.__doc__ or "").replace("``", "").split())

    def make(self, name: str | None = None, **options: Any) -> Any:
        """Return a section. Raises pydantic's ValidationError."""
        return self.type_of(name or self.default)(**options)

    def name_of(self, part: Any) -> str:
        """Return the name in a section."""
        return part.name if isinstance(part, MadeInPython) else getattr(part, self.key)

    def build(self, part: BaseModel, *context: Any) -> Any:
        """Return what is built of a section that is of a row."""
        build: Any = self[self.name_of(part)].build
        return build(part, *context)

    def packaged(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        """Return the names that installed packages add, and for each all who have it."""
        return {} if self.group is None else _packaged(self.group)

    def entry(self, name: str) -> EntryPoint | None:
        """Return the entry point of a name that a package adds; None for others."""
        return None if name in self else next(iter(self.packaged().get(name, ())), None)

    def path_of(self, part: ByPath) -> str:
        """Return the ``module:name`` of code outside of fedfleet."""
        name = self.name_of(part)
        result = None if is_path(name) else self.entry(name)
        return name if result is None else result.value

    def known(self) -> list[str]:
        """Return every name, those of packages last."""
        return list(dict.fromkeys([*self, *self.packaged()]))

    def unclear(self, name: str) -> str | None:
        """Say who else has a name, and how to get out of that; None where it is clear."""
        several = self.packaged().get(name, ())
        if several and name in self:
            return (
                f"{package(several[0])} names one of its own as the built-in one is called: uninstall it, or name it by "
                f"{several[0].value}"
            )
        if len(several) > 1:
            return f"{' and '.join(sorted(map(package, several)))} both have that name: uninstall one of them"
        return None

    def find(self, name: Any) -> type[BaseModel] | None:
        """Return the type of a section with a name; None where nothing is called so, or several are."""
        if not isinstance(name, str) or self.unclear(name) is not None:
            return None
        if name in self:
            return _member(f"{self.kind}_{name}", self[name].options, self.key, name)
        return self.outside if self.group is not None and (is_path(name) or name in self.packaged()) else None

    def type_of(self, name: Any) -> type[BaseModel]:
        """Return the type of a section with a name. Raises pydantic's ValidationError."""
        if (result := self.find(name)) is None:
            raise refused(self.unknown(name), name, self.key)
        return result

    @cached_property
    def outside(self) -> type[BaseModel]:
        """The type of a section that names code outside of fedfleet."""
        by_path = self._by_path if self.usual is None else ByPathWithOptions
        return _member(f"{self.kind}_outside", by_path, self.key, None)

    def outside_with(self, options: type[BaseModel] | None) -> type[BaseModel]:
        """Return the type of such a section whose function takes these options, or none."""
        bases = self._by_path if options is None else (options, self._by_path)
        return _member(f"{self.kind}_outside", bases, self.key, None)

    def unknown(self, name: Any) -> str:
        """Say why there is nothing of this name, and what there is."""
        if isinstance(name, str) and (wrong := self.unclear(name)) is not None:
            return wrong
        if (here := self.elsewhere.get(str(name).lower())) is not None:
            return f"here it is {here}"
        return choices(name, self.known()) if self.known() else "give module:name"

    def _validated(self, given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, BaseModel):
            return given
        said = {} if given is None else {self.key: given} if isinstance(given, str) else given
        if not isinstance(said, dict):
            raise refused(f"give a name, or a mapping with the key {self.key!r}", given)
        if self.given and "own" in said:
            if info.context and not info.context.get("lost", True):
                return MadeInPython.model_validate(said)
            raise self._lost(said["own"])
        if self.default is None and self.key not in said:
            raise refused(f"give a name, as {self.key}", given)
        kind = self.type_of(said.get(self.key, self.default))
        # As JSON, of which alone pydantic takes no text for a number and no 0 for false, but lists for tuples.
        return kind.__pydantic_validator__.validate_json(json.dumps(said), strict=True, context=info.context)

    def _lost(self, own: Any) -> ValidationError:
        made = own if isinstance(own, dict) else {"name": own}
        parts = ", ".join(f"{part}=…" for part in made.get("given") or self.given[:1])
        return refused(
            f"made in Python, which no file brings back: give it to fedfleet.run as {parts}, or go on with its run by "
            f"fedfleet.resume(RUN, {parts})",
            made.get("name"),
            "own",
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Tell editors of each name, alone or in a mapping with its options, and what it is."""
        path: dict[str, Any] = {
            "type": "string",
            "pattern": f"^{PATH.pattern}$",
            "description": "module:name, of your own",
        }
        if installed := [name for name in self.packaged() if name not in self]:
            path = {"anyOf": [path, {"enum": installed, "description": "of an installed package"}]}
        names = {name: {"const": name, "description": self.about(name)} for name in self}
        members = {name: _member(f"{self.kind}_{name}", self[name].options, self.key, name) for name in self}
        if self.group is not None:
            names[""], members[""] = path, self.outside
        mappings = []
        for name, member in members.items():
            mappings.append(handler(_defined_once(member)))
            said = handler.resolve_ref_schema(mappings[-1])
            said["properties"][self.key] = names[name]
            if name:
                said |= {"title": name, "description": self.about(name)}
            elif self.usual is not None:
                usual = handler.resolve_ref_schema(handler(_defined_once(self.usual)))
                said["properties"] |= usual["properties"]
                del said["properties"]["inherited"]  # which overrides alone make
            if name != self.default:  # which stands for itself where no name is given
                said["required"] = list(dict.fromkeys([self.key, *said.get("required", [])]))
        empty = [{"type": "null"}] if self.default is not None else []
        return {"anyOf": [*names.values(), *mappings, *empty]}


def _defined_once(model: type[BaseModel]) -> core_schema.CoreSchema:
    """Return the schema of a model as a reference, or it would be written out wherever it may stand."""
    whole: Any = model.__pydantic_core_schema__
    if whole["type"] == "definitions":  # which has one already
        return whole
    whole = {**whole, "ref": f"{model.__name__}:{id(model)}"}
    return core_schema.definitions_schema(core_schema.definition_reference_schema(whole["ref"]), [whole])


def package(entry: EntryPoint) -> str:
    """Return the package that an entry point is of, and its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package without a name"


MANY = 24
"""Names that a message lists at most."""


def choices(value: Any, known: Iterable[str]) -> str:
    """Say that a value is none of those known, which ones it resembles, and which there are, unless they are many."""
    known = list(known)
    near = difflib.get_close_matches(value, known, n=3, cutoff=0.4) if isinstance(value, str) else []
    if len(known) <= MANY:
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown; {hint}choose one of {', '.join(known)}"
    if near:
        others = f" or {', '.join(near[1:])}?" if near[1:] else ""
        return f"unknown; did you mean {near[0]!r}?{others} there are {len(known)} names"
    return f"unknown; choose one of {', '.join(known[:MANY])}, and {len(known) - MANY} more"


def refused(why: str, given: Any, *where: str | int) -> ValidationError:
    """Return the error of a value at a place below the one that is checked."""
    error = PydanticCustomError("refused", "{why}", {"why": why})
    return ValidationError.from_exception_data("part", [{"type": error, "loc": where, "input": given}])


@cache
def _packaged(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    result: dict[str, tuple[EntryPoint, ...]] = {}
    for each in entry_points(group=group):
        if each not in result.get(each.name, ()):
            result[each.name] = (*result.get(each.name, ()), each)
    return result


class _Member(BaseModel):
    """A member of a union. It is pickled as what it is made of, since no module has its class."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        *options, tag = type(self).__bases__
        key = next(iter(tag.__annotations__))
        named = type(self).model_fields[key]
        given = (type(self).__name__, tuple(options), key, None if named.is_required() else named.default)
        return _again, (given, self.__getstate__())


class _Name(_Member):
    name: str


class _Kind(_Member):
    kind: str


_TAGS = {"name": _Name, "kind": _Kind}


def _member(
    title: str, options: type[BaseModel] | tuple[type[BaseModel], ...], key: str, name: str | None
) -> type[BaseModel]:
    """Return options, of one class or several, with a name before them; with any name if it is None."""
    return _made(title, options if isinstance(options, tuple) else (options,), key, name)


@cache
def _made(title: str, options: tuple[type[BaseModel], ...], key: str, name: str | None) -> type[BaseModel]:
    of: Any = (Literal[name], name) if name is not None else (str, ...)
    first, bases = options[0], (*options, _TAGS[key])
    return create_model(title, __base__=bases, __module__=first.__module__, __doc__=first.__doc__, **{key: of})


def _again(given: tuple[Any, ...], state: Any) -> BaseModel:
    kind = _member(*given)
    result = kind.__new__(kind)
    result.__setstate__(state)
    return result
