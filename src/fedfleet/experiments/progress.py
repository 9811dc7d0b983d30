"""Progress of a run: one live line on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedfleet.tracking.callback import Begun, Callback

PLAIN_EVERY_S, NOTEBOOK_EVERY_S = 5.0, 0.25
OUTCOMES = ("completed", "stale", "late", "failed", "unavailable")
QUIET = ("_worst_tenth", "_spread")  # metrics for the tables


class Progress(Callback):
    """Shows rounds as they end: round, what became of the invited, metric, rounds/s, client steps/s, virtual time, time left.

    It is what the command line shows; ``fedfleet.run(…, callbacks=fedfleet.Progress())`` shows it in Python, in a notebook as one
    line that replaces itself.
    """

    def __init__(self, console: Console | None = None, *, silent: bool = False):
        self._console = None if silent else console or Console()
        self._live: Live | None = None
        self._handle: Any = None  # of the line in a notebook
        self._started = time.monotonic()
        self._shown = 0.0
        self._metric = ""
        self._measured = 0  # rounds done when it was
        self._before = self._rounds = self._steps = 0
        self._virtual_s = 0.0

    @classmethod
    def silent(cls) -> Progress:
        """Return one that shows nothing."""
        return cls(silent=True)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            self._console.print(Text(text), soft_wrap=True)

    def start(self, run: Begun) -> None:
        """Show the initial model's ``eval/<metric>`` values; of a run that goes on, those of its last evaluation."""
        self._started = self._shown = time.monotonic()
        self._before, self._rounds, self._steps = run.done, run.rounds, 0
        self._virtual_s = sum(row["virtual_s"] for row in run.rows)
        self._metric, self._measured = _metrics(run.initial), 0
        for row in run.rows:
            measured = {k: v for k, v in row.items() if k.startswith("eval/") and v is not None and v == v}
            self.evaluation(row["round"] + 1, measured)
        self.say(f"going on after {run.done} rounds" if run.done else f"initial model: {self._metric}")

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation, to be shown with the next round."""
        if told := _metrics(metrics):
            self._metric, self._measured = told, done

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> None:
        """Show a row of ``rounds.parquet``, and the counts of its phases, each attempt for itself."""
        if self._console is None:
            return
        metrics = {k: v for k, v in row.items() if k.startswith("eval/")}
        self.evaluation(row["round"] + 1, metrics)
        self._steps += row["client_steps"]
        self._virtual_s += row["virtual_s"]
        done, rounds = row["round"] + 1, self._rounds
        line = self._line(phases, done, rounds)
        if self._console.is_jupyter:
            self._replace(line, last=done == rounds)
        elif self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=8)
                self._live.start()
            self._live.update(Text(line))
        elif self._measured == done or done == rounds or time.monotonic() - self._shown > PLAIN_EVERY_S:
            self._shown = time.monotonic()
            self.say(line)

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

    def _line(self, phases: Sequence[Mapping[str, int]], done: int, rounds: int) -> str:
        spent = max(time.monotonic() - self._started, 1e-9)
        here = done - self._before
        left = spent / here * (rounds - done)
        when = "" if self._measured == done else f" after {self._measured}"
        return (
            f"round {done}/{rounds} | {_outcomes(phases)} | {self._metric}{when} | {here / spent:.1f} rounds/s | "
            f"{self._steps / spent:,.0f} client steps/s | virtual {self._virtual_s:,.0f} s | left {left:,.0f} s"
        )

    def end(self, summary: Mapping[str, Any]) -> None:
        """Leave the last line standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._handle = None  # the next run has a line of its own


def _metrics(result: Mapping[str, float | None]) -> str:
    told = {k.removeprefix("eval/"): v for k, v in result.items() if not k.endswith(QUIET)}
    return ", ".join(f"{k} {v:.4f}" for k, v in told.items() if v is not None)


def _outcomes(phases: Sequence[Mapping[str, int]]) -> str:
    """Say what became of the invited, phase by phase: "completed 9+8 of 10+10 late 0+2 failed 1+0 unavailable 0+0"."""
    each = {
        k: "+".join(str(p[k]) for p in phases)
        for k in ("invited", *OUTCOMES)
        if k != "stale" or any(p[k] for p in phases)
    }
    invited = each.pop("invited")
    return " ".join(f"{k} {v} of {invited}" if k == "completed" else f"{k} {v}" for k, v in each.items())
