"""What a search for hyper-parameters has found, as its report and the terminal show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfleet.report.words import quantity

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
    def warning(self) -> str:
        """Return what is to be said where the test examples chose."""
        better = f"eval/validation_{self.metric.removeprefix('eval/')}"
        return (
            f"The winner was chosen on the test examples, so that its {self.metric} is too good for a result: "
            f"evaluation.validation=0.1 and the metric {better} keep examples aside for choosing."
        )
