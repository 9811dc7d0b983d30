"""A table as text, ``metrics.csv``: a line a round, for whatever reads such."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfleet.files.writing import appending, replacing
from fedfleet.simulator.registry import Options
from fedfleet.tracking.base import Tracker, place
from fedfleet.tracking.callback import Begun

STEP = "rounds"


class CsvOptions(Options):
    """A line a round of numbers."""

    dir: str | None = None
    """Folder in which each run's ``metrics.csv`` gets a folder of its own; the run folder itself if not given."""


class Csv(Tracker):
    """Writes a line a round as it ends, on a resume all of them anew from the tables. The column ``rounds`` counts those done."""

    def __init__(self, options: CsvOptions):
        self._options = options

    def open(self, run: Begun) -> None:
        """Begin the file anew."""
        self._path: Path = place(self._options.dir, run, "") / "metrics.csv"
        self._path.unlink(missing_ok=True)
        self._columns: list[str] = [STEP]
        self._last = -1
        self.where = str(self._path)

    def log(self, step: int, result: Mapping[str, float]) -> None:
        """Add a line. One that has new columns, or belongs to the last line, has the file written anew."""
        new = [name for name in result if name not in self._columns]
        self._columns += new
        line = {STEP: step, **result}
        if new or step == self._last:
            self._rewrite(line)
        else:
            with appending(self._path) as file:
                csv.DictWriter(file, self._columns).writerow(line)
        self._last = step

    def _rewrite(self, line: Mapping[str, Any]) -> None:
        lines: list[dict[str, Any]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                lines = list(csv.DictReader(file))
        if line[STEP] == self._last:
            lines[-1] |= line
        else:
            lines.append(dict(line))
        with replacing(self._path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(lines)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The summary has a file of its own in the run folder."""
