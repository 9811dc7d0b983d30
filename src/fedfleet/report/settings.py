"""The table of settings: what was chosen of an experiment, or matters, side by side for every label."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedfleet.report.groups import identity
from fedfleet.report.sheet import Grid
from fedfleet.report.tables import Run
from fedfleet.report.words import MISSING, shortened

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
    "population.partition.min_size",
    "task.own.options",
)
"""Settings that are shown only where they differ."""
OF_OPTIMISERS = ("beta1", "beta2", "eps")  # which most do not use
OF_THEOREMS = ("lr", "dual_lr", "dual.lr", "lr_schedule", "decay", "alpha")  # which set them where `theory` is given
OFF = (None, False, "none", "", "[]", "{}")
USUAL = {"lr_schedule.kind": "constant", "lr_schedule.by": "round", "client_optimizer.state": "reset"}  # as if not said
CELL = 60  # characters
COLUMNS = 8  # labels side by side, at most


def settings(groups: Mapping[str, Sequence[Run]], varied: Collection[str] = ()) -> Grid | None:
    """A row a setting, a column a label; those that differ first, but for what a study has varied. None without configurations."""
    shown = dict(list(groups.items())[:COLUMNS])
    columns = [_chosen(group[0]) for group in shown.values() if group]
    keys = [key for key in dict.fromkeys(key for column in columns for key in column) if key not in varied]
    differ = [key for key in keys if _differs(key, columns)]
    common = [key for key in keys if key not in differ and _told(key) and any(_is_on(c.get(key), key) for c in columns)]
    order = [*sorted(differ, key=_place), *sorted(common, key=_place)]
    if not order:
        return None
    rows = [[_title(key), *(_value(column.get(key)) for column in columns)] for key in order]
    left = f" The first {COLUMNS} labels." if len(groups) > COLUMNS else ""
    first = f" The first {len(differ)} differ." if len(differ) > 1 else " The first differs." if differ else ""
    caption = f"What was chosen, or matters; whole configurations are at the end of the page.{first}{left}"
    return Grid(["setting", *(shown if len(groups) > 1 else ["value"])], rows, caption, words=True)


def _chosen(run: Run) -> dict[str, Any]:
    """What was chosen: without the defaults of what a theorem sets in their place, and the partition of data that nobody dealt."""
    result = identity(run)
    sections = {
        key.partition("theory.")[0] for key in result if key.startswith(("algorithm.theory.", "algorithm.of.theory."))
    }
    set_by = {section + name for section in sections for name in OF_THEOREMS}
    if run.summary.get("dealt") is False:
        result = {key: value for key, value in result.items() if not _below(key, ("population.partition",))}
    model = result.get("task.model")
    if isinstance(model, str) and (":" in model or model == "logistic"):  # which have no hidden layers of ours
        set_by.add("task.hidden")
    for kind in ("algorithm.correction", "algorithm.of.correction"):
        if result.get(f"{kind}.kind") == "none":  # whose options mean nothing
            set_by |= {key for key in result if key.startswith(f"{kind}.") and key != f"{kind}.kind"}
    return {key: value for key, value in result.items() if key not in set_by}


def _differs(key: str, columns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting has several values, or tells labels apart by being there at all."""
    values = {_value(column[key]) for column in columns if key in column}
    some = any(key not in column for column in columns) and any(_is_on(column.get(key)) for column in columns)
    return len(values) > 1 or (some and _told(key))


def _told(key: str) -> bool:
    """Whether a setting is shown though it does not differ."""
    matters = key in FIRST or _below(key, WHOLE)
    return matters and not _below(key, UNTOLD) and key.rpartition(".")[2] not in OF_OPTIMISERS


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
