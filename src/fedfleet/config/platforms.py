"""Parts that some systems lack: Ray, and several runs at a time. Tests run on Linux."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fedfleet.simulator.errors import ConfigError


def without_ray() -> str | None:
    """Return why this system has no Ray to run clients on; None where it has."""
    if sys.platform == "win32":
        return "it is used on Linux and macOS, and this is Windows"
    return None if find_spec("ray") else "it is not installed here"


def check_ray(key: str) -> None:
    """Refuse what a key asks of Ray where there is none. Raises ConfigError."""
    if (why := without_ray()) is not None:
        raise ConfigError(f"{key}: it needs Ray; {why}: set executor.kind=local, and for several runs jobs to 1")
