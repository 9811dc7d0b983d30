"""Secure sums that have little of what clients sent: said once, and kept in the record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfleet.experiments.runfolder import EVENTS
from fedfleet.middleware.secure_aggregation.secured import SUM_LOST, sum_lost
from fedfleet.simulator.driver.simulate import RoundRecord


class LostSums:
    """Keeps the ``first`` event that says so, None where there is none, of the rounds of a run."""

    def __init__(self) -> None:
        self.first: Mapping[str, Any] | None = None

    def resume(self, folder: Path, done: int) -> None:
        """Find it in the folder of a run of which so many rounds are done."""
        if (path := folder / EVENTS).exists():
            events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            self.first = next((e for e in events if e["event"] == SUM_LOST and e["round"] < done), None)

    def note(self, record: RoundRecord, say: Callable[[str], None]) -> None:
        """Say what a round's events tell of sums, the first time alone, and leave out all others."""
        for p in record.phases:
            lost = [event for event in p.events if event["event"] == SUM_LOST]
            p.events = [event for event in p.events if event["event"] != SUM_LOST]
            if lost and self.first is None:
                self.first = {"round": record.index, "phase": p.phase, **lost[0]}
                p.events.append(lost[0])
                say(sum_lost(self.first))
