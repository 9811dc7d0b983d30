"""Read YAML and JSON that others may have written, within limits: of bytes, of depth, of values, and of regular files alone."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Container, Hashable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from fedfleet.files.writing import check_regular
from fedfleet.simulator.arithmetic.system import AT_ONCE
from fedfleet.simulator.errors import ConfigError, one_line, show
from fedfleet.simulator.plain_text import decoded, once

DEEPEST = 64  # values within values
MOST = 100_000  # values of a YAML document, each alias written out
YAML_BYTES, TEXT_BYTES = 2 << 20, 1 << 30
"""The largest file that is read as YAML, and as anything else."""
SEAL, SEALED = "sha256", "# sha256 of what is above: "
"""The places of digests in JSON lines and in YAML documents."""
TAG = "tag:yaml.org,2002:"
MERGE, TEXT, INTEGER, FLOAT = (f"{TAG}{name}" for name in ("merge", "str", "int", "float"))
LITERAL = {f"{TAG}null", f"{TAG}bool", INTEGER, FLOAT}
"""Tags of single values; of many there are these two. No other is of plain data."""
CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Characters that no text needs, and by which one could tell a terminal what to do: all of Unicode's but NUL, tabs and line
breaks."""
OF_MANY = {yaml.SequenceStartEvent: f"{TAG}seq", yaml.MappingStartEvent: f"{TAG}map"}


def text_of(path: Path, most: int = TEXT_BYTES) -> str:
    """Return the text of a regular file, read through links.

    Raises OSError for what is no regular file, is larger than ``most`` bytes, or cannot be read; ValueError for what is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | AT_ONCE)
    try:
        check_regular(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        result = file.read(most + 1)
    if len(result) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes")
    return decoded(result)


def sealed_text(text: str) -> str:
    """Return a YAML document with a last line, a comment, that has the digest of all before it."""
    return f"{text}{SEALED}{_digest(text)}\n"


def check_text(text: str) -> None:
    """Refuse a document with a digest that is not that of what stands before it. Raises ValueError."""
    mark, words = SEALED[:2], SEALED[2:]  # without its mark the line is no comment, and might be a key
    before, sealed, after = text.rpartition(words)
    if sealed and (not before.endswith(mark) or after.split("\n", 1)[0] != _digest(before.removesuffix(mark))):
        raise ValueError("its digest is not that of what stands before it")


def sealed_event(event: Mapping[str, Any]) -> str:
    """Return a mapping as a JSON line with a digest of its own, as ``checked_event`` reads it."""
    return json.dumps({**event, SEAL: _digest(json.dumps(event))}) + "\n"


def checked_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a JSON line holds besides its digest; one of an earlier release has none. Raises ValueError."""
    said = {key: value for key, value in event.items() if key != SEAL}
    if event.get(SEAL, wanted := _digest(json.dumps(said))) != wanted:
        raise ValueError("its digest is not that of its contents")
    return said


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def leaves(
    node: Any, at: str = "", *, whole: Container[str] = (), into_lists: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield what plain data holds, by dotted key.

    An empty mapping is one value, and so is what stands at a key of ``whole``. A list is one value, too; ``into_lists`` yields its
    items, each under the key of the list.
    """
    if isinstance(node, Mapping) and (node or not at) and at not in whole:
        for key, below in node.items():
            yield from leaves(below, f"{at}.{key}" if at else f"{key}", whole=whole, into_lists=into_lists)
    elif into_lists and isinstance(node, list):
        for below in node:
            yield from leaves(below, at, whole=whole, into_lists=into_lists)
    else:
        yield at, node


def is_there(path: Path) -> bool:
    """Say whether there is a file or folder; a path that is too long, or cannot be looked at, is that of none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _by_libyaml() -> Any:
    """Return a loader that reads events in C, which is six times as fast, and composes nodes in Python."""
    parser: Any = vars(yaml.cyaml)["CParser"]

    class Nodes(Composer, parser, SafeConstructor, Resolver):
        def __init__(self, text: str) -> None:
            parser.__init__(self, text)
            for base in (Composer, SafeConstructor, Resolver):
                base.__init__(self)

    return Nodes


_Nodes: Any = _by_libyaml() if yaml.__with_libyaml__ else yaml.SafeLoader


class _Loader(_Nodes):
    """YAML that reads 1e-3 as a number, where YAML 1.1 wants 1.0e-3, and refuses what most readers would take for something else.

    Refused are a key given twice in one mapping, of which YAML keeps the last; numbers of base 60 (1:30) and 8 (010, 0o10); tags
    that do not fit their value, or are not of plain data; another YAML (%YAML 1.2), to which ``on`` is text; and nesting and
    lengths far beyond any configuration. Mappings are merged (``<<``) as YAML's own page says
    (https://yaml.org/type/merge.html), which PyYAML does not where a merged mapping merges another: the first of several has the
    say, and a mapping's own keys before all.
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
        event = self.peek_event()
        self._check_tag(event)
        if isinstance(event, yaml.ScalarEvent) and CONTROL.search(event.value):
            raise ValueError(f"a control character is in the text of line {event.start_mark.line + 1}: leave it out")
        result = super().compose_node(parent, index)
        self.depth -= 1
        return result

    def compose_document(self) -> yaml.Node | None:
        """Return the node that a document is."""
        start = self.peek_event()
        if start.version not in (None, (1, 1)):
            said = ".".join(map(str, start.version))
            raise ValueError(
                f"%YAML {said} in line {start.start_mark.line + 1}: it is read as 1.1: leave that line out"
            )
        return super().compose_document()

    def _check_tag(self, event: yaml.Event) -> None:
        """Refuse a tag beside which a value would be lost, or read as what it is not (``!!null x``, ``!!bool {=: yes, a: 1}``)."""
        tag = getattr(event, "tag", None)
        if tag is None or tag == OF_MANY.get(type(event)):
            return
        if isinstance(event, yaml.ScalarEvent):
            plain = self.resolve(yaml.ScalarNode, event.value, (True, False))  # without the tag
            if tag == TEXT or (tag in LITERAL and (plain == tag or (plain, tag) == (INTEGER, FLOAT))):
                return
        said, line = tag.replace(TAG, "!!"), event.start_mark.line + 1
        raise ValueError(
            f"the tag {show(said)} in line {line} does not fit its value: leave it out, and quote what is text"
        )

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put merged keys in the place of ``<<``; refuse a key that is given twice."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        seen = set[Hashable]()
        if node.flow_style:
            _check_commas(node)
        for key, value in node.value:
            read = "<<" if key.tag == MERGE else self.construct_object(key, deep=True)
            name = f"{read}"
            equal = isinstance(read, Hashable) and read in seen  # as 1, 1.0 and true are to Python
            if name in own or equal:
                raise ValueError(f"key {name!r} is given twice, again in line {key.start_mark.line + 1}: keep one")
            own[name] = (key, value)
            seen.add(read if isinstance(read, Hashable) else name)
            for other in self._merged(value) if key.tag == MERGE else ():
                self.flatten_mapping(other)
                for pair in other.value:
                    merged.setdefault(f"{self.construct_object(pair[0], deep=True)}", pair)
        own = {name: pair for name, pair in own.items() if pair[0].tag != MERGE}
        node.value = [*({**merged, **own}).values()]

    def _merged(self, value: yaml.Node) -> list[yaml.MappingNode]:
        """Return the mappings that a value of ``<<`` is of. Raises ValueError."""
        result: list[Any] = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if wrong := [one for one in result if not isinstance(one, yaml.MappingNode)]:
            raise ValueError(f"<< merges mappings, and in line {wrong[0].start_mark.line + 1} there is none: give some")
        return result

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number in base 10, 2 or 16."""
        text = node.value
        if ":" in text or re.fullmatch(r"[-+]?0o?[\d_]+", text):
            meant = "in base 60" if ":" in text else "in base 8"
            raise ValueError(
                f"{text} is a number {meant} to YAML, in line {node.start_mark.line + 1}: quote it if it is text"
            )
        return self.construct_yaml_int(node) if node.tag == INTEGER else self.construct_yaml_float(node)


def _check_commas(node: yaml.MappingNode) -> None:
    """Refuse a value with brackets that ends at a comma of its own: ``{lr: uniform(0, 1)}`` has a key ``1)`` to YAML."""
    for (key, value), (rest, _) in pairwise(node.value):
        text = value.value if isinstance(value, yaml.ScalarNode) and not value.style else ""
        closed = isinstance(rest, yaml.ScalarNode) and rest.value.count(")") > rest.value.count("(")
        if text.count("(") > text.count(")") and closed:
            raise ValueError(
                f"{text!r} ends at its comma within braces, in line {value.start_mark.line + 1}: quote the whole value, as in "
                f"{{{key.value}: '{text}, …)'}}"
            )


for _tag in (INTEGER, FLOAT):
    _Loader.add_constructor(_tag, _Loader.construct_number)
_DIGITS = "[0-9][0-9_]*"
_Loader.add_implicit_resolver(
    FLOAT, re.compile(rf"[-+]?({_DIGITS}(\.[0-9_]*)?|\.{_DIGITS})[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
_Loader.add_implicit_resolver(INTEGER, re.compile(r"[-+]?0o[0-7_]+$"), list("-+0"))  # of YAML 1.2, and of Python


class _Dumper(yaml.SafeDumper):
    """YAML in quotes wherever a reader would take text for something else."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump(value: Any, **how: Any) -> str:
    """Return plain data as YAML that ``parse`` reads as the same value, its keys in their order; ``how`` is of ``yaml.dump``."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **how)


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
    """Return the value in a JSON document; halves of surrogate pairs and control characters in it become question marks.

    Raises ValueError, in one line, for one that cannot be read, is nested too deep, or gives a key twice.
    """
    try:
        return _plain(json.loads(text, object_pairs_hook=once), 0)
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
            return value if value.isascii() and value.isprintable() else _shown(value)
    return value


def _shown(text: str) -> str:
    return CONTROL.sub("?", text).encode(errors="replace").decode()


def json_of(path: Path, kinds: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Return the mapping in a JSON file, of which what stands at some keys has to be of ``kinds``, or null.

    Raises FileNotFoundError, and ConfigError for one that cannot be read or is no such mapping.
    """
    try:
        result = parse_json(text_of(path))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not readable as JSON ({one_line(getattr(e, 'strerror', None) or e)})") from None
    if not isinstance(result, dict):
        raise ConfigError(f"{path}: not readable as JSON: a {type(result).__name__}, and it is to be a mapping")
    for key, kind in (kinds or {}).items():
        value = result.get(key)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{path}: {key} is a {type(value).__name__}, and is to be a {kind.__name__}")
    return result


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
            result = parse_json(line)
        except ValueError:
            result = None
        yield result if isinstance(result, dict) else None
