"""Read YAML, overrides and Python mappings as plain data: nested dicts and lists of text, numbers, booleans and None."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

import yaml

from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.plain_text import OtherEncoding, decoded

DEEPEST = 16  # dots in a key
MOST = 100_000  # values of a configuration, each alias written out


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number, where YAML 1.1 wants 1.0e-3, and refuses what most readers would take for something else.

    Refused are a key given twice in one mapping, of which YAML keeps the last; numbers of base 60 (1:30) and 8 (010); and nesting
    far beyond any configuration. Mappings are merged (``<<``) as YAML's own page says (https://yaml.org/type/merge.html), which
    PyYAML does not where a merged mapping merges another: the first of several has the say, and a mapping's own keys before all.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node."""
        self.depth += 1
        if self.depth > 4 * DEEPEST:
            raise ValueError(f"nested more than {4 * DEEPEST} deep")
        found = super().compose_node(parent, index)
        self.depth -= 1
        return found

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put merged keys in the place of ``<<``; refuse a key that is given twice."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            name = "<<" if key.tag == MERGE else f"{self.construct_object(key, deep=True)}"
            if name in own:
                raise ValueError(f"key {name!r} is given twice, again in line {key.start_mark.line + 1}: keep one")
            own[name] = (key, value)
            for other in self._merged(value) if key.tag == MERGE else ():
                self.flatten_mapping(other)
                for pair in other.value:
                    merged.setdefault(f"{self.construct_object(pair[0], deep=True)}", pair)
        own = {name: pair for name, pair in own.items() if pair[0].tag != MERGE}
        node.value = [*({**merged, **own}).values()]

    def _merged(self, value: yaml.Node) -> list[yaml.MappingNode]:
        """Return the mappings that a value of ``<<`` is of. Raises ValueError."""
        found = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if wrong := [one for one in found if not isinstance(one, yaml.MappingNode)]:
            raise ValueError(f"<< merges mappings, and in line {wrong[0].start_mark.line + 1} there is none: give some")
        return found

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number in base 10, 2 or 16."""
        text = node.value
        if ":" in text or re.fullmatch(r"[-+]?0[\d_]+", text):
            meant = "in base 60" if ":" in text else "in base 8"
            raise ValueError(
                f"{text} is a number {meant} to YAML, in line {node.start_mark.line + 1}: quote it if it is text"
            )
        return self.construct_yaml_int(node) if node.tag == INTEGER else self.construct_yaml_float(node)


MERGE, INTEGER, FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))
for _tag in (INTEGER, FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str) -> Any:
    """Return the value in a YAML document. Raises ValueError, in one line, for one that cannot be read or is too large."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _expanded(node, {}) > MOST:
            raise ValueError(f"more than {MOST:,} values, each alias written out")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError) as e:  # ValueError: an impossible date or number
        raise ValueError(one_line(e)) from None
    except Exception as e:  # whatever pyyaml does where a tag and its value do not fit
        raise ValueError(f"a value that its tag does not fit ({one_line(e)})") from None


def _expanded(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """Return the number of values in a node, each alias written out: without end where it holds itself."""
    if node not in known:
        known[node] = math.inf  # until it is counted
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = isinstance(node, yaml.MappingNode)
        known[node] = 1 + sum(_expanded(n, known) for part in parts for n in (part if pairs else (part,)))
    return known[node]


def read(path: Path) -> Mapping[str, Any]:
    """Read a YAML file. Raises ConfigError."""
    try:
        text = decoded(path.read_bytes())
    except OtherEncoding as e:
        raise ConfigError(f"{path}: {e}") from None
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such configuration file: give the path of a YAML file, or a name that `fedfleet configs` lists"
        ) from None
    except (OSError, ValueError) as e:
        if isinstance(e, IsADirectoryError) and (path / "config.yaml").exists():
            mend = "open it by fedfleet.open_run, or give the config.yaml in it"
            raise ConfigError(f"{path}: the folder of a run: {mend}") from None
        raise ConfigError(f"{path}: cannot be read ({one_line(e)}): give the path of a YAML file") from None
    try:
        found = parse(text)
    except ValueError as e:
        raise ConfigError(f"{path}: not valid YAML: {e}: mend it there") from None
    if not isinstance(found, dict | None):
        raise ConfigError(f"{path}: a {type(found).__name__}: a configuration is a mapping of keys to values")
    return found or {}


def _resume(folder: Path) -> str:
    is_run = folder.is_dir() and (folder / "config.yaml").exists()
    return f"; the run in it goes on by `fedfleet resume {folder}`, or fedfleet.resume" if is_run else ""


def check_free(folder: Path) -> None:
    """Refuse a run folder that is taken or cannot be made. Raises ConfigError; makes nothing."""
    try:
        if "\0" in str(folder):
            raise ValueError("the character NUL")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"--out {folder}: it exists and is not empty: choose another folder, or remove it first{_resume(folder)}"
            )
        above = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {folder}: {above} is not a folder you may write to: choose another folder")
    except (OSError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"--out {folder}: cannot be used ({one_line(e)}): choose another folder") from None


def check_there(folder: Path, *names: str) -> None:
    """Refuse a folder with none of these files of a run. Raises ConfigError."""
    if not any((folder / name).exists() for name in names):
        raise ConfigError(f"{folder}: no {names[0]} there: give the folder of a run")


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
            return str(value).encode(errors="replace").decode()
        case _:
            raise ConfigError(
                f"{key}={show(value)}: a {type(value).__name__}: give a number, text, a list or a mapping"
            )


def _key(key: Any, where: str) -> str:
    if isinstance(key, bool) or not isinstance(key, str | Real) or not f"{key}".strip() or not f"{key}".isprintable():
        raise ConfigError(f"{where + '.' if where else ''}{show(key)}: not a key: give it as plain text, in quotes")
    return f"{key}"


def show(value: Any) -> str:
    """Return a value as it stands in a message: one line, not too long."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "..."
    return text if len(text) <= 80 else f"{text[:77]}..."
