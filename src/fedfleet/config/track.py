"""Where a run is entered besides its folder: how trackers are written."""

from __future__ import annotations

from typing import Any

from fedfleet.config.checking import unknown, validated
from fedfleet.config.reading import show
from fedfleet.simulator.errors import ConfigError
from fedfleet.tracking.registry import TRACKERS


def tracked(raw: dict[str, Any]) -> None:
    """Check the trackers of a configuration, names or mappings of a name and its options, or one alone; fill in defaults.

    Raises ConfigError.
    """
    given = raw.get("track")
    if given is None:
        raw.pop("track", None)
        return
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given if isinstance(given, list) else [given]):
        key = f"track[{i}]" if isinstance(given, list) else "track"
        said = {"name": item} if isinstance(item, str) else item
        if not isinstance(said, dict) or "name" not in said:
            raise ConfigError(
                f"{key}={show(item)}: give a name, such as tensorboard, or a mapping of that and its options"
            )
        name = said["name"]
        if not isinstance(name, str) or name not in TRACKERS:
            raise ConfigError(unknown(f"{key}.name", name, TRACKERS))
        if any(name == other["name"] for other in found):
            raise ConfigError(f"{key}.name={name!r}: it is there already: give each tracker once")
        options = validated(TRACKERS[name].options, {k: v for k, v in said.items() if k != "name"}, f"{key}.")
        found.append({"name": name, **options.model_dump(mode="json")})
    raw["track"] = found
