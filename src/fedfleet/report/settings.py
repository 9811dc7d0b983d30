"""The table of settings: what was chosen of an experiment, or matters, side by side for every label."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedfleet.report.groups import identity
from fedfleet.report.sheet import Grid
from fedfleet.report.tables import Run
from fedfleet.report.words import MISSING, joined, plain_value, shortened

FIRST = (
    *("algorithm.name", "algorithm.lr", "algorithm.dual_lr", "algorithm.server_lr", "algorithm.batch_size"),
    *("algorithm.steps", "algorithm.epochs", "rounds", "cohort.size", "cohort.wait_for", "cohort.deadline_s"),
    *("population.dataset", "population.dataset.name", "population.clients"),
)
"""Settings that come first, in this order; of their sections no others are shown but those of an algorithm."""
WHOLE = ("algorithm", "task", "population.partition", "availability", "selection", "attack", "transforms", "privacy")
WHOLE += ("example_privacy", "secure_aggregation", "domains.target", "until", "patience")
"""Sections that are shown whole, after those."""
UNTOLD = (
    "algorithm.gradient_chunk",
    "task.init",
    "task.norm",
    "task.arguments",
    "population.partition.min_size",
    "task.own.options",
)
"""Settings that are shown only where they differ."""
OF_CLIENTS: Mapping[str, Sequence[str]] = {
    "sgd": ("momentum", "nesterov"),
    **dict.fromkeys(("adam", "adamw"), ("beta1", "beta2", "eps")),
    "adagrad": ("eps",),
}
"""Options of clients' optimisers."""
USED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "client_optimizer.name": OF_CLIENTS,
    "optimizer.name": OF_CLIENTS,
    "server_optimizer.name": {
        "sgd": ("momentum",),
        "adagrad": ("beta1", "eps"),
        **dict.fromkeys(("adam", "yogi"), ("beta1", "beta2", "eps")),
    },
    "lr_schedule.kind": {
        "constant": (),
        "power": ("exponent", "over", "floor", "by"),
        "step": ("every", "factor", "floor", "by"),
        "cosine": ("rounds", "floor", "by"),
    },
    "correction.kind": {
        "none": (),
        "known_p": ("normalise", "cap"),
        "fedau": ("normalise", "cutoff", "count", "pool"),
        "mifa": ("start",),
        "fedvarp": ("chances", "cap"),
    },
}
"""Options of which each name, or kind, has some: the others mean nothing beside it."""
HIDDEN = ("mlp", "bag")
"""Models of ours with hidden layers of a width that is chosen."""
OF_THEOREMS = ("lr", "dual_lr", "dual.lr", "lr_schedule", "decay", "alpha")  # which set them where `theory` is given
OFF = (None, False, "none", "", "[]", "{}")
USUAL = {"lr_schedule.kind": "constant", "lr_schedule.by": "round", "client_optimizer.state": "reset"}  # as if not said
CELL = 60  # characters
COLUMNS = 8  # labels side by side, at most


def settings(
    groups: Mapping[str, Sequence[Run]], varied: Mapping[str, Sequence[Any]] = MappingProxyType({})
) -> Grid | None:
    """A row a setting, a column a label; those that differ first, then what a study has varied. None without configurations."""
    shown = dict(list(groups.items())[:COLUMNS])
    columns = [_of_label(group) for group in shown.values() if group]
    every = dict.fromkeys(key for column in columns for key in column)
    keys = [key for key in every if varied.keys().isdisjoint((key, _title(key)))]
    differ = [key for key in keys if _differs(key, columns)]
    common = [key for key in keys if key not in differ and _told(key) and any(_is_on(c.get(key), key) for c in columns)]
    columns = [
        column | {key: joined([*map(plain_value, values)]) for key, values in varied.items()} for column in columns
    ]
    order = [*sorted(differ, key=_place), *sorted([*varied, *common], key=_place)]
    if not order or not columns:
        return None
    rows = [[_title(key), *(_value(column.get(key)) for column in columns)] for key in order]
    left = f" The first {COLUMNS} labels." if len(groups) > COLUMNS else ""
    first = f" The first {len(differ)} differ." if len(differ) > 1 else " The first differs." if differ else ""
    tried = f" Tried, each with each: {joined([*map(_title, varied)])}." if varied else ""
    caption = f"What was chosen, or matters; whole configurations are at the end of the page.{first}{tried}{left}"
    return Grid(["setting", *(shown if len(groups) > 1 else ["value"])], rows, caption, words=True)


def without_effect(naming: str, how: Mapping[str, Any]) -> set[str]:
    """Return the options of a part, of which ``USED`` has the key ``naming``, that mean nothing beside its others."""
    by_name, name = USED[naming], str(how.get(naming.rpartition(".")[2]))
    if name not in by_name:
        return set()
    uses = {*by_name[name]}
    if name == "fedvarp" and not how.get("chances"):
        uses.discard("cap")
    if name == "fedau" and how.get("pool") == "domain":
        uses.discard("cutoff")
    return {option for several in by_name.values() for option in several} - uses


def _of_label(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what was chosen in the first run, and of others what only they have, such as options of a kind that varies."""
    result: dict[str, Any] = {}
    for run in runs:
        result = _chosen(run) | result
    return result


def _chosen(run: Run) -> dict[str, Any]:
    """Return what was chosen: without what means nothing beside it, and the partition of data that nobody dealt."""
    result = identity(run)
    sections = {
        key.partition("theory.")[0] for key in result if key.startswith(("algorithm.theory.", "algorithm.of.theory."))
    }
    idle = {section + name for section in sections for name in OF_THEOREMS}
    if run.summary.get("dealt") is False:
        result = {key: value for key, value in result.items() if not _below(key, ("population.partition",))}
    model = result.get("task.model")
    if isinstance(model, str) and model not in HIDDEN:
        idle.add("task.hidden")
    for key in result:
        if (naming := next((naming for naming in USED if key.endswith(f".{naming}")), None)) is not None:
            part = f"{key.rpartition('.')[0]}."
            how = {of.removeprefix(part): value for of, value in result.items() if of.startswith(part)}
            idle |= {part + of for of in without_effect(naming, how)}
    return {key: value for key, value in result.items() if key not in idle}


def _differs(key: str, columns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting has several values, or tells labels apart by being there at all."""
    values = {_value(column[key]) for column in columns if key in column}
    some = any(key not in column for column in columns) and any(_is_on(column.get(key)) for column in columns)
    return len(values) > 1 or (some and _told(key))


def _told(key: str) -> bool:
    """Whether a setting is shown though it does not differ."""
    matters = key in FIRST or _below(key, WHOLE)
    return matters and not _below(key, UNTOLD)


def _below(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _is_on(value: Any, key: str = "") -> bool:
    return value not in (*OFF, [], {}) and not any(key.endswith(of) and value == usual for of, usual in USUAL.items())


def _value(value: Any) -> str:
    if value is None:
        return MISSING
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return shortened(text, CELL)


def _place(key: str) -> tuple[int, bool]:
    """Where a setting stands, and that what it is called comes before its options."""
    if key in FIRST:
        return FIRST.index(key), False
    section = next((i for i, section in enumerate(WHOLE) if _below(key, (section,))), len(WHOLE))
    return len(FIRST) + section, not any(key in (f"{name}.name", f"{name}.kind") for name in WHOLE)


def _title(key: str) -> str:
    return key.removesuffix(".name").removesuffix(".kind").replace(".own.options.", ".")
