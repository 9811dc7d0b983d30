"""What an author's own code makes of what a configuration says: found by its path, called, checked, told by a digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions, version
from typing import Any, NamedTuple

from torch import Tensor

from fedfleet.config import schema as C
from fedfleet.config.schema import Config
from fedfleet.simulator import named
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.block.purity import Impure
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line, show
from fedfleet.simulator.registry import ByPath, Registry, package

OUTSIDE = [key for key, of in C.SECTIONS.items() if of.registry.group is not None]
"""Sections whose part may be an author's own."""


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

    found = one()
    try:
        told = check(found)
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
    return found


def package_of(of: Place, make: Callable[..., Any]) -> str | None:
    """Return the installed package, and its version, that a place's code is of; None for a module that lies about."""
    entry = None if named.is_path(of.name) else of.registry.entry(of.name)
    if entry is not None:
        return package(entry)
    if named.home(make) is not None:
        return None
    top = of.registry.path_of(of.part).partition(":")[0].partition(".")[0]
    found = packages_distributions().get(top, ())
    return f"{found[0]} {version(found[0])}" if found else None


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
