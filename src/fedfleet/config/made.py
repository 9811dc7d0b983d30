"""What an author's own code makes of what a configuration says: found by its path, called, checked, told by a digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions, version
from typing import Any, NamedTuple

from torch import Tensor

from fedfleet.config import names
from fedfleet.config import schema as C
from fedfleet.config.names import BY_PATH, LISTS, NAMED, ByPath
from fedfleet.config.schema import Config
from fedfleet.simulator import named
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.block.purity import Impure
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line


class Place(NamedTuple):
    """Where a configuration names an author's own: the section, what messages call it, the key of the name, what is said there."""

    section: str
    at: str
    key: str
    said: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return what it is named by."""
        return self.said[self.key]

    @property
    def options(self) -> ByPath:
        """Return its typed options."""
        return BY_PATH[self.section].options.model_validate({k: v for k, v in self.said.items() if k != self.key})

    def found(self, code_dir: str | None) -> Callable[..., Any]:
        """Return the function or class that is named. Raises ConfigError."""
        return named.found(f"{self.at}.{self.key}", names.path_of(self.section, self.name), code_dir)


def place(config: Config, section: str, index: int | None = None) -> Place | None:
    """Return what a section, or an item of a list of them, names of an author's own; None where it names something else."""
    said: Any = C.as_said(config, section)
    said = said if index is None else said[index]
    at, key = (section, NAMED[section].key) if index is None else (f"{section}[{index}]", "name")
    name = said.get(key)
    kind = None if "own" in said else names.kind_of(section, names.built_in(section), name)
    return Place(section, at, key, said) if kind is not None and issubclass(kind, ByPath) else None


def places(config: Config, sections: Iterable[str] = tuple(BY_PATH)) -> Iterator[Place]:
    """Yield all that sections of a configuration name of an author's own."""
    for section in sections:
        indices = range(len(C.as_said(config, section))) if section in LISTS else (None,)
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
            return named.called(said, f"{of.at}.arguments", make, of.options.arguments or {}, **offered)
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
    entry = None if named.is_path(of.name) else names.entry(of.section, of.name)
    if entry is not None:
        return names.package(entry)
    if named.home(make) is not None:
        return None
    top = names.path_of(of.section, of.name).partition(":")[0].partition(".")[0]
    found = packages_distributions().get(top, ())
    return f"{found[0]} {version(found[0])}" if found else None


def recorded(config: Config, of: Place, **about: str | None) -> Config:
    """Return the configuration with what a run says at a place of its code. Raises ConfigError where it was given as another."""
    for key, value in about.items():
        before = of.said.get(key)
        if of.section != "callbacks" and before not in (None, value):
            raise ConfigError(
                f"{of.at}.{key}={C.show(before)}: the code of {of.name} is other by now ({value}): bring back what it was, or "
                f"leave this out in a new run"
            )
    said = {**of.said, **about}
    whole: Any = C.as_said(config, of.section)
    if of.section in LISTS:
        index = int(of.at.removeprefix(f"{of.section}[").removesuffix("]"))
        return C.replaced(config, of.section, [*whole[:index], said, *whole[index + 1 :]])
    return C.replaced(config, of.section, said)
