"""The tables of a study: a row a trial, a row an evaluation, a row a client, read from the trials' run folders.

`docs/guides/study.md` says what the columns mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedfleet.files import parquet
from fedfleet.files.summary import KEPT
from fedfleet.report.shown import asked_for, parted
from fedfleet.report.significance import Ranks, contrast, difference, ranked
from fedfleet.report.tables import Run, answered, counted, gini, read, skipped, told_in
from fedfleet.report.traps import worst_recalls
from fedfleet.report.values import names, plain
from fedfleet.simulator.driver.evaluation import less_is_better

Frame = Any
"""A pd.DataFrame; what its methods return is beyond the type checker."""
MARK = "study.json"
"""Tells the folder of a study from any other."""
DONE = ("finished", "stopped")
"""The status of a run that ended as it was asked to."""
SENT = ("floats", "bytes_up", "bytes_down")
"""What has been sent, floats both ways."""
TO_TARGET = ("target/rounds", *(f"target/{what}" for what in SENT), "target/virtual_s")
WORST = "worst_recall"
"""The share that the last model finds of the test examples of the class which it serves worst."""
COUNTED = ("clients", "worst_class", "aborted_attempts", "rounds_done", "skipped_rounds", *SENT)
"""Whole numbers, missing where a trial failed."""
WALL_CLOCK = ("seconds",)
"""Columns that differ from one time to the next."""


class Target(NamedTuple):
    """A metric, such as "eval/auc", and the value it should reach from below (`at_least`) or from above."""

    metric: str
    at_least: bool
    value: float

    def __str__(self) -> str:
        return f"{self.metric.removeprefix('eval/')} {'≥' if self.at_least else '≤'} {self.value:g}"


@dataclass(frozen=True)
class Entry:
    """A trial: the columns that tell it from the others, its run folder, and its error if it failed."""

    keys: Mapping[str, Any]
    folder: Path
    error: str | None = None


@dataclass(frozen=True)
class Tables:
    """`study` has a row a trial, `curves` a row an evaluation, `participation` a row a client that was ever invited.

    `runs` are the trials as read, without their larger tables; None for those that failed.
    """

    varied: Mapping[str, Sequence[Any]]
    target: Target | None
    study: Frame
    curves: Frame
    participation: Frame
    runs: Sequence[Run | None]
    compared_with: str | None = None
    """The label that the others are compared with; the first one if None."""
    sought: float | None = None
    """A difference of the first metric for which the seeds are told that it would need."""

    @property
    def reference(self) -> str:
        """The label that the others are compared with."""
        return self.labels[0] if self.compared_with is None else self.compared_with

    @property
    def other_labels(self) -> list[str]:
        """The labels but the reference."""
        return [label for label in self.labels if label != self.reference]

    @property
    def sent(self) -> Sequence[str]:
        """The columns that tell traffic: floats, or bytes where it is compressed."""
        return SENT[:1] if told_in(run for run in self.runs if run is not None) == "floats" else SENT[1:]

    @property
    def labels(self) -> list[str]:
        """The labels in order."""
        return list(dict.fromkeys(self.study["label"]))

    @property
    def metrics(self) -> list[str]:
        """The metrics, the target's first."""
        result = [c.removeprefix("final/") for c in self.study.columns if c.startswith("final/")]
        first = self.target.metric.removeprefix("eval/") if self.target else ""
        return sorted(result, key=lambda m: m != first)

    @cached_property
    def original(self) -> Mapping[tuple[Any, ...], tuple[Any, ...]]:
        """Of each point, values of the varied keys, the first point that has its results: all final metrics, labels and seeds.

        Where nobody drops out, every model of dropout is one and the same.
        """
        columns = [c for c in self.study if c.startswith(("final/", "best/"))]
        first: dict[bytes, tuple[Any, ...]] = {}
        result = {}
        for values in itertools.product(*self.varied.values()):
            rows = selected(self.study, dict(zip(self.varied, values, strict=True))).sort_values(["label", "seed"])
            found = rows[columns].to_numpy(dtype=float)
            who = repr(rows[["label", "seed"]].to_numpy().tolist()).encode()
            known = bool(np.isfinite(found).any())
            same = first.setdefault(who + found.tobytes(), values) if known else values
            result[values] = same
        return result

    @property
    def parted(self) -> tuple[list[str], list[str]]:
        """The metrics that a page shows, and those that it folds."""
        first = [self.target.metric.removeprefix("eval/")] if self.target else []
        return parted(self.metrics, {*asked_for([run for run in self.runs if run is not None]), *first})

    def write(self, folder: Path) -> None:
        """Write the three as Parquet, each at once."""
        for name in ("study", "curves", "participation"):
            parquet.write(getattr(self, name), folder / f"{name}.parquet")


def collect(
    entries: Sequence[Entry],
    varied: Mapping[str, Sequence[Any]],
    target: Target | None,
    reference: str | None = None,
) -> Tables:
    """Read the trials in their order; labels are compared with the reference. Raises ValueError on a file that cannot be read."""
    words = {
        key: dict(zip(map(plain, values), names(values), strict=True))
        for key, values in varied.items()
        if not all(map(_number, values))
    }
    rows, curves, counts, runs = [], [], [], []
    for entry in entries:
        keys = {name: words[name][plain(value)] if name in words else value for name, value in entry.keys.items()}
        run = (
            None if entry.error is not None else read(entry.folder, KEPT)
        )  # its configuration is compared with the study's
        if run is None or run.summary.get("status") not in DONE:
            error = entry.error or str((run and run.summary.get("error")) or "it did not end")
            rows.append({**keys, "status": "failed", "error": error})
            runs.append(None)
            continue
        curve, part = evaluations(run), participation(run)
        rows.append({**keys, "status": run.summary["status"], "error": None, **_row(run, curve, part, target)})
        curves.append(curve.assign(**keys)[[*keys, *curve.columns]])
        counts.append(part.assign(**keys)[[*keys, *part.columns]])
        runs.append(replace(run, phases={}, outcomes={}, clients={}))
    study: Frame = pd.DataFrame(rows)
    study = study[list(_order(study.columns, list(entries[0].keys)))]
    return Tables(
        {key: list(words[key].values()) if key in words else list(values) for key, values in varied.items()},
        target,
        study.astype({"error": "object"} | {c: "Int64" for c in COUNTED if c in study}),
        pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(),
        pd.concat(counts, ignore_index=True) if counts else pd.DataFrame(),
        runs,
        reference,
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def evaluations(run: Run) -> Frame:
    """A row an evaluation: rounds done, what it took and what was sent by then, and `eval/<metric>`."""
    columns = [f"eval/{m}" for m in run.metrics]
    done = run.rounds.get("rounds_completed", np.empty(0))
    none = np.zeros(len(done))
    total = lambda name: run.rounds.get(f"total/{name}", none)  # noqa: E731
    sent = {"floats": total("floats_up") + total("floats_down"), **{name: total(name) for name in SENT[1:]}}
    x = {"round": done, "virtual_s": total("virtual_s"), **sent}
    y = {c: run.rounds.get(c, np.full(len(done), np.nan)) for c in columns}
    start = {c: run.summarised("initial", c) for c in columns}
    first = pd.DataFrame([dict.fromkeys(x, 0.0) | {c: math.nan if v is None else v for c, v in start.items()}])
    result: Frame = pd.concat([first, pd.DataFrame(x | y)], ignore_index=True).astype(
        {"round": "int64", **dict.fromkeys(SENT, "int64")}
    )
    return result[result[columns].notna().any(axis=1)].reset_index(drop=True) if columns else result.iloc[:0]


def participation(run: Run) -> Frame:
    """A row a client that was ever invited: in how many rounds it was invited, and in how many it was heard."""
    if counted(run):
        of = {"client": "client", "rounds_invited": "invited", "rounds_heard": "completed"}
        return pd.DataFrame({name: run.outcomes[column] for column, name in of.items()}).astype("int64")
    if not {"round", "client", "outcome"} <= set(run.outcomes):
        return pd.DataFrame({"client": [], "invited": [], "completed": []}, dtype="int64")
    rows: Frame = (
        pd.DataFrame({c: run.outcomes[c] for c in ("round", "client")}).astype("int64").assign(completed=answered(run))
    )
    by_round = rows.groupby(["client", "round"])["completed"].max().groupby("client")
    result = pd.DataFrame({"invited": by_round.size(), "completed": by_round.sum()})
    return result.astype("int64").reset_index()


def _row(run: Run, curve: Frame, part: Frame, target: Target | None) -> dict[str, Any]:
    size = run.get("population", "clients") or len(part)
    heard = part["completed"].to_numpy()
    row: dict[str, Any] = {"clients": size}
    for section in ("final", "best", *(["selected"] if run.section("selected") else [])):
        row |= {f"{section}/{m}": run.summarised(section, f"eval/{m}") for m in run.metrics}
    for label, found in worst_recalls([run]):
        row |= {WORST: found, "worst_class": label}
    if target is not None:
        row |= dict(zip(TO_TARGET, reached(curve, target), strict=True))
    row |= {"gini": gini(heard[heard > 0], size), "never_completed": 1 - float((heard > 0).sum()) / size}
    row |= {
        "completed_share": _share(run, "completed", "merged_stale"),
        "unavailable_share": _share(run, "unavailable"),
    }
    row |= {"aborted_attempts": aborted(run), "rounds_done": run.rounds_done, "skipped_rounds": skipped(run)}
    sent = {name: int(run.total(name) or 0) for name in ("floats_up", "floats_down", *SENT[1:])}
    row |= {"floats": sent["floats_up"] + sent["floats_down"], **{name: sent[name] for name in SENT[1:]}}
    return row | {"virtual_s": run.total("virtual_s"), "seconds": run.summarised("seconds")}


def aborted(run: Run) -> int:
    """Attempts at rounds that were aborted."""
    attempts: Any = pd.Series(run.phases.get("attempt", np.empty(0)), dtype=float)
    return int(attempts.groupby(run.phases.get("round", np.empty(0))).max().sum())


def _share(run: Run, *counts: str) -> float:
    invited = run.total("invited")
    return sum(run.total(c) or 0.0 for c in counts) / invited if invited else math.nan


def reached(curve: Frame, target: Target) -> tuple[float, ...]:
    """What `TO_TARGET` names by the first evaluation that found the target reached; nan if none did."""
    values: Any = curve.get(target.metric, pd.Series(dtype=float))
    there = np.flatnonzero(values >= target.value if target.at_least else values <= target.value)
    if not len(there):
        return (math.nan,) * len(TO_TARGET)
    row = curve.iloc[there[0]]
    return tuple(float(row[name]) for name in ("round", *SENT, "virtual_s"))


def _order(columns: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Keys and outcome first, wall-clock columns last."""
    first = [*keys, "status", "error"]
    yield from first
    yield from (c for c in columns if c not in first and c not in WALL_CLOCK)
    yield from (c for c in WALL_CLOCK if c in columns)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean of the finite values and half the width of its 95 % t-interval; nan where there are too few."""
    result = difference(values)
    return result.mean, result.half


def paired(these: Frame, those: Frame, column: str) -> np.ndarray:
    """Differences of a column, these less those, over the seeds for which both have a value."""
    of = lambda rows: rows.set_index("seed")[column].astype(float)  # noqa: E731
    both = pd.concat([of(these), of(those)], axis=1).dropna().to_numpy()
    return contrast([both[:, 0]], [both[:, 1]])


def selected(rows: Frame, point: Mapping[str, Any]) -> Frame:
    """Return the rows at a point: values of varied keys."""
    for key, value in point.items():
        rows = rows[rows[key] == value]
    return rows


def combinations(tables: Tables, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of varied keys."""
    for values in itertools.product(*(tables.varied[key] for key in keys)):
        yield dict(zip(keys, values, strict=True))


def _is_first(tables: Tables, point: Mapping[str, Any]) -> bool:
    return tables.original[tuple(point.values())] == tuple(point.values())


def ranks(tables: Tables, metric: str) -> Ranks | None:
    """Return the ranks of the labels by their mean final metric at each combination of varied values; None where too few."""
    points = [point for point in combinations(tables, list(tables.varied)) if _is_first(tables, point)]
    by = tables.study.groupby(["label", *tables.varied])[f"final/{metric}"].mean()
    values = [[by.get((label, *point.values()), np.nan) for label in tables.labels] for point in points]
    known = np.array(values, dtype=float)
    if np.isfinite(known).all(axis=1).sum() < 2 or len(tables.labels) < 3:
        return None
    return ranked(known, least_is_best=less_is_better(metric))
