"""Callbacks: what a run tells them while it goes on, and how one of them may end it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run that begins, or goes on.

    Attributes:
        folder: the run folder.
        name: label and seed, such as "fedavg seed 0".
        config: the resolved configuration, as ``config.yaml`` has it.
        rounds: how many there are to be.
        done: rounds done before; more than 0 where it goes on.
        initial: the initial model's ``eval/<metric>`` values.
        rows: those of ``rounds.parquet`` so far, ``done`` of them; what was not measured is None or NaN.

    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    rounds: int
    done: int = 0
    initial: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = ()


class Callback:
    """Told how a run goes, in its own process: make a class of it with the methods that are of use, and give it to ``callbacks=``.

    After a resume the rounds since the last checkpoint come again. What is raised ends the run as any other failure does.
    """

    def say(self, text: str) -> None:
        """Take a line about what is going on."""

    def start(self, run: Begun) -> None:
        """Rounds are about to begin; the initial model has been evaluated."""

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> str | None:
        """Take a row of ``rounds.parquet``, its evaluation included, and the counts of its phases, each attempt for itself.

        Return why the run is to stop, if it is: it ends in order after this round. A round that was evaluated comes when the next
        one has been computed, which is thrown away then.
        """

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> str | None:
        """Take the ``eval/<metric>`` values after so many rounds, after the row itself. Return why the run is to stop, if it is."""

    def checkpoint(self, done: int, path: Path) -> None:
        """A checkpoint after so many rounds has been written."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended, however it has, and even before ``start``; ``summary.json`` is written, if it could be."""


class Stop(NamedTuple):
    """Why a run ended before its last round: a key of the configuration or the name of a callback, and a sentence."""

    by: str
    why: str


class Callbacks:
    """Several, told in their order."""

    def __init__(self, several: Iterable[Callback]):
        self._several: list[tuple[str, Callback]] = []
        self.add(several)

    def add(self, several: Iterable[Callback], name: str | None = None) -> None:
        """Tell these, too, after the others; they go by their class's name if none is given."""
        self._several += [(name or type(each).__name__, each) for each in several]

    @property
    def going_on(self) -> Iterator[tuple[str, Callback]]:
        """Yield each with its name."""
        return iter(self._several)

    def say(self, text: str) -> None:
        """Tell all a line."""
        for name, each in self.going_on:
            with _named(name, "say"):
                each.say(text)

    def start(self, run: Begun) -> None:
        """Tell all that rounds begin."""
        for name, each in self.going_on:
            with _named(name, "start"):
                each.start(run)

    def round(self, row: Mapping[str, Any], phases: Sequence[Mapping[str, int]]) -> Stop | None:
        """Tell all of a round; return the first one's wish to stop."""
        asked = []
        for name, each in self.going_on:
            with _named(name, f"round {row['round']}"):
                asked.append((name, each.round(_Known(row), phases)))
        return _first(asked)

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> Stop | None:
        """Tell all of an evaluation; return the first one's wish to stop."""
        asked = []
        for name, each in self.going_on:
            with _named(name, f"evaluation after {done} rounds"):
                asked.append((name, each.evaluation(done, _Known(metrics))))
        return _first(asked)

    def checkpoint(self, done: int, path: Path) -> None:
        """Tell all of a checkpoint."""
        for name, each in self.going_on:
            with _named(name, f"checkpoint after {done} rounds"):
                each.checkpoint(done, path)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell all that it has ended; then raise what the first of them raised."""
        raised = None
        for name, each in self.going_on:
            try:
                with _named(name, "end"):
                    each.end(summary)
            except FedfleetError as e:
                raised = raised or e
        if raised is not None and summary.get("error") is None:  # else that is what is to be seen
            raise raised


class _Known(dict[str, Any]):
    """Says which keys there are where one is asked for that is not."""

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key}: there are {', '.join(self)}")


def checked(callbacks: Any) -> tuple[Callback, ...]:
    """Return callbacks that were given in Python, if they are. Raises ConfigError."""
    several: tuple[Any, ...] = (callbacks,)
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, Callback):
        several = tuple(callbacks)
    for i, each in enumerate(several):
        if not isinstance(each, Callback):
            what = f"the class {each.__name__} itself" if isinstance(each, type) else f"a {type(each).__name__}"
            raise ConfigError(f"callbacks[{i}]: {what}: give an object of a class made of fedfleet.Callback")
    return several


def _first(asked: Iterable[tuple[str, Any]]) -> Stop | None:
    return next((Stop(name, one_line(why)) for name, why in asked if why), None)


@contextmanager
def _named(name: str, where: str) -> Iterator[None]:
    """Say whose fault it was, in one line."""
    try:
        yield
    except Exception as e:
        raise FedfleetError(f"callback {name}, {where}: {type(e).__name__}: {one_line(e)}") from e
