"""Read YAML and JSON that others may have written, within limits: of bytes, of depth, of values, and of regular files alone."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fedfleet.files.writing import check_regular
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.plain_text import decoded

DEEPEST = 64  # values within values
MOST = 100_000  # values of a YAML document, each alias written out
YAML_BYTES, TEXT_BYTES = 2 << 20, 1 << 30
"""The largest file that is read as YAML, and as anything else."""
MERGE, INTEGER, FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))


def text_of(path: Path, most: int = TEXT_BYTES) -> str:
    """Return the text of a regular file, read through links.

    Raises OSError for what is no regular file, is larger than ``most`` bytes, or cannot be read; ValueError for what is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes")
    return decoded(found)


def is_there(path: Path) -> bool:
    """Say whether there is a file or folder; a path that is too long, or cannot be looked at, is that of none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number, where YAML 1.1 wants 1.0e-3, and refuses what most readers would take for something else.

    Refused are a key given twice in one mapping, of which YAML keeps the last; numbers of base 60 (1:30) and 8 (010); and nesting
    and lengths far beyond any configuration. Mappings are merged (``<<``) as YAML's own page says (https://yaml.org/type/merge.html),
    which PyYAML does not where a merged mapping merges another: the first of several has the say, and a mapping's own keys before
    all.
    """

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node."""
        self.depth += 1
        self.count += 1
        if self.depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if self.count > MOST:
            raise ValueError(f"more than {MOST:,} values")
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
        found: list[Any] = value.value if isinstance(value, yaml.SequenceNode) else [value]
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


def parse_json(text: str) -> Any:
    """Return the value in a JSON document; halves of surrogate pairs in it become question marks.

    Raises ValueError, in one line, for one that cannot be read or is nested too deep.
    """
    try:
        return _plain(json.loads(text), 0)
    except (ValueError, RecursionError) as e:
        raise ValueError(one_line(e)) from None


def _plain(value: Any, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    match value:
        case dict():
            return {_plain(k, depth): _plain(v, depth + 1) for k, v in value.items()}
        case list():
            return [_plain(v, depth + 1) for v in value]
        case str():
            return value if value.isascii() else value.encode(errors="replace").decode()
    return value


def json_of(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises FileNotFoundError, and ConfigError for one that cannot be read or is no mapping."""
    try:
        found = parse_json(text_of(path))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not readable as JSON ({one_line(getattr(e, 'strerror', None) or e)})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not readable as JSON: a {type(found).__name__}, and it is to be a mapping")
    return found


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the mappings in a file of JSON lines, none where there is none; None for a line that is not one.

    A line may have been cut short where a process was killed. Raises OSError for what cannot be read.
    """
    try:
        text = text_of(path)
    except FileNotFoundError:
        return
    except ValueError as e:
        raise OSError(errno.EILSEQ, one_line(e)) from None
    for line in text.splitlines():
        try:
            found = parse_json(line)
        except ValueError:
            found = None
        yield found if isinstance(found, dict) else None
