"""The runs that a configuration asks for: every label of ``compare``, every point of ``vary``, every seed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfleet.algorithms.wrapping import WrapperOptions
from fedfleet.config.plugins import unused
from fedfleet.config.population import Data, load_data
from fedfleet.config.schema import SECTIONS, Config, at, flattened, with_overrides
from fedfleet.datasets.files import DataError
from fedfleet.experiments.same_run import leaves
from fedfleet.report.values import names
from fedfleet.report.words import joined
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.plain_text import as_seen
from fedfleet.simulator.registry import ByPathWithOptions

TARGET = "domains.target"
LONGEST = 255  # bytes of a folder's name
OWN_KEYS = {
    "label": "the name of the entry is the label",
    "seed": "set seed or seeds at the top",
    "seeds": "set seeds at the top",
    "compare": "compare only at the top",
    "vary": "vary at the top",
}
"""What an entry of ``compare`` or ``vary`` may not set, and the mend."""


@dataclass(frozen=True)
class Trial:
    """One run of a campaign: its name and place below the campaign's folder, its label in ``compare`` and what varies.

    ``lost`` tells which options given for all are none of its own, since something of it has another name.
    """

    config: Config
    name: str
    place: str
    label: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    lost: Sequence[str] = ()


def planned(config: Config, data: Data | None = None) -> list[Trial]:
    """Return the runs a configuration asks for; a single run has the place ".". Raises ConfigError.

    ``data`` are those that were given in Python, if any.
    """
    if config.tune is not None:
        raise ConfigError("tune: a search, of which these are no runs: use fedfleet tune, or add tune=null")
    if config.compare is None and config.vary is None and config.seeds is None:
        return [Trial(config, "", ".")]
    seeds = config.seeds or [config.seed]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds={seeds}: give each seed once")
    result = []
    for point in points(config, data):
        for seed in seeds:
            own = with_overrides(point.config, {"seed": seed, "seeds": None})
            below = f"seed-{seed}" if config.seeds else "."
            result.append(replace(point, config=own, place=str(Path(point.place, below))))
    return result


def points(config: Config, data: Data | None = None) -> list[Trial]:
    """Return every label of ``compare`` at every point of ``vary``, each with all seeds, and with ``tune`` where that is given.

    A configuration with neither is one point with the place ".". ``data`` as of ``planned``. Raises ConfigError.
    """
    varied = axes(config, data)
    _refuse_own_keys("vary", varied)
    _refuse_twice([(f"vary.{key}", [{key: value} for value in values]) for key, values in varied.items()])
    for key, values in varied.items():
        if key.split(".")[0] == "tune":
            raise ConfigError(f"vary.{key}={show(values)}: not here: every point is tuned alike: set it at the top")
    result: dict[str, Trial] = {}
    looks: dict[str, Trial] = {}
    for label, overrides in (config.compare or {config.label or "": {}}).items():
        _refuse_own_keys(f"compare.{label}", overrides)
        for key, values in varied.items():
            _refuse_twice([(f"compare.{label}", [overrides]), (f"vary.{key}", [{key: value} for value in values])])
        overrides = _tuned_apart(label, overrides, tuned=config.tune is not None)
        for pairs in itertools.product(*(zip(v, _named(v), strict=True) for v in varied.values())):
            point = dict(zip(varied, (value for value, _ in pairs), strict=True))
            told = (f"{k.split('.')[-1]}={text}" for k, (_, text) in zip(varied, pairs, strict=True))
            name = " ".join(filter(None, [label, *told]))
            own = {"label": name or None, "compare": None, "vary": None}
            with naming(name):
                one = with_overrides(config, {**overrides, **point, **own})
            place = _safe(name) if name else "."
            if len(os.fsencode(place)) > LONGEST:
                raise ConfigError(
                    f"compare or vary: {show(name)} names a folder, and is longer than {LONGEST} letters: give a shorter label"
                )
            trial = Trial(one, name, place, label, point, tuple(_lost(config, one)))
            other = result.setdefault(trial.place, trial)
            other = looks.setdefault(as_seen(name).casefold(), trial) if other is trial else other
            if other is not trial:
                raise ConfigError(
                    f"compare or vary: {other.name!r} and {name!r} would look the same but for case, or have one folder, "
                    f"{trial.place!r}: use labels and values that differ in letters or digits"
                )
    return list(result.values())


def _tuned_apart(label: str, overrides: Mapping[str, Any], *, tuned: bool) -> dict[str, Any]:
    """Return the overrides of a label; those of ``tune`` only where it is tuned, and of these distributions alone."""
    mine = {key: value for key, value in overrides.items() if key.split(".")[0] == "tune"}
    flat = dict(leaves(mine)) if mine else {}
    for key, value in flat.items():
        if not f"{key}.".startswith("tune.search."):
            raise ConfigError(
                f"compare.{label}.{key}={show(value)}: not here: labels are tuned alike, but for tune.search: set it at the top"
            )
    return {**{key: value for key, value in overrides.items() if key not in mine}, **(flat if tuned else {})}


def _lost(config: Config, one: Config) -> Iterator[str]:
    """Yield what is set in named sections of a configuration, and no longer in one that followed from it, and why."""
    for section in (key for key, of in SECTIONS.items() if not of.listed and key != "algorithm.of"):
        before, now = at(config, section), at(one, section)
        inner = now.of.model_fields_set if isinstance(now, WrapperOptions) else ()
        if isinstance(now, ByPathWithOptions):
            inner = now.inherited or ()
        lost = before.model_fields_set - now.model_fields_set - {*inner, "name", "kind"}
        if keys := [f"{section}.{key}" for key in type(before).model_fields if key in lost]:
            yield _no_option(keys, SECTIONS[section].registry.name_of(now))


def _no_option(keys: Sequence[str], name: str) -> str:
    return f"{joined(keys)}: {name} has no such option"


def left_out(plan: Sequence[Trial]) -> list[str]:
    """Return a line on what was given to all runs and has no meaning in some. Raises ConfigError where code is not found."""
    lost = [what for trial in plan for what in (*trial.lost, *(_no_option(*result) for result in unused(trial.config)))]
    return [f"left out {what}" for what in dict.fromkeys(lost)]


def _named(values: list[Any]) -> list[str]:
    """Return what values are called: as they are written, or mappings by what tells one from the others."""
    short = names(values)
    return [text if isinstance(value, Mapping) else str(value) for value, text in zip(values, short, strict=True)]


def axes(config: Config, data: Data | None = None) -> dict[str, list[Any]]:
    """Return what varies; ``domains.target: [each]`` leaves every domain out in turn. Raises ConfigError, DataError."""
    varied = dict(config.vary or {})
    if varied.get(TARGET) == ["each"]:
        data = data or load_data(config)
        if not data.domains:
            raise ConfigError(
                f"vary.{TARGET}=[each]: the data set {data.name!r} has no domains by name: give their numbers"
            )
        varied[TARGET] = list(data.domains)
    return varied


def distinct(plan: Sequence[Trial]) -> list[Trial]:
    """Return the first trial of every name: the others differ in their seed alone."""
    result: dict[str, Trial] = {}
    for trial in plan:
        result.setdefault(trial.name, trial)
    return list(result.values())


def to_check(plan: Sequence[Trial]) -> list[Trial]:
    """Return the trials to check before any starts: the first of every name, and all whose seed deals their clients anew."""
    first = {trial.place for trial in distinct(plan)}
    return [trial for trial in plan if trial.place in first or trial.config.population.partition_seed == "seed"]


def _refuse_own_keys(where: str, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if fix := OWN_KEYS.get(key.split(".")[0]):
            raise ConfigError(f"{where}.{key}={show(value)}: not here: {fix}")


def _refuse_twice(places: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> None:
    """Refuse a key that two places set, each of which has a list of overrides: the tables would tell of a value that never ran."""
    sets = {where: set[str]().union(*map(flattened, of)) for where, of in places}
    for (one, keys), (other, others) in itertools.combinations(sets.items(), 2):
        if shared := sorted(keys & others):
            raise ConfigError(f"{one} and {other}: both set {joined(shared)}: leave it out of one")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say which run a mistake is in."""
    try:
        yield
    except (ConfigError, DataError) as e:
        raise (ConfigError(f"run {name!r}: {e}") if name else e) from None


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.+" else "-" for c in label).strip(".") or "run"
