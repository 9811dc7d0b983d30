"""The first stage: the data set, read and parted, and what was given in Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fedfleet.assembly import user_parts
from fedfleet.config import resolve, root
from fedfleet.config import schema as C
from fedfleet.config.plugins import typed
from fedfleet.config.population import Data, load_data, parted, with_digests
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.simulator.population import Population
from fedfleet.simulator.registry import MadeInPython


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration and its data.

    Attributes:
        config: with digests of the data, and of what was given in Python instead of named.
        given, own: what was given in Python, and what the record says of it.
        data: what clients are dealt, or the clients.
        validation: examples that clients do not learn from; None without.
        root: the server's own examples, as those of one client; None without.
        train: the training examples of a published data set, which some tasks make ready with.

    """

    config: Config
    given: user_parts.Own
    own: dict[str, dict[str, Any]]
    data: Data
    validation: Examples | None
    root: Population | None
    train: Examples | None

    @property
    def label(self) -> str:
        """Return the run's name in reports."""
        return self.config.label or self.config.algorithm.name


def load(config: Config, given: user_parts.Own, read: Data | None = None) -> Loaded:
    """Return a configuration with its data; ``read`` is the configured data set, if it has been. Raises ConfigError, DataError."""
    resolve.check_early(config)
    user_parts.check_unused(config, given)
    told = given.describe()
    for section, (name, *_) in C.OWN.items():
        if name in told:
            config = C.replaced(config, section, MadeInPython(own=told[name]))
    config = typed(config)
    data = given.clients or read or load_data(config)
    config = with_digests(config, data)
    data, validation = parted(config, data)
    data, of_server = root.parted(config, data)
    published = given.data if "data" in told else data
    train = published.train if isinstance(published, Dataset) else None
    return Loaded(config=config, given=given, own=told, data=data, validation=validation, root=of_server, train=train)


def so_far(x: Loaded, **changed: Any) -> dict[str, Any]:
    """Return the fields of a stage, some of them changed, for the next one."""
    return {**{field.name: getattr(x, field.name) for field in fields(x)}, **changed}
