"""Searches for hyper-parameters, as the methods of a paper tell of them: whose they were, what they chose, and where they ran."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfleet.files import parquet
from fedfleet.files.documents import YAML_BYTES, leaves, parse, text_of
from fedfleet.report.latex import escape
from fedfleet.report.words import count, joined, plain_value, share
from fedfleet.simulator.errors import ConfigError, one_line

SEVERAL, ONE, BEST = "winners.parquet", "trials.parquet", "best.yaml"


@dataclass(frozen=True)
class Winner:
    """What a search chose.

    Attributes:
        label: whose search it was; empty for the one search of a configuration without labels.
        algorithm: its name.
        values: chosen, by dotted key.
        edge: keys of which the value is at an edge of what was searched.
        trials: how many configurations were tried.
        config: whole, of one of its trials.

    """

    label: str
    algorithm: str
    values: Mapping[str, Any]
    edge: Sequence[str]
    trials: int
    config: Mapping[str, Any]

    def chose(self, label: str, config: Mapping[str, Any]) -> bool:
        """Whether a run under a label, with a configuration, has these values."""
        known = dict(leaves(config))
        mine = label == self.label or label.startswith(f"{self.label} ") if self.label else self._alike(known)
        return (
            mine
            and known.get("algorithm.name") == self.algorithm
            and all(_same(known.get(key), value) for key, value in self.values.items())
        )

    def _alike(self, known: Mapping[str, Any]) -> bool:
        """Whether a run's algorithm is that of the search in all that this did not choose, but for what follows from its rounds."""
        aside = (*self.values, "algorithm.lr_schedule.rounds")
        return all(
            known.get(key) == value
            for key, value in leaves(self.config)
            if key.startswith("algorithm.") and key not in aside
        )


@dataclass(frozen=True)
class Search:
    """A finished search: where it lies, its configuration as it was given, and its winners."""

    folder: Path
    config: Mapping[str, Any]
    winners: Sequence[Winner]

    def of(self, label: str, config: Mapping[str, Any]) -> list[Winner]:
        """Return the winners whose values a run has."""
        return [each for each in self.winners if each.chose(label, config)]

    def check(self, runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse a search that chose what none of the runs has, configurations by label. Raises ConfigError."""
        if not any(self.of(label, config) for label, config in runs.items()):
            chosen = "; ".join(
                f"{each.label or each.algorithm}: {', '.join(f'{k}={plain_value(v)}' for k, v in each.values.items())}"
                for each in self.winners
            )
            raise ConfigError(
                f"--tuned={self.folder}: none of {joined(list(runs))} has what it chose ({chosen}): take that, or leave it out"
            )


def read(folder: Path) -> Search:
    """Return a search from the folder of ``fedfleet tune``. Raises ConfigError."""
    given = f"--tuned={folder}"
    try:
        config = parse(text_of(folder / "tune.yaml", YAML_BYTES))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{given}: no search there ({one_line(e)}): give the folder of fedfleet tune") from None
    if not isinstance(config, dict) or not isinstance(config.get("tune"), dict):
        raise ConfigError(f"{given}: tune.yaml has no search: give the folder of fedfleet tune")
    keys = list(config["tune"].get("search") or {})
    if not (folder / BEST).is_file():
        raise ConfigError(f"{given}: the search has no winner yet: let it end first, by the same fedfleet tune")
    return Search(folder, config, list(_winners(folder, keys)))


def _winners(folder: Path, keys: Sequence[str]) -> Iterator[Winner]:
    if (folder / SEVERAL).is_file():
        for row in parquet.read(folder / SEVERAL).to_dict("records"):
            values = {key: row[key] for key in keys if row.get(key) is not None and row[key] == row[key]}
            edge = [key for key in str(row.get("edge") or "").split(", ") if key]
            if values:
                of = folder / str(row["folder"])
                yield Winner(row["label"], row["algorithm"], values, edge, int(row["trials"]), _config(of))
        return
    best = dict(leaves(_yaml(folder / BEST)))
    values = {key: best[key] for key in keys if key in best}
    trials = len(parquet.read(folder / ONE)) if (folder / ONE).is_file() else 0
    yield Winner("", str(best.get("algorithm.name", "")), values, (), trials, _config(folder))


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration of one of the trials below a folder; empty where none is left."""
    found = next(iter(sorted(folder.rglob("config.yaml"))), None)
    return {} if found is None else _yaml(found)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        result = parse(text_of(path, YAML_BYTES))
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{path}: cannot be read ({one_line(e)}): give the folder of fedfleet tune as it was"
        ) from None
    return result if isinstance(result, dict) else {}


def _same(one: Any, other: Any) -> bool:
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(one) == str(other)


def sentences(search: Search, runs: Mapping[str, Mapping[str, Any]], code: Any) -> Iterator[str]:
    """Yield what methods say of a search; ``code`` writes a name in LaTeX. ``runs`` as of ``Search.check``."""
    of = {label: found for label, config in runs.items() if (found := search.of(label, config))}
    how = search.config["tune"]
    over = joined([f"{code(key)} in {escape(str(value))}" for key, value in (how.get("search") or {}).items()])
    used = {id(each): each for found in of.values() for each in found}.values()
    trials = joined(sorted({count(each.trials, "trial") for each in used}))
    seeds = search.config.get("seeds") or [search.config.get("seed", 0)]
    each = " each" if len(of) > 1 or len(used) > 1 else ""
    kind, stops = (escape(str(how.get(key, usual))) for key, usual in (("searcher", "random"), ("scheduler", "sha")))
    yield (
        f"Hyper-parameters of {escape(joined(list(of)))} were chosen by a {kind} search{each} ({trials}, scheduler {stops}, seeds "
        f"{joined(list(map(str, seeds)))}) over {over}, for the best {code(str(how.get('metric')))}{_of(how, list(used))}."
    )
    edges = sorted({f"{each.label or each.algorithm} ({key})" for each in used for key in each.edge})
    if edges:
        yield f"At an edge of what was searched are the values of {escape(joined(edges))}."
    if others := [label for label in runs if label not in of]:
        yield f"Those of {escape(joined(others))} were not chosen by it."


def _of(how: Mapping[str, Any], winners: Sequence[Winner]) -> str:
    """Say on which examples was chosen."""
    if not str(how.get("metric")).startswith("eval/validation_"):
        return ", which is of the test examples"
    parts = {(each.config.get("evaluation") or {}).get("validation") or 0.0 for each in winners}
    told = [escape(share(part)) for part in sorted(parts) if part]
    return f" on {joined(told)} of the training examples, kept aside" if told else ""
