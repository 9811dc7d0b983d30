"""Groups of runs, each one line of a report: runs of a label that differ only in seed and in where they ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedfleet.files.documents import leaves
from fedfleet.report.tables import Run
from fedfleet.report.words import shortened

APART = (
    "seed",
    "seeds",
    "label",
    "executor",
    "checkpoint",
    "max_seconds",
    "schema_version",
    "compare",
    "vary",
    "code_dir",
    "track",
    "callbacks",
)
"""Sections of a configuration in which the runs of a line may differ."""
DIGEST, UNKNOWN = ".own.digest", ".own.not_recorded"
NAMED = 3  # differences that are spelt out
SHORT = 8  # digits of a digest
VALUE = 24  # characters of a value


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by label; where those of one label are not the same but for the seed, by label and what tells them apart."""
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    result: dict[str, list[Run]] = {}
    for label, several in by_label.items():
        kinds: dict[str, list[Run]] = {}
        for run in several:
            kinds.setdefault(json.dumps(identity(run), sort_keys=True, default=str), []).append(run)
        for name, group in zip(_names(label, [group[0] for group in kinds.values()]), kinds.values(), strict=True):
            number, free = 1, name
            while free in result:
                number += 1
                free = f"{name} #{number}"
            result[free] = [replace(run, label=free) for run in group]
    return result


def identity(run: Run) -> dict[str, Any]:
    """What a run did: its configuration, that of what was made in Python included, by dotted key.

    What was made in Python of things that nothing is known of may be the same as in another run, or not: it is the run's own.
    """
    config = {k: v for k, v in run.config.items() if k not in APART}
    result = {k: v for k, v in leaves(config) if k != "population.data_dir"}
    return result | {k: f"{', '.join(v)} in {run.path}" for k, v in result.items() if k.endswith(UNKNOWN) and v}


def _names(label: str, kinds: Sequence[Run]) -> list[str]:
    """A name for each kind of run of a label: the label, and how it differs from the others."""
    if len(kinds) == 1:
        return [label]
    all_of = [identity(run) for run in kinds]
    keys = [k for k in {k: None for one in all_of for k in one} if len({repr(one.get(k)) for one in all_of}) > 1]
    told = {k.partition(".own.")[0] for k in keys if not k.endswith((DIGEST, ".own.module"))}
    keys = [k for k in keys if not (k.endswith(DIGEST) and k.removesuffix(DIGEST) in told)]
    keys.sort(key=lambda k: ("own" not in k.split("."), k.endswith(".module")))  # what was made in Python first
    more = ", …" if len(keys) > NAMED else ""
    return [f"{label} ({', '.join(_told(k, one.get(k)) for k in keys[:NAMED])}{more})" for one in all_of]


def _told(key: str, value: Any) -> str:
    if key.endswith((".own.source", DIGEST)):
        return f"{key.rpartition('.')[2]} {str(value)[:SHORT]}"
    if key.endswith(UNKNOWN):
        return f"not recorded: {str(value).partition(' in ')[0] if value else 'nothing'}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{key.replace('.own.options.', '.').replace('.own.', '.')}={shortened(text, VALUE)}"


def versions(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Packages of which the runs had several versions, as "fedfleet 0.1, 0.2"; those of fedfleet first."""
    result: dict[str, dict[str, None]] = {}
    for environment in environments:
        for name, version in (environment.get("packages") or {}).items():
            result.setdefault(name, {})[str(version)] = None
    return [f"{name} {', '.join(several)}" for name, several in result.items() if len(several) > 1]
