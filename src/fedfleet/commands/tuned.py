"""Searches for hyper-parameters, as the methods of a paper tell of them: whose they were, what they chose, and where they ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfleet.config.tuning import Tuning, rungs
from fedfleet.files import parquet
from fedfleet.files.documents import YAML_BYTES, leaves, parse, text_of
from fedfleet.report.latex import escape
from fedfleet.report.words import count, joined, plain_value, share
from fedfleet.simulator.errors import ConfigError, one_line

SEVERAL, ONE, BEST = "winners.parquet", "trials.parquet", "best.yaml"
ASIDE = (
    "label",
    "seed",
    "executor",
    "checkpoint",
    "evaluation",
    "compare",
    "vary",
    "tune",
    "track",
    "callbacks",
    "faults",
)
ASIDE += ("max_seconds", "schema_version", "code_dir", "algorithm.lr_schedule.rounds")
"""Settings that a search may have otherwise."""
NAMED = 12  # settings that a sentence names, at most
STOPS = {"sha": "successive halving", "asha": "asynchronous successive halving", "none": "none stopped early"}
Configs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Configurations of runs, by label."""


@dataclass(frozen=True)
class Winner:
    """The choice of a search.

    Attributes:
        label: whose search it was; empty for the one search of a configuration without labels.
        algorithm: its name.
        point: where it was, of what the searches varied.
        values: chosen, by dotted key.
        edge: keys of which the value is at an edge of what was searched.
        trials: how many configurations were tried.
        config: whole, of one of its trials.

    """

    label: str
    algorithm: str
    point: Mapping[str, Any]
    values: Mapping[str, Any]
    edge: Sequence[str]
    trials: int
    config: Mapping[str, Any]

    def __str__(self) -> str:
        at = ", ".join(f"{key} {plain_value(value)}" for key, value in self.point.items())
        return f"{self.label or self.algorithm}{f' at {at}' if at else ''}"

    @property
    def chosen(self) -> str:
        """The values, in words."""
        return ", ".join(f"{key}={plain_value(value)}" for key, value in self.values.items())

    def is_of(self, label: str, known: Mapping[str, Any]) -> bool:
        """Whether it is for runs of a label, settings by dotted key."""
        named = label == self.label or label.startswith(f"{self.label} ") if self.label else self._alike(known)
        return named and known.get("algorithm.name") == self.algorithm

    def _alike(self, known: Mapping[str, Any]) -> bool:
        """Whether a run's algorithm is that of the search in all that this did not choose, but for what follows from its rounds."""
        aside = (*self.values, *ASIDE)
        return all(
            known.get(key) == value
            for key, value in leaves(self.config)
            if key.startswith("algorithm.correction.") and key not in aside
        )

    def at(self, known: Mapping[str, Any]) -> bool:
        """Whether it was chosen at the point of a run."""
        return all(_same(known.get(key), value) for key, value in self.point.items())

    def chose(self, known: Mapping[str, Any]) -> bool:
        """Whether a run has these values."""
        return all(_same(known.get(key), value) for key, value in self.values.items())


@dataclass(frozen=True)
class Search:
    """A finished search: where it lies, its configuration as it was given, and its winners."""

    folder: Path
    config: Mapping[str, Any]
    winners: Sequence[Winner]

    def of(self, label: str, config: Mapping[str, Any]) -> list[Winner]:
        """Return the winners for a run: those at its point, or those elsewhere where none was sought there."""
        known = dict(leaves(config))
        mine = [each for each in self.winners if each.is_of(label, known)]
        return [each for each in mine if each.at(known)] or mine

    def chose(self, label: str, config: Mapping[str, Any]) -> list[Winner]:
        """Return the winners for a run of which it has the values."""
        known = dict(leaves(config))
        return [each for each in self.of(label, config) if each.chose(known)]

    def check(self, runs: Configs) -> None:
        """Refuse a search that chose what none of the runs has. Raises ConfigError."""
        if not any(self.chose(label, config) for label, configs in runs.items() for config in configs):
            chosen = "; ".join(f"{each}: {each.chosen}" for each in self.winners)
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
    return Search(folder, config, list(_winners(folder, keys, list(config.get("vary") or {}))))


def _winners(folder: Path, keys: Sequence[str], varied: Sequence[str]) -> Iterator[Winner]:
    if (folder / SEVERAL).is_file():
        for row in parquet.read(folder / SEVERAL).to_dict("records"):
            values = {key: row[key] for key in keys if row.get(key) is not None and row[key] == row[key]}
            edge = [key for key in str(row.get("edge") or "").split(", ") if key]
            if values:
                of = folder / str(row["folder"])
                point = {key: row[key] for key in varied if key in row}
                yield Winner(row["label"], row["algorithm"], point, values, edge, int(row["trials"]), _config(of))
        return
    best = dict(leaves(_yaml(folder / BEST)))
    values = {key: best[key] for key in keys if key in best}
    trials = len(parquet.read(folder / ONE)) if (folder / ONE).is_file() else 0
    yield Winner("", str(best.get("algorithm.name", "")), {}, values, (), trials, _config(folder))


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


def sentences(search: Search, runs: Configs, code: Callable[[str], str]) -> Iterator[str]:
    """Yield what methods say of a search; ``code`` writes a name in LaTeX."""
    chose = {label: [search.chose(label, config) for config in configs] for label, configs in runs.items()}
    of = [label for label, each in chose.items() if any(each)]
    used = list({id(winner): winner for each in chose.values() for found in each for winner in found}.values())
    how = search.config["tune"]
    alike: dict[str, dict[str, list[Winner]]] = {}  # what a search was like -> label -> its winners
    for label in of:
        mine = {id(winner): winner for found in chose[label] for winner in found}
        for winner in mine.values():
            alike.setdefault(_like(search, winner, code), {}).setdefault(label, []).append(winner)
    for like, winners in alike.items():
        each = " each" if len({id(winner) for found in winners.values() for winner in found}) > 1 else ""
        yield (
            f"Hyper-parameters of {escape(joined(list(winners)))} were chosen by a {escape(str(how.get('searcher', 'random')))} "
            f"search{each} {like}, for the best {code(str(how.get('metric')))}{_of(how, used)}."
        )
    edges = [f"{winner} ({winner.chosen})" for winner in used if winner.edge]
    if edges:
        yield f"At an edge of what was searched are the values of {escape(joined(edges))}."
    yield from _elsewhere(search, runs, chose)
    yield from _otherwise(search, runs, of, code)


def _like(search: Search, winner: Winner, code: Callable[[str], str]) -> str:
    """Return how many trials the search of a winner had, on which seeds, and over what."""
    seeds = list(map(str, search.config.get("seeds") or [search.config.get("seed", 0)]))
    compared = search.config.get("compare")
    own = dict(leaves(compared.get(winner.label) or {})) if isinstance(compared, Mapping) else {}
    space = {
        key: own.get(f"tune.search.{key}", (search.config["tune"].get("search") or {}).get(key))
        for key in winner.values
    }
    over = joined([f"{code(key)} in {escape(str(value))}" for key, value in space.items()])
    ran = f"{count(winner.trials, 'trial')}, {_rungs(search.config['tune'], winner)}"
    return f"({ran}, {'seed' if len(seeds) == 1 else 'seeds'} {joined(seeds)}) over {over}"


def _rungs(how: Mapping[str, Any], winner: Winner) -> str:
    """Say which trials went on, and after how many rounds they were compared."""
    given = Tuning.model_validate(
        {key: how[key] for key in ("metric", "scheduler", "min_rounds", "reduction") if key in how}
    )
    rounds = winner.config.get("rounds")
    if given.scheduler == "none" or not rounds:
        return STOPS[given.scheduler]
    *before, last = rungs(given, rounds)
    told = f"after {joined(list(map(str, before)))} of {last} rounds, where one trial in {given.reduction} goes on"
    return f"{STOPS[given.scheduler]} {told if before else f'with no rung before the {last} rounds are done'}"


def _elsewhere(search: Search, runs: Configs, chose: Mapping[str, Sequence[Sequence[Winner]]]) -> Iterator[str]:
    """Say which runs have other values than the search chose for them, and for which labels it chose none."""
    for label, configs in runs.items():
        missed = dict.fromkeys(
            f"{winner.chosen}{f' ({winner})' if winner.point else ''}"
            for config, found in zip(configs, chose[label], strict=True)
            if not found
            for winner in search.of(label, config)
        )
        if missed:
            some = " some of" if any(chose[label]) else ""
            yield f"For{some} the runs of {escape(label)} it chose other values: {escape('; '.join(missed))}."
    others = [
        label for label, each in chose.items() if not any(each) and not any(search.of(label, c) for c in runs[label])
    ]
    if others:
        yield f"Those of {escape(joined(others))} were not searched for."


def _otherwise(search: Search, runs: Configs, labels: Sequence[str], code: Callable[[str], str]) -> Iterator[str]:
    """Say in which settings the search was made otherwise, a sentence for labels that differ in the same."""
    by_text: dict[str, list[str]] = {}
    for label in labels:
        winners = [winner for config in runs[label] for winner in search.of(label, config)]
        theirs, ours = _settings(winner.config for winner in winners), _settings(runs[label])
        aside = {key for winner in winners for key in winner.values}
        keys = (
            [key for key in theirs if key not in aside and theirs[key] != ours.get(key, theirs[key])] if winners else []
        )
        told = [f"{code(key)} {escape(joined(theirs[key]))} (here {escape(joined(ours[key]))})" for key in keys]
        more = [f"{len(told) - NAMED} settings more"] if len(told) > NAMED else []
        by_text.setdefault(joined([*told[:NAMED], *more]), []).append(label)
    for text, of in by_text.items():
        if text:
            yield f"The search{f' for {escape(joined(of))}' if len(by_text) > 1 else ''} was made with {text}."


def _settings(configs: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values that settings have in some configurations, in words, by dotted key."""
    result: dict[str, list[str]] = {}
    for config in configs:
        for key, value in leaves(config):
            if not any(key == name or key.startswith(f"{name}.") for name in ASIDE):
                values = result.setdefault(key, [])
                values += [said] if (said := plain_value(value)) not in values else []
    return result


def _of(how: Mapping[str, Any], winners: Sequence[Winner]) -> str:
    """Say on which examples was chosen."""
    if not str(how.get("metric")).startswith("eval/validation_"):
        return ", which is of the test examples"
    parts = {(each.config.get("evaluation") or {}).get("validation") or 0.0 for each in winners}
    told = [escape(share(part)) for part in sorted(parts) if part]
    return f" on {joined(told)} of the training examples, kept aside" if told else ""
