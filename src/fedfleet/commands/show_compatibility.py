"""Tables of what goes with what: features by algorithm, and by each other, reckoned from needs and breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from rich.table import Table

from fedfleet.algorithms.domain_participation import correction_of
from fedfleet.algorithms.options import AlgorithmOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.assembly import task_setup
from fedfleet.assembly.algorithm import wrapped
from fedfleet.assembly.prepared import Prepared
from fedfleet.commands.show_named import example
from fedfleet.config import requirements
from fedfleet.config.federation import steps
from fedfleet.config.schema import load
from fedfleet.middleware.facts import Break, Clash, Fact, Need, check, of_trial
from fedfleet.simulator.errors import ConfigError

PLAIN_WIDTH = 200
BY_ALGORITHM, BY_FEATURE = "Algorithms and features", "Features beside each other"
PAGE = """# What goes with what

This page says which features an algorithm takes, and which go together. Look here before you
combine them; a run that cannot work is refused before it begins, with the key, the reason and what
to do.

An empty cell works. A word says what is lacking, and is explained below. Each algorithm is tried on
a small run, with `weight: uniform` if it has that option. The page is made by
`fedfleet show compatibility --out docs/reference/compatibility.md`.
"""
TRIAL, NONE = "a trial", "no option"
NOISE = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}
FEATURES: dict[str, dict[str, Any]] = {
    "privacy": {"privacy": NOISE},
    "example_privacy": {"example_privacy": NOISE},
    "secure_aggregation": {"secure_aggregation": {"clip": 1.0, "rounding": "toward_zero"}},
    "transforms.up": {"transforms": {"up": ["fp16"]}},
    "up with feedback": {"transforms": {"up": [{"name": "top_k", "share": 0.1, "error_feedback": True}]}},
    "down with delta": {"transforms": {"down": ["delta", "bf16"]}},
    "poisoning": {"attack": {"kind": "label_flip", "share": 0.1}},
    "colluding": {"attack": {"kind": "alie", "share": 0.1}},
    "cosines": {"evaluation": {"cosines": True}},
    "late=keep": {"cohort": {"late": "keep"}},
    "memory": {"algorithm": {"name": "fedavg", "correction": "fedvarp"}},
    "Oort": {"selection": "oort"},
}
"""Features that algorithms, and each other, are held against, by their names in the tables."""
LOCAL = {"executor": {"kind": "local"}}
NET = {"model": "mlp", "hidden": [8]}
CLASSES = {"name": "classification", **NET}
DIGITS = {**LOCAL, "population": {"dataset": "digits", "clients": 20}}
BY_LABEL = {"dataset": {"name": "digits", "label_domains": True}, "clients": 20, "partition": {"kind": "by_domain"}}
SHIFTED = {"dataset": "digits_to_bright", "clients": 20, "partition": {"kind": "by_domain"}}
TO_BRIGHT = {**LOCAL, "population": SHIFTED, "domains": {"target": "target"}}
WORLDS: tuple[dict[str, Any], ...] = (
    {**DIGITS, "task": CLASSES},
    {**DIGITS, "task": {"name": "classification", "model": "cnn_bn"}},
    {**DIGITS, "task": {"name": "auc", **NET}},
    {**LOCAL, "population": BY_LABEL, "task": CLASSES},
    {**TO_BRIGHT, "task": {"name": "domain_adaptation"}},
    {**TO_BRIGHT, "task": {"name": "two_heads"}, "cohort": {"size": 2}},
    {**LOCAL, "population": BY_LABEL, "task": {"name": "stochastic"}},
    {**LOCAL, "population": BY_LABEL, "task": {"name": "attentive"}},
    {**LOCAL, "population": {**BY_LABEL, "held_out": 0.25}, "task": CLASSES},
    {
        **TO_BRIGHT,
        "domains": {"target": "target", "share_target": True},
        "task": {"name": "domain_adaptation"},
        "cohort": {"size": 2},
    },
)
"""Small runs, of which the first that an algorithm takes shows what it is like."""


@dataclass(frozen=True)
class Feature:
    """A feature: what it is called, what is written for it, and what that needs and breaks."""

    name: str
    given: dict[str, Any]
    needs: tuple[Need, ...]
    breaks: tuple[Break, ...]


def features() -> list[Feature]:
    """Return what algorithms are held against, and each other."""
    plain = Prepared(load(WORLDS[0], {"algorithm.name": "fedavg", "algorithm.weight": "uniform"}))
    result = []
    for name, given in FEATURES.items():
        config = load(plain.config, given)
        ways = steps(config, "up"), steps(config, "down")
        there = requirements.needs(plain.config, plain.algorithm, (), ())
        made = task_setup.algorithm(
            config, plain.task
        )  # another than the plain one, where an option of it is the feature
        needs = [n for n in requirements.needs(config, made, *ways) if n not in there]
        took = list(requirements.breaks(plain.config, plain.algorithm, plain.task, (), ()))
        breaks = [b for b in requirements.breaks(config, made, plain.task, *ways) if b not in took]
        result.append(Feature(name, given, tuple(needs), tuple(breaks)))
    return result


def lacking(needs: Iterable[Need], breaks: Sequence[Break]) -> str:
    """Return the first fact that is lacking, as a table says it; nothing where all are there."""
    try:
        check(needs, breaks)
    except Clash as e:
        return _called(e.fact)
    return ""


def _called(fact: Fact) -> str:
    return fact.name.lower().replace("_", " ")


def of_algorithms(asked: Sequence[Feature], say: Callable[[str], None]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield each algorithm and what it lacks for each feature; None for one that none of the small runs suits."""
    for name in ALGORITHMS:
        say(name)
        given = yaml.safe_load(example("algorithm", name))
        if "weight" in given["algorithm"]:
            given["algorithm"]["weight"] = "uniform"
        yield name, next((_row(x, asked) for world in WORLDS if (x := _tried(world, given)) is not None), None)


def _tried(world: dict[str, Any], given: dict[str, Any]) -> Prepared | None:
    try:
        return Prepared(load(world, given))
    except ConfigError:
        return None


def _row(x: Prepared, asked: Sequence[Feature]) -> list[str]:
    """Return what an algorithm lacks for each feature."""
    breaks = [*requirements.breaks(x.config, x.bare, x.task, (), ())]
    seen = x.seen(x.bare)
    breaks += of_trial(x.bare, seen, x.config.algorithm.name)
    mine = list(requirements.needs(x.config, x.bare, (), ()))
    slots = {slot: 1.0 for sent in seen.sent.values() for slot in sent}
    result = []
    for feature in asked:
        if feature.name == "memory" and memory(x.config.algorithm) is None:
            result.append(NONE)
            continue
        lack = lacking(feature.needs, breaks) or lacking(mine, feature.breaks)
        result.append(lack or _wrapped(x, feature, breaks, slots))
    return result


def memory(algorithm: AlgorithmOptions) -> str | None:
    """Return the correction with memory that an algorithm takes; None for none."""
    how = correction_of(algorithm)
    kinds = () if how is None else get_args(type(how).model_fields["kind"].annotation)
    return next((kind for kind in ("fedvarp", "memory") if kind in kinds), None)


def _wrapped(x: Prepared, feature: Feature, breaks: Sequence[Break], slots: dict[str, float]) -> str:
    """Return that a trial of the algorithm with the feature fails, if it does."""
    given = feature.given
    if "secure_aggregation" in given:
        given = {"secure_aggregation": {**given["secure_aggregation"], "clip": slots}}
    config = load(x.config, given)
    about = requirements.context(config, x.task, x.problem, x.population.summary(), x.seen, breaks)
    try:
        wrapped(config, x.bare, about, steps(config, "up"), steps(config, "down"), None)
    except Clash as e:
        return _called(e.fact)
    except ConfigError:
        return TRIAL
    return ""


def of_features(asked: Sequence[Feature]) -> list[tuple[str, list[str]]]:
    """Return each feature and what is lacking for it beside each other."""
    return [(one.name, [lacking(one.needs, o.breaks) or lacking(o.needs, one.breaks) for o in asked]) for one in asked]


@dataclass(frozen=True)
class Tables:
    """The tables: by algorithm and feature, by feature and feature, and the words in them."""

    algorithms: list[tuple[str, list[str]]]
    features: list[tuple[str, list[str]]]
    words: list[tuple[str, str]]


def look(say: Callable[[str], None]) -> Tables:
    """Return all of it; ``say`` is told of each algorithm."""
    asked = features()
    rows = [(name, ["?"] * len(FEATURES) if result is None else result) for name, result in of_algorithms(asked, say)]
    beside = of_features(asked)
    used = {cell for _, cells in (*rows, *beside) for cell in cells}
    words = [(_called(fact), fact.value) for fact in Fact] + [
        (TRIAL, "a trial of two rounds to go through; `fedfleet plan` says why it does not"),
        (NONE, "an algorithm that has this option"),
    ]
    return Tables(rows, beside, [(word, means) for word, means in words if word in used])


def tables(result: Tables) -> Iterator[Table]:
    """Yield tables for a terminal."""
    for title, rows in ((BY_ALGORITHM, result.algorithms), (BY_FEATURE, result.features)):
        table = Table("", *FEATURES, title=title)
        for name, cells in rows:
            table.add_row(name, *cells)
        yield table
    words = Table("word", "what is needed", title="Words")
    for row in result.words:
        words.add_row(*row)
    yield words


def markdown(result: Tables) -> str:
    """Return a page of the documentation."""
    lines = [PAGE]
    for title, rows in ((BY_ALGORITHM, result.algorithms), (BY_FEATURE, result.features)):
        lines += [f"## {title}", "", _row_of(["", *FEATURES]), _row_of(["---"] * (len(FEATURES) + 1))]
        lines += [*(_row_of([f"`{name}`", *cells]) for name, cells in rows), ""]
    lines += [
        "## Words",
        "",
        _row_of(["word", "the feature needs"]),
        _row_of(["---", "---"]),
        *map(_row_of, result.words),
    ]
    return "\n".join(lines) + "\n"


def _row_of(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
