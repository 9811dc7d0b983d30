"""Several finished runs, as they are returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import pandas as pd

from fedfleet.experiments.frames import Whole
from fedfleet.experiments.run import Run
from fedfleet.report import latex
from fedfleet.report.traps import worst_class_of
from fedfleet.simulator.errors import ConfigError


@dataclass(frozen=True, repr=False)
class Runs(Sequence[Run]):
    """The runs of one configuration: those of every label of ``compare``, point of ``vary`` and seed, in this order.

    Attributes:
        folder: that of all of them, with ``report.html``.
        runs: the finished runs.
        keys: of each what tells it from the others: ``label``, the keys that vary, ``seed``.

    """

    folder: Path
    runs: Sequence[Run]
    keys: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.runs)

    @overload
    def __getitem__(self, at: int) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Run]: ...
    def __getitem__(self, at: int | slice) -> Run | Sequence[Run]:
        """Return one, or some."""
        return self.runs[at]

    def __iter__(self) -> Iterator[Run]:
        """Go through them."""
        return iter(self.runs)

    def __repr__(self) -> str:
        """Return a line."""
        return f"Runs({str(self.folder)!r}: {len(self)} runs)"

    @property
    def table(self) -> pd.DataFrame:
        """A row a run: what tells it from the others, its final metrics, and of a classifier the recall of its worst class."""
        rows = []
        for run, keys in zip(self.runs, self.keys, strict=True):
            final = {name.removeprefix("eval/"): value for name, value in (run.summary.get("final") or {}).items()}
            if (worst := worst_class_of(run.folder)) is not None:
                final["worst_recall"] = worst[1]
            rows.append({**keys, **final})
        return Whole(rows)

    def mean(self) -> pd.DataFrame:
        """Return the means of the final metrics over seeds, and their sample standard deviations, a row a label and point."""
        known = list(dict.fromkeys(key for keys in self.keys for key in keys if key != "seed"))
        table = self.table
        metrics = [c for c in table if c not in (*known, "seed")]
        table = table.assign(**{key: table[key].map(str) for key in known if table[key].dtype == object})
        by: Any = table.groupby(known or [""] * len(table), sort=False, dropna=False)
        return Whole(by[metrics].agg(["mean", "std"]))

    def latex(
        self, metrics: Sequence[str] | None = None, *, caption: str | None = None, label: str = "tab:results"
    ) -> str:
        """Return the final metrics as a table in LaTeX (booktabs): mean and sample standard deviation over seeds.

        Bold is the best label at each point, with those that follow it and cannot be told from it by tests paired by seed, where
        some can.

        Args:
            metrics: which, such as ["accuracy"]; all if not given.
            caption: in the place of the one made.
            label: for ``\\ref``.

        Raises ConfigError for a metric that no run has.

        """
        table = self.table
        keys = list(dict.fromkeys(key for keys in self.keys for key in keys if key != "seed"))
        there = [str(column) for column in table if column not in (*keys, "seed")]
        for metric in metrics or ():
            if metric not in there:
                raise ConfigError(f"metrics: {metric!r} is none of these runs' metrics: choose of {', '.join(there)}")
        return latex.finals(table, keys, metrics or there, caption=caption, label=label)

    @property
    def rounds(self) -> pd.DataFrame:
        """Return ``rounds.parquet`` of all of them, with what tells each from the others in front."""
        frames = []
        for run, keys in zip(self.runs, self.keys, strict=True):
            frame = run.rounds
            frames.append(pd.concat([pd.DataFrame([{**keys}] * len(frame), index=frame.index), frame], axis=1))
        return Whole(pd.concat(frames, ignore_index=True))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: final metrics, mean and spread over seeds."""
        return self.mean().to_html(float_format=lambda value: f"{value:.4g}")
