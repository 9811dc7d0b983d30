"""Progress of a run: evaluations as lines, rounds as one line that moves on a terminal and in a notebook; on standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedfleet.tracking.callback import Begun, Callback, checked

PLAIN_EVERY_S, NOTEBOOK_EVERY_S = 5.0, 0.25
PLAIN_WIDTH = 100  # of a line that goes to no terminal
MINUTE, HOUR = 60, 3600


class Progress(Callback):
    """Shows rounds as they end: round, the first metric and another, completed of invited, rounds/s, time left.

    Every command shows it, and so do ``fedfleet.run``, ``run_all`` and ``resume`` unless ``progress=False``. It goes to standard
    error. On a terminal evaluations stay above a line that moves, in a notebook one line replaces itself, elsewhere lines have at
    most 100 columns. All else is in the tables.
    """

    def __init__(self, console: Console | None = None, *, silent: bool = False):
        self._console = None if silent else console or Console(stderr=True)
        self._live: Live | None = None
        self._handle: Any = None  # of the line in a notebook
        self._started = time.monotonic()
        self._shown = 0.0
        self._metrics: dict[str, float] = {}
        self._measured = 0  # rounds done when they were
        self._before = self._rounds = 0

    @classmethod
    def silent(cls) -> Progress:
        """Return one that shows nothing."""
        return cls(silent=True)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            self._console.print(Text(text), soft_wrap=True)

    def wait(self, text: str) -> None:
        """Print a line on what is waited for, where somebody watches."""
        if self._console is not None and (self._console.is_terminal or self._console.is_jupyter):
            self.say(text)

    def result(self, text: str) -> None:
        """Print a line of what came of it, on standard output."""
        if self._console is not None:
            Console().print(Text(text), soft_wrap=True)

    def start(self, run: Begun) -> None:
        """Show the initial model's ``eval/<metric>`` values; of a run that goes on, those of its last evaluation."""
        self._started = self._shown = time.monotonic()
        self._before, self._rounds = run.done, run.rounds
        self._metrics, self._measured = _known(run.initial), 0
        for row in run.rows:
            self.evaluation(row["round"] + 1, {k: v for k, v in row.items() if k.startswith("eval/")})
        self.say(f"going on after {run.done} rounds" if run.done else f"initial model: {_told(self._metrics)}")

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation, to be shown with the next round."""
        if known := _known(metrics):
            self._metrics, self._measured = known, done

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> None:
        """Show a row of ``rounds.parquet``, and the counts of its phases, each attempt for itself."""
        if self._console is None:
            return
        done = row["round"] + 1
        self.evaluation(done, {k: v for k, v in row.items() if k.startswith("eval/")})
        stays, last = self._measured == done, done == self._rounds
        if self._console.is_jupyter:
            self._replace(self._line(phases, done, PLAIN_WIDTH), last=last)
        elif self._console.is_terminal:
            line = self._line(phases, done, self._console.width)
            self._move("" if stays and last else line, now=stays)  # for what is said draws again what was drawn last
            if stays:
                self.say(line)
        elif stays or last or time.monotonic() - self._shown > PLAIN_EVERY_S:
            self._shown = time.monotonic()
            self.say(self._line(phases, done, PLAIN_WIDTH))

    def _move(self, line: str, *, now: bool) -> None:
        """Show a line on a terminal, in the place of the one before: now, or with the next of the frames."""
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=8)
            self._live.start()
        self._live.transient = not line
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=now)

    def _replace(self, line: str, *, last: bool) -> None:
        """Show a line in a notebook, in the place of the one before."""
        if not last and self._handle is not None and time.monotonic() - self._shown < NOTEBOOK_EVERY_S:
            return
        from IPython.display import display  # pyright: ignore[reportMissingImports] # there is one where there is a notebook

        self._shown = time.monotonic()
        if self._handle is None:
            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def _line(self, phases: Sequence[Mapping[str, int]], done: int, width: int) -> str:
        """Return what a round has to say in so many columns: the rate is left out first, then the second metric."""
        spent = max(time.monotonic() - self._started, 1e-9)
        here = done - self._before
        when = "" if self._measured == done else f" after {self._measured}"
        first, both = (f"{_told(self._metrics, count)}{when}" for count in (1, 2))
        place, heard = f"round {done}/{self._rounds}", _completed(phases)
        rate, left = _rate(here / spent), f"left {time_left(spent / here * (self._rounds - done))}"
        forms = [[place, both, heard, rate, left], [place, both, heard, left], [place, first, heard, left]]
        lines = [" | ".join(part for part in form if part) for form in forms]
        return next((line for line in lines if len(line) <= width), lines[-1][: width - 1] + "…")

    def end(self, summary: Mapping[str, Any]) -> None:
        """Leave what was shown last standing, unless it stays above already."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._handle = None  # the next run has a line of its own


def shown(callbacks: Callback | Sequence[Callback], *, progress: bool) -> tuple[Callback, ...]:
    """Return who is told: those given, and one that shows progress, unless there is one or none is wanted. Raises ConfigError."""
    several = checked(callbacks)
    one = progress and not any(isinstance(each, Progress) for each in several)
    return (*several, Progress()) if one else several


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics that were measured, without what their names begin with."""
    return {k.removeprefix("eval/"): v for k, v in metrics.items() if v is not None and not math.isnan(v)}


def _told(metrics: Mapping[str, float], count: int = 2) -> str:
    """Write the first metric, and beside it how the worst fare by it, else the second one."""
    first, *others = metrics or [""]
    others.sort(key=lambda name: not name.startswith(f"{first}_worst"))
    more = [(name, name.removeprefix(f"{first}_").replace("_", " ")) for name in others]
    return ", ".join(f"{called} {metrics[name]:.4f}" for name, called in [(first, first), *more][:count] if name)


def _completed(phases: Sequence[Mapping[str, int]]) -> str:
    """Say how many of the invited completed, phase by phase: "completed 9+8 of 10+10"."""
    completed, invited = ("+".join(str(phase[k]) for phase in phases) for k in ("completed", "invited"))
    return f"completed {completed} of {invited}" if phases else ""


def _rate(rounds_per_s: float) -> str:
    return f"{rounds_per_s:,.1f} rounds/s" if rounds_per_s >= 1 else f"{1 / rounds_per_s:,.1f} s/round"


def time_left(seconds: float) -> str:
    """Write how long something is yet to take, roughly: "42 s", "3 min", "5 h"."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:,.0f} h"
