"""Curves over the rounds of several runs: means and bands over seeds, interpolation, smoothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]  # x and y, each (n,), x not decreasing
SMOOTH_FROM = 100  # rounds; fewer are readable as they are


class Strand(NamedTuple):
    """One line (n,): of a label, with the band (n,) of its seeds; thin, of a seed alone; pale, as recorded, beside a smooth one."""

    x: np.ndarray
    y: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None = None
    kind: Literal["line", "thin", "pale"] = "line"


class Bundle(NamedTuple):
    """What is drawn of a label, and the window of its smoothing in rounds."""

    strands: Sequence[Strand]
    window: int


def bundles(curves: Mapping[str, Sequence[Curve]], *, smoothed: bool = False) -> dict[str, Bundle]:
    """What is drawn of the curves of each label, a curve a seed."""
    result = {}
    for label, each in curves.items():
        width = max((window(len(x)) for x, _ in each), default=1) if smoothed else 1
        pale = [Strand(*each[0], kind="pale")] if width > 1 and len(each) == 1 else []
        each = [(x, smooth(y, width)) for x, y in each] if width > 1 else each
        result[label] = Bundle([*pale, *_strands(each)], width)
    return result


def _strands(curves: Sequence[Curve]) -> list[Strand]:
    middle = band(curves)
    if middle is None:  # the seeds share no range of x: each alone
        return [Strand(x, y, kind="thin") for x, y in curves]
    grid, mean, low, high = middle
    if len(curves) == 1:
        return [Strand(grid, mean)]
    result = [Strand(grid, mean, (low, high))]
    for x, y in curves:
        beyond = x >= grid[-1]
        if beyond.sum() > 1 and x[-1] > 1.1 * grid[-1]:  # shorter tails would only be whiskers
            result.append(Strand(x[beyond], y[beyond], kind="thin"))
    return result


def window(rounds: int) -> int:
    """An odd number of rounds to average over: 1 for short runs, about a twenty-fifth of long ones."""
    return 1 if rounds <= SMOOTH_FROM else rounds // 50 * 2 + 1


def at(x: np.ndarray, y: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Interpolate y (n,) linearly at `where` (m,): nan before the first x, the last value held after the last x.

    x does not decrease; where it repeats (a round in which nobody was heard) the later value counts.
    """
    if len(x) == 0:
        return np.full(np.shape(where), np.nan)
    last = np.append(np.diff(x) > 0, True)
    return np.interp(where, x[last], y[last], left=np.nan)


def band(curves: Sequence[Curve], points: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Mean, least and greatest of several curves on a common grid of x: (grid, mean, low, high), each (m,).

    The grid is the x that all share, else `points` values over the range that all cover (None if that is empty).
    """
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    grid = curves[0][0]
    if not all(np.array_equal(grid, x) for x, _ in curves):
        start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        if start > end:
            return None
        grid = np.linspace(start, end, points)
        y = np.stack([at(x, y, grid) for x, y in curves])
    else:
        y = np.stack([y for _, y in curves])
    return grid, y.mean(0), y.min(0), y.max(0)


def worst_tenth(values: np.ndarray, high_is_bad: bool) -> float:
    """Mean of the worst 10 % of values (n,), at least one of them; nan if there are none."""
    ordered = np.sort(values)[::-1] if high_is_bad else np.sort(values)
    return float(ordered[: max(1, math.ceil(len(values) / 10))].mean()) if len(values) else math.nan


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of values (n,) over an odd window, over what there is of it at the ends."""
    kernel, edge = np.ones(window), window // 2
    sums = np.convolve(values, kernel)[edge : edge + len(values)]
    return sums / np.convolve(np.ones(len(values)), kernel)[edge : edge + len(values)]
