"""Options of a run's parts, in words and LaTeX: those that a reader of a paper needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from fedfleet.config.schema import SECTIONS, Config
from fedfleet.files.documents import leaves
from fedfleet.report.latex import escape
from fedfleet.report.settings import UNTOLD as ONLY_IF_OTHER
from fedfleet.report.settings import USED
from fedfleet.report.tables import Run
from fedfleet.report.values import NAMES
from fedfleet.report.words import joined, plain_value

UNTOLD = ("name", "kind", "of", "sha256", "digest", "source", "min_size")
"""Keys that are no options, or are told elsewhere."""
WHOLE = tuple(naming.partition(".")[0] for naming in USED)
"""Options of an algorithm that are parts of which it is known what acts beside what."""
DEFAULTS = dict(leaves(Config().model_dump(mode="json")))
"""Defaults of all settings, by dotted key."""


def _at(run: Run, key: str) -> Any:
    """Return what stands at a dotted key of a run's configuration; None where there is nothing."""
    result: Any = run.config
    for part in key.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return result


def section_of(run: Run, key: str) -> dict[str, Any]:
    """Return a section of a run's configuration; of a part made in Python, what describes it."""
    result = _at(run, key)
    result = result.get("own", result) if isinstance(result, dict) else result
    return result if isinstance(result, dict) else {"name": result} if isinstance(result, str) else {}


def is_own(run: Run, key: str) -> bool:
    """Whether a part was made in Python, of which there are no options, but what describes it."""
    result = _at(run, key)
    return isinstance(result, dict) and "own" in result


def name_of(section: Mapping[str, Any]) -> str:
    """Return the name of a section's part."""
    return str(section.get("name", section.get("kind", "one of our own")))


def options_that_matter(
    key: str, section: Mapping[str, Any], first: Sequence[str] = (), *, defaults: bool = True
) -> dict[str, Any]:
    """Return the options of a named section, ``first`` some: those that are no defaults, and with ``defaults`` those that act."""
    of = SECTIONS.get(key)
    entry = of.registry.get(name_of(section)) if of is not None else None
    fields = {} if entry is None else entry.options.model_fields
    result: dict[str, Any] = {}
    for option in dict.fromkeys([*first, *section]):
        value = section.get(option)
        usual: Any = fields[option].get_default(call_default_factory=True) if option in fields else None
        usual = usual.model_dump(mode="json") if isinstance(usual, BaseModel) else usual
        aside = option in UNTOLD or (f"{key}.{option}" in ONLY_IF_OTHER and value == usual)
        if aside or value in (None, [], {}) or not (value != usual or option in first or (defaults and _acts(value))):
            continue
        whole = not isinstance(value, Mapping) or option in WHOLE
        result[option] = value if whole else _of_part(value, usual if isinstance(usual, Mapping) else {})
    return result


def _acts(value: Any) -> bool:
    """Whether a default does something: no 0, no false, no part that is none."""
    return (
        bool(value) and value != "none" and not (isinstance(value, Mapping) and name_of(value) in ("none", "constant"))
    )


def _of_part(part: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a part its name, its learning rate, parts of its own, and what is no default: others may be of other names."""
    result = {}
    for key, value in part.items():
        if isinstance(value, Mapping):
            below = usual.get(key)
            result[key] = _of_part(value, below if isinstance(below, Mapping) else {})
        elif key in (*NAMES, "lr") or value != usual.get(key):
            result[key] = value
    return result


def options_set(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a section that are set: of partitions and availability, defaults matter, too."""
    return {option: value for option, value in section.items() if option not in UNTOLD and value not in (None, [], {})}


def in_words(options: Mapping[str, Any]) -> str:
    """Return options in words; of a section of options its name, and below it its numbers and words."""
    words = []
    for option, value in options.items():
        if isinstance(value, Mapping):
            inner = {k: v for k, v in value.items() if k not in UNTOLD and v is not None}
            more = f" ({in_words(inner)})" if inner else ""
            words.append(f"{_words(option)} {escape(name_of(value))}{more}")
        elif isinstance(value, bool):
            words.append(f"{'with' if value else 'without'} {_words(option)}")
        elif isinstance(value, list):
            words.append(f"{_words(option)} {joined(list(map(_item, value)))}")
        else:
            words.append(f"{_words(option)} {escape(plain_value(value))}")
    return ", ".join(words)


def _item(value: Any) -> str:
    return (
        with_options(name_of(value), options_set(value)) if isinstance(value, Mapping) else escape(plain_value(value))
    )


def _words(option: str) -> str:
    return " ".join({"lr": "learning rate"}.get(word, escape(word)) for word in option.split("_"))


def with_options(name: str, options: Mapping[str, Any], about: str = "") -> str:
    """Return a name as code, and in brackets its options, and what it is."""
    said = "; ".join(filter(None, [in_words(options), about]))
    return f"{code(name)}{f' ({said})' if said else ''}"


def explained(key: str, section: Mapping[str, Any]) -> str:
    """Return the name of a section's part, all its options, and what it is in the words of its registry."""
    return with_options(name_of(section), options_set(section), about(key, name_of(section)))


def about(key: str, name: str) -> str:
    """Return in LaTeX what a section's part is in the words of its registry, "" for one of the user's own."""
    of = SECTIONS.get(key)
    text = of.registry.about(name).rstrip(".") if of is not None and name in of.registry else ""
    return escape(f"{text[:1] if text[1:2].isupper() else text[:1].lower()}{text[1:]}")


def code(name: str) -> str:
    """Return a name in LaTeX as it stands in a configuration."""
    return rf"\texttt{{{escape(name)}}}"
