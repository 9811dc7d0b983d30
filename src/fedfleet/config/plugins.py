"""Plugins: code of authors that a configuration names, found by its path, called, checked, and told by a digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions, version
from typing import Any, NamedTuple

from pydantic import BaseModel
from torch import Tensor

from fedfleet.config import schema as C
from fedfleet.config.checking import validated
from fedfleet.config.schema import Config
from fedfleet.simulator import named
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.block.side_effects import Impure
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line, show
from fedfleet.simulator.registry import ByPath, ByPathWithOptions, Options, Registry, package

OUTSIDE = [key for key, of in C.SECTIONS.items() if of.registry.group is not None]
"""Sections whose part may be an author's own."""

OPTIONS = "options"
"""The parameter by which a function takes options at the keys of its section: their class is its annotation."""


class Place(NamedTuple):
    """Where a configuration names an author's own: the section, the place in it if it is a list, and what is said there."""

    section: str
    number: int | None
    part: ByPath

    @property
    def registry(self) -> Registry[Any]:
        """Return the registry of the section."""
        return C.SECTIONS[self.section].registry

    @property
    def at(self) -> str:
        """Return what messages call it."""
        return self.section if self.number is None else f"{self.section}[{self.number}]"

    @property
    def key(self) -> str:
        """Return the key of the name."""
        return self.registry.key

    @property
    def name(self) -> str:
        """Return what it is named by."""
        return self.registry.name_of(self.part)

    def found(self, code_dir: str | None) -> Callable[..., Any]:
        """Return the function or class that is named. Raises ConfigError."""
        return named.found(f"{self.at}.{self.key}", self.registry.path_of(self.part), code_dir)


def place(config: Config, section: str, index: int | None = None) -> Place | None:
    """Return what a section, or an item of a list of them, names of an author's own; None where it names something else."""
    part = C.at(config, section) if index is None else C.at(config, section)[index]
    return Place(section, index, part) if isinstance(part, ByPath) else None


def places(config: Config, sections: Iterable[str] | None = None) -> Iterator[Place]:
    """Yield all that sections of a configuration name of an author's own; those of all sections if none are given."""
    for section in OUTSIDE if sections is None else sections:
        indices = range(len(C.at(config, section))) if C.SECTIONS[section].listed else (None,)
        yield from filter(None, (place(config, section, index) for index in indices))


def made(config: Config, of: Place, check: Callable[[Any], Mapping[str, Tensor] | None], **offered: Any) -> Any:
    """Return what is made of the arguments at a place, told what else it names of what is ``offered``.

    ``check`` raises ConfigError or Impure for what will not do; what it returns has to be the same of another one made alike.
    Raises ConfigError.
    """
    said = f"{of.at}.{of.key}={of.name!r}"
    make = of.found(config.code_dir)

    def one() -> Any:
        try:
            return named.called(said, f"{of.at}.arguments", make, of.part.arguments or {}, **offered)
        except FedfleetError:
            raise
        except Exception as e:
            raise ConfigError(
                f"{said}: it raised {type(e).__name__} ({one_line(e)}): mend it, or give it other arguments"
            ) from e

    if (result := one()) is None:
        raise ConfigError(f"{said}: it returns None: end it with `return` of what it makes")
    try:
        told = check(result)
        if told is not None and digest("", told) != digest("", check(one()) or {}):
            raise Impure(
                "two that are made of one seed say different things: draw from the key or the seed that it is offered"
            )
    except (ConfigError, Impure) as e:
        raise ConfigError(f"{said}: what it returns will not do: {e}") from None
    except Exception as e:
        raise ConfigError(
            f"{said}: what it returns fails where it is tried ({type(e).__name__}: {one_line(e)}): mend it"
        ) from e
    return result


def typed(config: Config) -> Config:
    """Return the configuration with the options of an author's functions as the class that each names for them has them.

    A function names it as the annotation of its parameter ``options``. Raises ConfigError.
    """
    for here in places(config, (key for key in OUTSIDE if C.SECTIONS[key].registry.usual is not None)):
        if isinstance(here.part, ByPathWithOptions):  # else that is done
            config = C.replaced(config, here.section, _typed(here, here.found(config.code_dir), config.rounds))
    return config


def offered(of: Place) -> dict[str, Any]:
    """Return what a function is offered of the options at its place: ``options``, where it takes any."""
    options = type(of.part).__bases__[0]
    if issubclass(options, ByPath):
        return {}
    values = {key: getattr(of.part, key) for key in options.model_fields}
    return {OPTIONS: options.model_construct(of.part.model_fields_set & values.keys(), **values)}


def unused(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield the options, dotted, that were given for another name, and the name that stands there now and has none of them.

    Raises ConfigError where its code is not found.
    """
    for here in places(config):
        if isinstance(here.part, ByPathWithOptions) and here.part.inherited:
            takes = options_class(here, here.found(config.code_dir))
            known = () if takes is None else takes.model_fields
            if lost := [f"{here.at}.{key}" for key in here.part.inherited if key not in known]:
                yield lost, here.name


def _typed(of: Place, make: Callable[..., Any], rounds: int) -> BaseModel:
    """Return the section at a place with the options that a function takes, checked. Raises ConfigError."""
    part: Any = of.part
    takes, said = options_class(of, make), part.model_dump(mode="json", exclude_unset=True, exclude={"inherited"})
    kind = of.registry.outside_with(takes)
    if takes is None:
        for key in part.model_extra or {}:
            if (value := said.pop(key)) is not None:
                raise ConfigError(f"{of.at}.{key}={show(value)}: {_takes_none(of, make, key)}")
        return kind(**said)
    usual: Any = of.registry.usual
    for key in said.keys() - kind.model_fields.keys():
        if key in usual.model_fields:
            having = next(c for c in reversed(usual.__mro__) if key in getattr(c, "model_fields", ()))
            raise ConfigError(
                f"{of.at}.{key}={show(said[key])}: {_name(make)} takes {takes.__name__}, which has no option {key!r}: leave it "
                f"out, or {_gained(takes, having)} (fedfleet.author)"
            )
    taken = {key: value for key, value in (part.inherited or {}).items() if key in takes.model_fields}
    return validated(kind, {**taken, **said}, {"rounds": rounds}, at=of.section)


def options_of(make: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the class of options that a function takes, by the annotation of its parameter ``options``; None for none."""
    result = named.annotated(make, OPTIONS)
    return result if isinstance(result, type) and issubclass(result, Options) else None


def options_class(of: Place, make: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the class of options that the function at a place takes, if that will do; None for none. Raises ConfigError."""
    if of.registry.usual is None:
        return None
    result, said = options_of(make), f"{of.at}.{of.key}={of.name!r}: {_name(make)}"
    if result is None:
        _check_annotated(of, make, said)
        return None
    if OPTIONS in (of.part.arguments or {}):
        raise ConfigError(
            f"{of.at}.arguments.{OPTIONS}: {_name(make)} takes its options at keys such as {of.at}.lr: leave it out"
        )
    if taken := result.model_fields.keys() & {of.key, *ByPathWithOptions.model_fields}:
        raise ConfigError(
            f"{said}: {result.__name__} has an option {min(taken)!r}, a key of {of.at}: call it otherwise"
        )
    return result


def _check_annotated(of: Place, make: Callable[..., Any], said: str) -> None:
    """Refuse a parameter ``options`` that nobody gives, and whose class is not known. Raises ConfigError."""
    parameter, text = named.parameters(make).get(OPTIONS), named.annotated(make, OPTIONS)
    if parameter is None or parameter.default is not parameter.empty or OPTIONS in (of.part.arguments or {}):
        return
    if text is None or isinstance(text, str):
        wrong = "has no annotation" if text is None else f"is annotated {text!r}, which its module does not have"
        raise ConfigError(
            f"{said}: its parameter options {wrong}: import LocalOptions of fedfleet.author, and annotate it"
        )


def _gained(takes: type[BaseModel], having: type[BaseModel]) -> str:
    """Say how a function that takes one class comes by the options of another."""
    own = not takes.__module__.startswith("fedfleet.")
    return f"derive {takes.__name__} from {having.__name__}" if own else f"let it take {having.__name__}"


def _takes_none(of: Place, make: Callable[..., Any], key: str) -> str:
    if key in named.parameters(make):
        return f"{_name(make)} takes it among its arguments: write {of.at}.arguments.{key}"
    return (
        f"{_name(make)} takes no options: leave it out, or let it take some, as options: LocalOptions (fedfleet.author)"
    )


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)


def package_of(of: Place, make: Callable[..., Any]) -> str | None:
    """Return the installed package, and its version, that a place's code is of; None for a module that lies about."""
    entry = None if named.is_path(of.name) else of.registry.entry(of.name)
    if entry is not None:
        return package(entry)
    if named.home(make) is not None:
        return None
    top = of.registry.path_of(of.part).partition(":")[0].partition(".")[0]
    result = packages_distributions().get(top, ())
    return f"{result[0]} {version(result[0])}" if result else None


def recorded(config: Config, of: Place, **about: str | None) -> Config:
    """Return the configuration with what a run says at a place of its code. Raises ConfigError where it was given as another."""
    for key, value in about.items():
        before = getattr(of.part, key)
        if of.section != "callbacks" and before not in (None, value):
            raise ConfigError(
                f"{of.at}.{key}={show(before)}: the code of {of.name} is other by now ({value}): bring back what it was, or "
                f"leave this out in a new run"
            )
    part: Any = of.part.model_copy(update=about)
    if of.number is not None:
        whole = C.at(config, of.section)
        part = [*whole[: of.number], part, *whole[of.number + 1 :]]
    return C.replaced(config, of.section, part)
