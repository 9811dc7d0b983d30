"""Findings of a search for hyper-parameters, as its report and the terminal show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfleet.report.words import joined, quantity

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a search has found.

    Attributes:
        rows: one a trial, in their order: trial, the searched keys, state, rounds, value, after/<rounds> for each rung (None where
            it did not come, or failed), bytes, seconds, error.
        keys: those searched; `log` are drawn in the logarithm, `choices` from values.
        metric: what trials are compared by; `goal` max or min, `of` last or best; `measured_on` says of which examples it is.
        rungs: in rounds.
        winner: number of the best trial, None if all failed; `final` are its last metrics, `best` its configuration as text.
        cost: rounds and bytes, spent and for all trials in full.
        importances: of the keys; empty where nothing can be said.

    """

    rows: Sequence[Row]
    keys: Sequence[str]
    log: Sequence[str]
    choices: Mapping[str, Sequence[Any]]
    metric: str
    goal: str
    of: str
    rungs: Sequence[int]
    scheduler: str
    reduction: int
    searcher: str
    seeds: Sequence[int]
    measured_on: str
    on_test: bool
    winner: int | None
    final: Mapping[str, float]
    best: str | None
    cost: Mapping[str, tuple[float, float]]
    importances: Mapping[str, float]

    def ranked(self) -> list[Row]:
        """Return the rows, those that went furthest first, of these the best first, and those that failed last."""
        sign = -1 if self.goal == "max" else 1
        return sorted(
            self.rows,
            key=lambda r: (r["state"] == "failed", -self.passed(r), sign * (r["value"] or 0.0), r["trial"]),
        )

    def passed(self, row: Row) -> int:
        """Return how many rungs a trial came to."""
        return sum(row[f"after/{rounds}"] is not None for rounds in self.rungs)

    def state(self, row: Row) -> str:
        """Return how a trial ended, as it is read."""
        return f"stopped at rung {self.passed(row)}" if row["state"] == "stopped" else str(row["state"])

    @property
    def spent(self) -> str:
        """Return what it cost, in a sentence."""
        (rounds, all_rounds), (size, all_bytes) = self.cost["rounds"], self.cost["bytes"]
        return (
            f"cost: {rounds:,} rounds and {quantity(size, 'B')}; all {len(self.rows)} trials in full would take {all_rounds:,} "
            f"rounds and {quantity(all_bytes, 'B')}"
        )

    @property
    def failure(self) -> str | None:
        """Return why there is no winner, None where there is one."""
        return (
            None if self.winner is not None else f"all {len(self.rows)} trials failed; trial 0: {self.rows[0]['error']}"
        )

    @property
    def warning(self) -> str:
        """Return what is to be said where the test examples chose."""
        better = f"eval/validation_{self.metric.removeprefix('eval/')}"
        return (
            f"The winner was chosen on the test examples, so that its {self.metric} is too good for a result: "
            f"evaluation.validation=0.1 and the metric {better} keep examples aside for choosing."
        )


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The winner of one search among several, if it has one.

    Attributes:
        name: of the search: its label and point.
        folder: of the search, below that of all.
        point: the values of what varies, by key.
        found: all that the search has found.
        edges: by searched key of which the winner has a value at an edge, where the grid is to be extended: "above 10".

    """

    name: str
    label: str
    folder: str
    algorithm: str
    point: Mapping[str, Any]
    found: Findings
    edges: Mapping[str, str]

    @property
    def row(self) -> Row:
        """Return the winner's row; empty where there is none."""
        return {} if self.found.winner is None else self.found.rows[self.found.winner]


@dataclass(frozen=True, kw_only=True)
class Winners:
    """The findings of several searches.

    Attributes:
        each: in the order of labels and points.
        varied: values by key.
        best: a configuration of all winners, as text; None where all failed.
        lost: what was left out at some labels and points, and why.

    """

    each: Sequence[Winner]
    varied: Mapping[str, Sequence[Any]]
    best: str | None
    lost: Sequence[str]

    @property
    def keys(self) -> list[str]:
        """Return all that was searched anywhere."""
        return list(dict.fromkeys(key for each in self.each for key in each.found.keys))

    @property
    def metric(self) -> str:
        """Return what trials were compared by."""
        return self.each[0].found.metric

    @property
    def failed(self) -> dict[str, str]:
        """Return by name why searches have no winner."""
        return {each.name: failure for each in self.each if (failure := each.found.failure) is not None}

    @property
    def to_extend(self) -> list[str]:
        """Return lines that say which grids are to be extended, and where."""
        result: dict[tuple[str, str], list[str]] = {}
        for each in self.each:
            for edge in each.edges.items():
                result.setdefault(edge, []).append(each.name)
        return [
            f"{key}: extend the grid {where}: {joined(names)} {'is' if len(names) == 1 else 'are'} at its edge"
            for (key, where), names in result.items()
        ]
