"""Read YAML, overrides and Python mappings as plain data: nested dicts and lists of text, numbers, booleans and None."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from fedfleet.config import shipped
from fedfleet.files.documents import CONTROL, YAML_BYTES, check_text, is_there, parse, text_of
from fedfleet.simulator.errors import ConfigError, one_line, show
from fedfleet.simulator.plain_text import OtherEncoding

DEEPEST = 16  # dots in a key


def read(path: Path) -> Mapping[str, Any]:
    """Read a YAML file. Raises ConfigError."""
    try:
        text = text_of(path, YAML_BYTES)
    except OtherEncoding as e:
        raise ConfigError(f"{path}: {e}") from None
    except FileNotFoundError:
        near = shipped.like(path)
        hint = f"did you mean {near!r}, which comes with the package? " if near else ""
        raise ConfigError(
            f"{path}: no such configuration file: {hint}give the path of a YAML file, or a name that `fedfleet configs` lists"
        ) from None
    except (OSError, ValueError) as e:
        if isinstance(e, IsADirectoryError) and (path / "config.yaml").exists():
            fix = "open it by fedfleet.open_run, or give the config.yaml in it"
            raise ConfigError(f"{path}: the folder of a run: {fix}") from None
        raise ConfigError(f"{path}: cannot be read ({one_line(e)}): give the path of a YAML file") from None
    try:
        check_text(text)
    except ValueError as e:
        fix = "bring back the file that was written, or remove the line of the digest if you have changed it"
        raise ConfigError(f"{path}: damaged or changed: {e}: {fix}") from None
    try:
        result = parse(text)
    except ValueError as e:
        raise ConfigError(f"{path}: not valid YAML: {e}: mend it there") from None
    if not isinstance(result, dict | None):
        raise ConfigError(f"{path}: a {type(result).__name__}: a configuration is a mapping of keys to values")
    return result or {}


def _resume(folder: Path) -> str:
    is_run = folder.is_dir() and (folder / "config.yaml").exists()
    return f"; the run in it goes on by `fedfleet resume {folder}`, or fedfleet.resume" if is_run else ""


def check_free(folder: Path) -> None:
    """Refuse a run folder that is taken or cannot be made. Raises ConfigError; makes nothing."""
    try:
        if "\0" in str(folder):
            raise ValueError("the character NUL")
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder}: it is a file: give a folder that is new or empty")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: it exists and is not empty: choose another folder, or remove it first{_resume(folder)}"
            )
        above = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: {above} is not a folder you may write to: choose another folder")
    except (OSError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{folder}: cannot be used ({one_line(e)}): choose another folder") from None


def check_there(folder: Path, *names: str) -> None:
    """Refuse a folder with none of these files of a run. Raises ConfigError."""
    if not is_there(folder):
        raise ConfigError(f"{folder}: no such folder: give the folder of a run")
    if not any(is_there(folder / name) for name in names):
        of_study = is_there(folder / "study.json")
        fix = "a study: the `fedfleet study` that began it goes on with it" if of_study else "give the folder of a run"
        raise ConfigError(f"{folder}: no {names[0]} there: {fix}")


def override(text: str) -> dict[str, Any]:
    """Read ``dotted.key=value``. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{show(text)}: an override is written dotted.key=value")
    try:
        return {key.strip(): parse(value)}
    except ValueError:
        raise ConfigError(f"{show(text)}: the value is not valid YAML: quote it") from None


def plain(value: Any, key: str = "") -> Any:
    """Copy a value as plain data. Refuses what no key can take: endless nesting, infinities, numbers beyond 64 bits, objects."""
    if key.count(".") > DEEPEST:
        raise ConfigError(f"{key[:60]}...: nested more than {DEEPEST} deep: remove what refers to itself")
    match value:
        case Mapping():
            return {_key(k, key): plain(v, f"{key}.{k}" if key else f"{k}") for k, v in value.items()}
        case list() | tuple():
            return [plain(v, f"{key}.{i}") for i, v in enumerate(value)]
        case None | bool():
            return value
        case Integral():
            if abs(int(value)) >= 2**63:
                raise ConfigError(f"{key}={show(value)}: too large: give a number below 2^63")
            return int(value)
        case Real():
            if not math.isfinite(value):
                raise ConfigError(f"{key}={value}: give a finite number")
            return float(value)
        case str() | PurePath():
            if "\0" in str(value):
                raise ConfigError(
                    f"{key}={show(str(value))}: text with the character NUL, which no path has: leave it out"
                )
            if CONTROL.search(str(value)):
                raise ConfigError(f"{key}={show(str(value))}: text with a control character: leave it out")
            try:
                str(value).encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{key}={show(str(value))}: text with half a character: mend it") from None
            return str(value)
        case _:
            raise ConfigError(
                f"{key}={show(value)}: a {type(value).__name__}: give a number, text, a list or a mapping"
            )


def _key(key: Any, where: str) -> str:
    if isinstance(key, bool) or not isinstance(key, str | Real) or not f"{key}".strip() or not f"{key}".isprintable():
        raise ConfigError(f"{where + '.' if where else ''}{show(key)}: not a key: give it as plain text, in quotes")
    return f"{key}"
