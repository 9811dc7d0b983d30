"""Callbacks and trackers that a configuration names; a tracker that fails does not end the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfleet.config.plugins import made, places
from fedfleet.config.schema import Config
from fedfleet.experiments.runfolder import RunFolder
from fedfleet.simulator.errors import one_line
from fedfleet.tracking.base import Tracker
from fedfleet.tracking.callback import Begun, Callback, checked
from fedfleet.tracking.registry import TRACKERS

AGAIN_S = 60.0  # until a tracker that failed is tried again; twice as long after each time


def configured(config: Config) -> Iterator[tuple[str, Callback]]:
    """Yield the callbacks that a configuration names, made anew, each by its name there. Raises ConfigError."""
    for here in places(config, ("callbacks",)):
        yield here.name, made(config, here, _check_callback)


def _check_callback(x: Any) -> None:
    checked([x])


def trackers(config: Config, folder: RunFolder, say: Callable[[str], None]) -> Iterator[Callback]:
    """Yield the trackers of a configuration."""
    for given in config.track:
        yield Guarded(given.name, TRACKERS.build(given), folder, say)


class Guarded(Callback):
    """A tracker. What goes wrong with it is said once, and the run goes on; now and then, and at the end, it is begun again."""

    def __init__(self, name: str, tracker: Tracker, folder: RunFolder, say: Callable[[str], None]):
        self._name, self._tracker, self._folder, self._say = name, tracker, folder, say
        self._run: Begun | None = None
        self._failed = False
        self._told = False
        self._wait_s, self._next_s = AGAIN_S, 0.0

    def start(self, run: Begun) -> None:
        """Begin, and say where to look."""
        self._run = run
        if self._tried(lambda: self._tracker.start(run)):
            self._say(f"{self._name}: {self._tracker.where}")

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> None:
        """Enter a round."""
        if not self._failed:
            self._tried(lambda: self._tracker.round(row, phases))
        elif time.monotonic() > self._next_s:
            self._begin_again()

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Enter an evaluation."""
        if not self._failed:
            self._tried(lambda: self._tracker.evaluation(done, metrics))

    def checkpoint(self, done: int, path: Path) -> None:
        """Have all that was entered where it is to be."""
        if not self._failed and self._run is not None:
            self._tried(lambda: self._tracker.checkpoint(done, path))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Enter the summary, if the run ever began."""
        if self._run is None:
            return
        if self._failed:
            self._begin_again()
        if not self._failed:
            self._tried(lambda: self._tracker.end(summary))

    def _begin_again(self) -> None:
        """Offer it everything there is."""
        assert self._run is not None
        rows = self._folder.tables.rows
        run = replace(self._run, done=len(rows), rows=rows)
        if self._tried(lambda: self._tracker.start(run)):
            self._failed, self._wait_s = False, AGAIN_S

    def _tried(self, what: Callable[[], Any]) -> bool:
        """Do it; say the first time what goes wrong."""
        try:
            what()
        except Exception as e:
            self._failed, self._next_s = True, time.monotonic() + self._wait_s
            self._wait_s *= 2
            if not self._told:
                self._told = True
                self._note(f"{type(e).__name__}: {one_line(e)}")
            return False
        return True

    def _note(self, why: str) -> None:
        self._say(f"track={self._name} failed, and the run goes on without: {why}")
        try:
            self._folder.log(
                [{"round": len(self._folder.tables), "event": "tracker_failed", "of": self._name, "why": why}]
            )
        except OSError:  # the disk may be full; the run itself will say so
            return
