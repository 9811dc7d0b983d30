"""Tables of classes: recall and precision of final models, and which class they take for which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedfleet.report.meanings import meaning
from fedfleet.report.sheet import Grid, Heat
from fedfleet.report.tables import Run, Table, class_names, domain_names
from fedfleet.report.words import MISSING, mean_sd, share

CLASSES = 30  # of a table; of more, those that fare worst
CONFUSED = 20  # classes of a table of which is taken for which, at most
LABELS = 6  # such tables, at most
DOMAINS = 14  # columns, at most


def tables(groups: Mapping[str, Sequence[Run]]) -> list[Grid]:
    """Every table of classes there is a record for: of a run, or of the labels side by side."""
    kept = {label: [result for run in runs if (result := confusion(run)) is not None] for label, runs in groups.items()}
    kept = {label: result for label, result in kept.items() if result}
    if not kept:
        return []
    size = max(len(each) for result in kept.values() for each in result)
    kept = {label: [_grown(each, size) for each in result] for label, result in kept.items()}
    how = meaning(groups, "classes") or "Of test examples, by the model after the last round. "
    called = _names(groups, size)
    alone = len(groups) == 1 and len(next(iter(kept.values()))) == 1
    made = [_one(next(iter(kept.values()))[0], how, called) if alone else _side_by_side(kept, how, called)]
    if alone and (by_domain := _domains(next(iter(groups.values()))[0], size, domain_names(groups), called)):
        made.append(by_domain)
    if size <= CONFUSED:
        made += [
            _confused(label, np.sum(result, axis=0), len(groups) > 1, called)
            for label, result in list(kept.items())[:LABELS]
        ]
    return made


def _names(groups: Mapping[str, Sequence[Run]], size: int) -> list[str]:
    """Return what the classes are called: by number, and by name where all runs' data have the same."""
    names = class_names(groups)
    return [f"class {k}" + (f": {names[k]}" if k < len(names) else "") for k in range(size)]


def confusion(run: Run, domain: float | None = None) -> np.ndarray | None:
    """Return how many test examples of each class (rows) the last model took for each (columns), (k, k); of one domain if given.

    None where a run has kept nothing of the kind.
    """
    return counted(run.classes, domain)


def counted(classes: Table, domain: float | None = None) -> np.ndarray | None:
    """Return the same of a table of classes."""
    columns = [classes.get(name) for name in ("label", "predicted", "examples")]
    if any(column is None or column.dtype != np.float64 for column in columns) or not len(classes["label"]):
        return None
    label, said, examples = columns
    whole = all(np.isfinite(column).all() and (column >= 0).all() for column in columns)  # type: ignore[union-attr]
    if not whole or max(label.max(), said.max()) > 1e5:  # type: ignore[union-attr]
        return None
    mine = np.ones(len(label), bool) if domain is None else classes["domain"] == domain  # type: ignore[arg-type]
    size = int(max(label.max(), said.max())) + 1  # type: ignore[union-attr]
    if size > 2000:  # a matrix of all pairs would be large, and nobody reads it
        return None
    result = np.zeros((size, size))
    np.add.at(result, (label[mine].astype(int), said[mine].astype(int)), examples[mine])  # type: ignore[index]
    return result


def recall(result: np.ndarray) -> np.ndarray:
    """Share of the examples of each class (k,) that the model says are of it; NaN where there is none."""
    return _over(result.diagonal(), result.sum(1))


def precision(result: np.ndarray) -> np.ndarray:
    """Share of those that the model says are of a class (k,) that are; NaN where it says so of none."""
    return _over(result.diagonal(), result.sum(0))


def _over(these: np.ndarray, of: np.ndarray) -> np.ndarray:
    return np.divide(these, of, out=np.full(len(of), np.nan), where=of > 0)


def _one(result: np.ndarray, how: str, called: Sequence[str]) -> Grid:
    right, sure = recall(result), precision(result)
    off = result - np.diag(result.diagonal())
    rows = []
    for k in _worst(right):
        taken = int(off[k].argmax())
        often = (
            f"{called[taken].removeprefix('class ')}, {share(off[k, taken] / result[k].sum())}"
            if off[k, taken]
            else MISSING
        )
        rows.append([called[k], f"{result[k].sum():,.0f}", _told(right[k]), _told(sure[k]), often])
    head = ["class", "examples", "recall", "precision", "most often taken for"]
    text = "Recall: the share of a class that is found; precision: the share of what is said to be of it that is."
    return Grid(head, rows, f"{how}{text}{_left(len(result))}", "Recall and precision")


def _side_by_side(kept: Mapping[str, Sequence[np.ndarray]], how: str, called: Sequence[str]) -> Grid:
    """Recall by class, a column a label: mean and spread over its seeds, never over labels."""
    each = {label: np.array([recall(result) for result in several]) for label, several in kept.items()}
    every = np.concatenate(list(each.values()))
    known = np.isfinite(every)
    means = np.where(known.any(0), np.where(known, every, 0).sum(0) / np.maximum(known.sum(0), 1), np.nan)
    rows = [[called[k], *(mean_sd(values[:, k].tolist()) for values in each.values())] for k in _worst(means)]
    text = (
        "Recall: the share of a class that is found. Mean ± sample standard deviation over seeds, if there are several."
    )
    return Grid(["recall", *each], rows, f"{how}{text}{_left(every.shape[1])}", "Recall by class")


def _domains(run: Run, size: int, names: Sequence[str], called: Sequence[str]) -> Grid | None:
    numbers = np.unique(run.classes["domain"]).tolist() if "domain" in run.classes else []
    if not 2 <= len(numbers) <= DOMAINS:
        return None
    each = [recall(_grown(result, size)) for d in numbers if (result := confusion(run, d)) is not None]
    told = [names[int(d)] if d < len(names) else f"domain {d:.0f}" for d in numbers]
    rows = [
        [called[k], *(Heat(_told(values[k]), _finite(values[k])) for values in each)]
        for k in _worst(np.nanmin(each, 0))
    ]
    return Grid(
        ["recall", *told], rows, f"Of the test examples of each domain.{_left(size)}", "Recall by class and domain"
    )


def _confused(label: str, result: np.ndarray, several: bool, called: Sequence[str]) -> Grid:
    of = np.maximum(result.sum(1, keepdims=True), 1)
    rows = [[called[k], *(Heat(_percent(part), float(part)) for part in row)] for k, row in enumerate(result / of)]
    head = ["is, and is taken for", *(f"{k}" for k in range(len(result)))]
    text = "Per cent of the examples of a class (row) that are taken for each (column); the diagonal is right. Empty: none."
    return Grid(head, rows, text, f"Taken for which{f': {label}' if several else ''}")


def _worst(values: np.ndarray) -> list[int]:
    """The classes of a table, in their order: all, or of many those of which least is found."""
    if len(values) <= CLASSES:
        return list(range(len(values)))
    order = np.argsort(np.where(np.isfinite(values), values, math.inf), kind="stable")
    return sorted(order[:CLASSES].tolist())


def _left(size: int) -> str:
    return f" The {CLASSES} of {size} classes of which least is found." if size > CLASSES else ""


def _told(value: float) -> str:
    return share(value) if math.isfinite(value) else MISSING


def _percent(part: float) -> str:
    return "" if part == 0 else "<1" if part < 0.005 else ">99" if 0.995 < part < 1 else f"{100 * part:.0f}"


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def _grown(result: np.ndarray, size: int) -> np.ndarray:
    return np.pad(result, (0, size - len(result)))
