"""Significance of differences between methods: paired by seed, and ranked over conditions.

Sources: Holm (1979), "A simple sequentially rejective multiple test procedure"; Demšar (2006), "Statistical comparisons of
classifiers over multiple data sets", JMLR 7, section 3.2 for Friedman's and Nemenyi's tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
"""Probability of a false alarm."""


class Difference(NamedTuple):
    """Mean of n paired differences, half the width of its 95 % t-interval, and the p-value of no difference.

    ``half`` and ``p`` are NaN for fewer than two pairs, ``mean`` for none.
    """

    mean: float
    half: float
    p: float
    pairs: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half


def difference(values: np.ndarray) -> Difference:
    """Return the mean of paired differences (n,) with Student's t-test; values that are not finite do not count."""
    known = values[np.isfinite(values)]
    n = len(known)
    if n < 2:
        return Difference(float(known[0]) if n else math.nan, math.nan, math.nan, n)
    from scipy.stats import t as student  # here, for it takes half a second to import

    mean, error = float(known.mean()), float(known.std(ddof=1)) / math.sqrt(n)
    if error == 0.0:
        return Difference(mean, 0.0, float(mean == 0.0), n)
    p = 2.0 * float(student.sf(abs(mean) / error, n - 1))
    return Difference(mean, float(student.ppf(1 - LEVEL / 2, n - 1)) * error, p, n)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted for there being several (Holm 1979), in the order given; NaN stays NaN and does not count."""
    known = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    adjusted, highest = [math.nan] * len(p), 0.0
    for rank, (value, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * value))
        adjusted[i] = highest
    return adjusted


class Ranks(NamedTuple):
    """Mean ranks of k methods over n conditions, 1 for the best, with Friedman's test of no difference between any.

    Two methods can be told apart where their mean ranks differ by more than ``distance``, Nemenyi's critical difference.
    """

    mean: np.ndarray
    """(k,)"""
    conditions: int
    statistic: float
    """Friedman's chi-square, with k - 1 degrees of freedom; corrected for ties."""
    p: float
    distance: float

    @property
    def order(self) -> list[int]:
        """Methods from the best to the worst."""
        return np.argsort(self.mean, kind="stable").tolist()

    @property
    def groups(self) -> list[list[int]]:
        """The largest runs of two or more methods, best first, of which no two can be told apart."""
        result: list[list[int]] = []
        for start in range(len(self.order)):
            run = [i for i in self.order[start:] if self.mean[i] - self.mean[self.order[start]] <= self.distance]
            if len(run) > 1 and not (result and set(run) <= set(result[-1])):
                result.append(run)
        return result


def ranked(values: np.ndarray, *, least_is_best: bool = False) -> Ranks:
    """Return the ranks of methods by what each reached at each condition.

    Args:
        values: (n, k), a row a condition and a column a method, each a mean over seeds: seeds are no conditions of their own. Rows
            in which a value is missing are left out.
        least_is_best: rank 1 goes to the least value instead of the greatest.

    Raises ValueError for fewer than three methods or two conditions.
    """
    known = values[np.isfinite(values).all(axis=1)]
    n, k = known.shape
    if n < 2 or k < 3:
        raise ValueError(f"{k} methods at {n} conditions: ranks need three methods and two conditions")
    from scipy.stats import friedmanchisquare, rankdata  # here, for it takes half a second to import

    ranks = rankdata(known if least_is_best else -known, axis=1)
    if (ranks == ranks[:, :1]).all():
        return Ranks(ranks.mean(axis=0), n, 0.0, 1.0, critical_difference(k, n))
    statistic, p = friedmanchisquare(*known.T)
    return Ranks(ranks.mean(axis=0), n, float(statistic), float(p), critical_difference(k, n))


def critical_difference(methods: int, conditions: int) -> float:
    """Return Nemenyi's critical difference of mean ranks at a level of 5 %: q sqrt(k (k + 1) / (6 n)).

    q is the quantile of the Studentised range of k means with infinitely many degrees of freedom, divided by sqrt(2).
    """
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - LEVEL, methods, math.inf)) / math.sqrt(2.0)
    return q * math.sqrt(methods * (methods + 1) / (6.0 * conditions))


def recovery(corrected: np.ndarray, uncorrected: np.ndarray, without: np.ndarray) -> float:
    """Return the share of what dropout costs an uncorrected method that a corrected one gets back; NaN where it costs nothing.

    R = mean(corrected - uncorrected) / mean(without - uncorrected), where the interval of the denominator, the cost, lies above 0.

    Args:
        corrected: (n,) a method under dropout, a value a seed.
        uncorrected: (n,) the reference under the same dropout, on the same seeds.
        without: (n,) the reference without dropout, on the same seeds.

    """
    cost = difference(without - uncorrected)
    return difference(corrected - uncorrected).mean / cost.mean if cost.mean > cost.half else math.nan
