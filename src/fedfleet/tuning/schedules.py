"""Schedules, which choose the trial that goes on next: successive halving, its asynchronous form, or all to the end.

Successive halving (`sha`): Jamieson & Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016. Its asynchronous form (`asha`), that promotes trials instead of stopping them: Li et al., "A system for massively
parallel hyperparameter tuning", MLSys 2020, Algorithm 2.

    rung k      trials compared after min_rounds · reduction^k rounds
    reduction   η of the papers

What is next is a function of what is known, so it makes no difference whether a search was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A trial on its way to a rung; a trial that there is none of yet is to be drawn."""

    trial: int
    rung: int


@dataclass
class Trial:
    """A configuration that was drawn, and how it did.

    Attributes:
        values: by dotted key.
        scores: at each rung it came to, the greater the better; None where it failed, and it goes no further.
        begun: the rung that it is on its way to, or has come to.
        error: why it failed.

    """

    number: int
    values: Mapping[str, Any]
    scores: list[float | None] = field(default_factory=list)
    begun: int = 0
    error: str | None = None

    @property
    def under_way(self) -> bool:
        """Whether it is on its way to a rung."""
        return len(self.scores) <= self.begun

    @property
    def failed(self) -> bool:
        """Whether it can go no further."""
        return None in self.scores

    @property
    def reached(self) -> int:
        """The highest rung it has come to; -1 if none, or if it failed."""
        return -1 if self.failed else len(self.scores) - 1


Schedule = Callable[[Sequence[Trial], int, int, int], Step | None]


def sha(trials: Sequence[Trial], wanted: int, rungs: int, reduction: int) -> Step | None:
    """Return the next step of successive halving: the best of a rung go on once all that are to come there have come.

    Args:
        trials: those drawn so far, in their order.
        wanted: how many are drawn in all.
        rungs: how many there are.
        reduction: one in so many goes on; where that is none, the best alone.

    Returns:
        None while others are under way that have to be waited for, and at the end.

    """
    if len(trials) < wanted:
        return Step(len(trials), 0)
    for rung in range(rungs - 1):
        there = [t for t in trials if t.begun >= rung]
        if any(len(t.scores) <= rung for t in there):
            return None
        for best in _ranked(there, rung)[: len(there) // reduction]:
            if best.begun == rung:
                return Step(best.number, rung + 1)
    return None if any(t.under_way for t in trials) else _to_the_end(trials, rungs)


def asha(trials: Sequence[Trial], wanted: int, rungs: int, reduction: int) -> Step | None:
    """Return the next step of asynchronous successive halving, arguments as of ``sha``.

    From the highest rung down, a trial among the best 1 / reduction of those that have come to a rung goes on from there; where
    there is none, another is drawn.
    """
    for rung in reversed(range(rungs - 1)):
        there = [t for t in trials if len(t.scores) > rung]
        for best in _ranked(there, rung)[: len(there) // reduction]:
            if best.begun == rung:
                return Step(best.number, rung + 1)
    if len(trials) < wanted:
        return Step(len(trials), 0)
    return None if any(t.under_way for t in trials) else _to_the_end(trials, rungs)


def every(trials: Sequence[Trial], wanted: int, rungs: int, reduction: int) -> Step | None:
    """Return the next trial, of which each goes to its end; arguments as of ``sha``."""
    return Step(len(trials), 0) if len(trials) < wanted else None


SCHEDULES: dict[str, Schedule] = {"sha": sha, "asha": asha, "none": every}


def winner(trials: Sequence[Trial]) -> Trial | None:
    """Return the best of the trials at the highest rung that any has come to; None where all failed."""
    top = max((t.reached for t in trials), default=-1)
    return _ranked([t for t in trials if t.reached == top], top)[0] if top >= 0 else None


def _ranked(there: Sequence[Trial], rung: int) -> list[Trial]:
    """Return the trials that have a score of a rung, the best first, of equally good ones the first drawn."""
    scored = [(score, t) for t in there if (score := t.scores[rung]) is not None]
    return [t for _, t in sorted(scored, key=lambda result: (-result[0], result[1].number))]


def _to_the_end(trials: Sequence[Trial], rungs: int) -> Step | None:
    """Let the best one go on where none has come to the last rung: too few were drawn, or those that went on failed."""
    best = winner(trials)
    return None if best is None or best.reached == rungs - 1 else Step(best.number, best.reached + 1)
