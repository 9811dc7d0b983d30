"""Read files with alternatives: blocks between ``# --- name`` and ``# ---``, all but one commented out."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^# --- (\w+)\n(.*?)^# ---\n", re.M | re.S)


def blocks(path: Path) -> list[str]:
    """Return the names of the alternatives in a file."""
    return [found[1] for found in BLOCK.finditer(path.read_text(encoding="utf-8"))]


def with_block(path: Path, name: str | None) -> Any:
    """Return what a file says with one of its alternatives in force, or with none."""
    return copy.deepcopy(_read(path, name))


@cache
def _read(path: Path, name: str | None) -> Any:

    def text(found: re.Match[str]) -> str:
        lines = found[2].splitlines()
        if all(line.startswith("# ") for line in lines):
            lines = [line[2:] for line in lines]
        return "\n".join(lines) + "\n" if found[1] == name else ""

    return yaml.safe_load(BLOCK.sub(text, path.read_text(encoding="utf-8")))


def options_of_ray_start() -> set[str]:
    """Return the options that the ``ray start`` of this environment knows."""
    from ray.scripts.scripts import start

    return {option for parameter in start.params for option in parameter.opts}


def options_in(command: str) -> set[str]:
    """Return the long options in the part of a shell command from ``ray start`` on."""
    return set(re.findall(r"(?<!\S)--[a-z-]+", command.partition("ray start")[2]))
