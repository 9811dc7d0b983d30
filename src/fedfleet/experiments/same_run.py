"""Tell whether two configurations are those of one run: the keys that decide what it computes are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedfleet.config.schema import Config
from fedfleet.files.documents import leaves
from fedfleet.simulator.errors import ConfigError, show

WHERE = (
    *("max_seconds", "checkpoint", "track"),
    *(
        f"executor.{key}"
        for key in (
            "kind",
            "actors",
            "cpus_per_actor",
            "gpus_per_actor",
            "address",
            "allow_differences",
            "node_silence_s",
            "memory_per_actor_gb",
        )
    ),
)
"""Keys, or sections, that decide nothing of what comes out, but where it is computed and for how long."""
STOPS = ("until", "max_seconds", "stop_if_diverged", "patience", "callbacks")
"""Keys that end a run before its last round."""
MAY_CHANGE = tuple(
    dict.fromkeys((*WHERE, "rounds", *STOPS, "label", "population.data_dir", "code_dir", "cohort.attempts"))
)
"""Those that may be another when a run goes on: none of them decides what a round computes."""


def decisive(config: Config) -> dict[str, Any]:
    """Return what of a resolved configuration decides what a round computes; what was made in Python is on record elsewhere."""
    result = without(config.model_dump(mode="json"), MAY_CHANGE)
    return {
        key: value for key, value in leaves(result) if ".own." not in f".{key}." and not key.startswith("warm_start")
    }


def check_unchanged(folder: Path, was: Mapping[str, Any], config: Config) -> None:
    """Refuse a configuration that decides otherwise than that of a checkpoint, as a damaged or edited file does.

    Keys that one of them has not, for it is of another release, are let be. Raises ConfigError.
    """
    now = decisive(config)
    for key, before, after in differences(was, now):
        if key in was and key in now:
            raise ConfigError(
                f"{folder / 'config.yaml'}: {key}={show(after)}, and the run's checkpoint was made with {show(before)}: bring "
                f"the file back as it was, or start a new run"
            )


def without(config: Mapping[str, Any], keys: Iterable[str], at: str = "") -> dict[str, Any]:
    """Return a resolved configuration without some dotted keys."""
    result = {k: v for k, v in config.items() if f"{at}{k}" not in keys}
    return {k: without(v, keys, f"{at}{k}.") if isinstance(v, Mapping) else v for k, v in result.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys at which two configurations differ, and what each has there; None where it has nothing."""
    one, two = dict(leaves(old)), dict(leaves(new))
    for key in sorted(one.keys() | two.keys()):
        if one.get(key) != two.get(key):
            yield key, one.get(key), two.get(key)
