"""The base of trackers: which numbers go where, and where to go on after a resume."""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfleet.files.documents import json_of
from fedfleet.files.writing import own_folder
from fedfleet.simulator.errors import ConfigError
from fedfleet.tracking.callback import Begun, Callback

OF = "run.txt"


class Tracker(Callback, ABC):
    """A callback that enters a run's numbers elsewhere, at steps that are rounds done: 0 is the initial model, row t is at t + 1.

    ``open`` brings what is there already to the state after ``run.done`` rounds, or remembers what is, so that no number is entered
    twice; every row before is then offered again. So a tracker that lost some, or comes to a run later, has all in the end.
    """

    where = ""
    """Where to look at it, in a few words, once it is open."""

    def start(self, run: Begun) -> None:
        """Open, and enter what was before."""
        self._step, self._entered = -1, frozenset[str]()
        self.open(run)
        self._enter(0, run.initial)
        for row in run.rows:
            self.round(row, ())

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> None:
        """Enter a row."""
        self._enter(int(row["round"]) + 1, {k: v for k, v in row.items() if k != "round"})

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Enter an evaluation that did not come with its row."""
        if done != self._step or not self._entered.issuperset(numbers(metrics)):
            self._enter(done, metrics)

    def checkpoint(self, done: int, path: Path) -> None:
        """Have all that was entered where it is to be."""
        self.flush()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Enter the summary."""
        self.close(summary)

    def _enter(self, step: int, result: Mapping[str, Any]) -> None:
        known = numbers(result)
        self._step, self._entered = step, frozenset(known)
        if known:
            self.log(step, known)

    @abstractmethod
    def open(self, run: Begun) -> None:
        """Begin, or go on."""

    @abstractmethod
    def log(self, step: int, result: Mapping[str, float]) -> None:
        """Enter finite numbers after so many rounds."""

    @abstractmethod
    def flush(self) -> None:
        """Have all that was entered where it is to be."""

    @abstractmethod
    def close(self, summary: Mapping[str, Any]) -> None:
        """Enter the summary, and end."""


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among values."""
    return {k: v for k, v in result.items() if isinstance(v, int | float) and type(v) is not bool and math.isfinite(v)}


def flat(node: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return leaves by dotted keys; lists are leaves."""
    result: dict[str, Any] = {}
    for key, value in node.items():
        below = flat(value, f"{at}{key}.") if isinstance(value, Mapping) and value else {f"{at}{key}": value}
        result |= below
    return result


def parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved configuration as hyper-parameters: flat, without where it is tracked; lists as text."""
    result = flat({k: v for k, v in config.items() if k != "track"})
    return {k: v if isinstance(v, int | float | str | bool) else json.dumps(v) for k, v in result.items()}


def concluded(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary, "final/eval/auc" and the like."""
    return {k.replace(".", "/", 1): v for k, v in numbers(flat(summary)).items()}


def noted(path: Path) -> dict[str, Any]:
    """Return what a tracker wrote down of a run, empty if nothing that can be read."""
    try:
        return json_of(path)
    except (OSError, ConfigError):
        return {}


def place(given: str | None, run: Begun, name: str) -> Path:
    """Make a tracker's folder for a run: ``name`` in the run's own, or below the given one a folder called as the run is.

    That is numbered where another run has it, as the file ``OF`` in it says.
    """
    if given is None:
        return own_folder(run.folder / name) if name else run.folder
    called = "".join(c if c.isalnum() or c in "-_.+=" else "-" for c in run.name)
    whose = f"{run.folder.absolute()}\n"
    for number in itertools.count(1):
        folder = Path(given).expanduser() / (called if number == 1 else f"{called}-{number}")
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / OF).write_text(whose, encoding="utf-8")
        if (folder / OF).exists() and (folder / OF).read_text(encoding="utf-8") == whose:
            return folder
    raise AssertionError
