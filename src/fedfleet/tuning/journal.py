"""The journal of a search: what it decided and measured, a line an event. A resumed search goes on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfleet.files.documents import checked_event, json_lines, sealed_event
from fedfleet.files.writing import appending, write_text
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.tuning.schedules import Step, Trial

JOURNAL = "journal.jsonl"


class Journal:
    """The trials of a search, and the file that has them. Raises ConfigError for one that was changed by hand."""

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL
        self.trials: list[Trial] = []
        lines = list(json_lines(self._path))
        if cut := lines[-1:] == [None]:  # it was being written when the process was killed
            lines.pop()
        for number, line in enumerate(lines, start=1):
            try:
                self._enter(**checked_event(line or {}))
            except (KeyError, IndexError, TypeError, ValueError) as e:
                raise ConfigError(
                    f"{self._path}: line {number} is damaged, or does not follow from what is above ({one_line(e)}): bring back "
                    f"the file, or choose another folder"
                ) from None
        if cut:
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def begin(self, step: Step, values: Mapping[str, Any] | None = None) -> None:
        """Enter that a trial is on its way to a rung; ``values`` are those of one that is new."""
        new = {} if values is None else {"values": dict(values)}
        self._add({"event": "begin", **step._asdict(), **new})

    def measure(self, step: Step, score: float | None, error: str | None) -> None:
        """Enter how a trial did at a rung, None where it failed."""
        self._add({"event": "measure", **step._asdict(), "score": score, "error": error})

    def _add(self, event: dict[str, Any]) -> None:
        self._enter(**event)
        with appending(self._path) as file:
            file.write(sealed_event(event))

    def _enter(
        self,
        event: str,
        trial: int,
        rung: int,
        values: Mapping[str, Any] | None = None,
        score: float | None = None,
        error: str | None = None,
    ) -> None:
        if values is not None:
            self.trials.append(Trial(trial, values))
        known = self.trials[trial]
        if known.number != trial or len(known.scores) != rung:
            raise ValueError("out of order")
        if event == "begin":
            known.begun = rung
        else:
            known.scores.append(score)
            known.error = error
