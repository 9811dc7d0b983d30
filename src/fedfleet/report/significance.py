"""Significance of differences between methods: paired by seed, and ranked over conditions.

Sources: Holm (1979), "A simple sequentially rejective multiple test procedure"; Tarone (1990), "A modified Bonferroni method for
discrete data", for leaving out what cannot become significant; Fieller (1954), "Some problems in interval estimation"; Demšar
(2006), "Statistical comparisons of classifiers over multiple data sets", JMLR 7, section 3.2 for Friedman's and Nemenyi's tests;
Hedges (1981), "Distribution theory for Glass's estimator of effect size and related estimators", for effect sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
"""Probability of a false alarm."""
POWER = 0.8
"""Probability with which a difference that is there should be found."""
MOST = 100_000
"""Seeds beyond which no number is named."""
RESOLUTION = 1e-6
"""Results that differ by no more than this share of the larger are the same: single precision has seven digits."""


class Difference(NamedTuple):
    """Mean of n paired differences, half the width of its 95 % t-interval, the p-value of no difference, and the effect's size.

    ``half`` and ``p`` are NaN for fewer than two pairs, ``mean`` for none, ``effect`` for fewer than three. ``p`` and ``effect``
    are NaN, too, where all differences are the same, such as 0: there is no spread to test by.
    """

    mean: float
    half: float
    p: float
    pairs: int
    effect: float
    """Hedges' g: the mean in standard deviations of the differences, less its bias in small samples."""

    @property
    def spread(self) -> float:
        """Sample standard deviation of the differences; NaN where there are fewer than two."""
        if self.pairs < 2:
            return math.nan
        from scipy.stats import t as student

        return self.half * math.sqrt(self.pairs) / float(student.ppf(1 - LEVEL / 2, self.pairs - 1))

    @property
    def constant(self) -> bool:
        """Whether all differences are the same, two or more."""
        return self.half == 0.0

    @property
    def equal(self) -> bool:
        """Whether all differences are 0, two or more."""
        return self.constant and self.mean == 0.0

    @property
    def clear(self) -> bool:
        """Whether there is an interval, and it leaves out 0."""
        return not self.constant and abs(self.mean) > self.half


def contrast(these: Sequence[np.ndarray], those: Sequence[np.ndarray], scale: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of these less that of those (n,): 0 where it is but for rounding, and all the same where they are but for it.

    Rounding is ``RESOLUTION`` of ``scale`` (n,), which is the largest of them if not given.
    """
    size = np.max(np.abs([*these, *those]), axis=0) if scale is None else scale
    with np.errstate(invalid="ignore"):  # of two that are infinite the difference is NaN
        result = np.sum(these, axis=0) - np.sum(those, axis=0)
    known = np.isfinite(size) & np.isfinite(result)
    result = np.where(known & (np.abs(result) <= RESOLUTION * size), 0.0, result)
    if known.any() and np.ptp(result[known]) <= RESOLUTION * size[known].min():
        result[known] = result[known][0]
    return result


def difference(values: np.ndarray) -> Difference:
    """Return the mean of paired differences (n,) with Student's t-test; values that are not finite do not count."""
    known = values[np.isfinite(values)]
    n = len(known)
    if n < 2:
        return Difference(float(known[0]) if n else math.nan, math.nan, math.nan, n, math.nan)
    from scipy.stats import t as student  # here, for it takes half a second to import

    if np.ptp(known) == 0.0:
        return Difference(float(known[0]), 0.0, math.nan, n, math.nan)
    mean, spread = float(known.mean()), float(known.std(ddof=1))
    error = spread / math.sqrt(n)
    p = 2.0 * float(student.sf(abs(mean) / error, n - 1))
    effect = mean / spread * _small(n - 1) if n > 2 else math.nan
    return Difference(mean, float(student.ppf(1 - LEVEL / 2, n - 1)) * error, p, n, effect)


def _small(freedom: int) -> float:
    """Return Hedges' correction (1981, equation 6e) of an effect size with so many degrees of freedom, at least two."""
    gammas = math.lgamma(freedom / 2) - math.lgamma((freedom - 1) / 2)
    return math.exp(gammas) / math.sqrt(freedom / 2)


def power(effect: float, seeds: int, tests: int = 1) -> float:
    """Return the probability that a two-sided paired t-test finds a difference.

    Args:
        effect: the difference in standard deviations of the differences.
        seeds: pairs, two or more.
        tests: how many there are; each is at ``LEVEL / tests``, the strictest that Holm's correction asks for.

    """
    from scipy.stats import nct
    from scipy.stats import t as student

    limit = float(student.ppf(1 - LEVEL / tests / 2, seeds - 1))
    away = abs(effect) * math.sqrt(seeds)
    # The other tail is below the normal one at -away, 3e-7 from 5 on, where SciPy's is NaN for some numbers of seeds.
    other = nct.cdf(-limit, seeds - 1, away) if away < 5 else 0.0
    return float(nct.sf(limit, seeds - 1, away) + other)


def seeds_needed(effect: float, tests: int = 1) -> int | None:
    """Return the least number of seeds with ``POWER``, see ``power``; None where more than ``MOST`` are needed."""
    if math.isinf(effect):
        return 2
    low, high = 1, 2
    while not power(effect, high, tests) >= POWER:
        if high >= MOST:
            return None
        low, high = high, min(2 * high, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, tests) >= POWER else (middle, high)
    return high


def spread_at_most(seeds: int) -> float:
    """Return the upper end of the 95 % interval of a standard deviation from so many normal values, in units of the estimate."""
    from scipy.stats import chi2

    return math.sqrt((seeds - 1) / float(chi2.ppf(LEVEL / 2, seeds - 1)))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted for there being several (Holm 1979), in the order given; NaN stays NaN and does not count."""
    known = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    adjusted, highest = [math.nan] * len(p), 0.0
    for rank, (value, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * value))
        adjusted[i] = highest
    return adjusted


class Pair(NamedTuple):
    """Two methods by their places, the better one first, what this one has more, and p by Holm's correction for all pairs."""

    better: int
    worse: int
    result: Difference
    p: float


class Order(NamedTuple):
    """Methods by their means over seeds, and each pair of them: paired t-tests, Holm's correction for all pairs."""

    mean: np.ndarray
    """(k,)"""
    order: list[int]
    """Methods from the best to the worst."""
    pairs: list[Pair]
    of_all: int
    """Seeds of which there is any value."""

    @property
    def apart(self) -> list[Pair]:
        """The pairs that differ at ``LEVEL``."""
        return [pair for pair in self.pairs if pair.p < LEVEL]

    @property
    def seeds(self) -> int:
        """Seeds that all pairs share, at least."""
        return min(pair.result.pairs for pair in self.pairs)

    @property
    def tests(self) -> int:
        """Pairs that are tested, all but those that differ alike on every seed."""
        return sum(not math.isnan(pair.p) for pair in self.pairs)


def in_order(values: np.ndarray, *, least_is_best: bool = False, scale: np.ndarray | None = None) -> Order:
    """Return the order of methods by values (seeds, k), a row a seed; NaN where there is none. k is at least two.

    ``scale`` (seeds, k) is of the numbers that values were formed of, against which rounding is measured.
    """
    known = np.isfinite(values)
    total, seeds = np.where(known, values, 0.0).sum(0), known.sum(0)
    mean = np.divide(total, seeds, out=np.full(len(seeds), math.nan), where=seeds > 0)
    mean = np.where(
        np.abs(mean) <= RESOLUTION * np.nanmax(np.abs(values if scale is None else scale), initial=0.0), 0.0, mean
    )
    order = np.argsort(mean if least_is_best else -mean, kind="stable").tolist()
    both = list(itertools.combinations(order, 2))
    of = lambda a, b: None if scale is None else np.maximum(scale[:, a], scale[:, b])  # noqa: E731
    results = [difference(contrast([values[:, a]], [values[:, b]], of(a, b))) for a, b in both]
    adjusted = holm([result.p for result in results])
    pairs = [Pair(a, b, result, p) for (a, b), result, p in zip(both, results, adjusted, strict=True)]
    return Order(mean, order, pairs, int(known.any(1).sum()))


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


class Share(NamedTuple):
    """A share of a cost, and the ends of its 95 % interval; NaN where there is no clear cost."""

    part: float
    low: float
    high: float


def recovery(corrected: np.ndarray, uncorrected: np.ndarray, without: np.ndarray) -> Share:
    """Return the share of what dropout costs an uncorrected method that a corrected one gets back; NaN where it costs nothing.

    R = mean(corrected - uncorrected) / mean(without - uncorrected), where the interval of the denominator, the cost, lies above 0.
    Its interval is that of Fieller (1954): all R for which a t-test finds no difference between the gain and R times the cost.

    Args:
        corrected: (n,) a method under dropout, a value a seed.
        uncorrected: (n,) the reference under the same dropout, on the same seeds.
        without: (n,) the reference without dropout, on the same seeds.

    """
    gain, cost = contrast([corrected], [uncorrected]), contrast([without], [uncorrected])
    known = np.isfinite(gain) & np.isfinite(cost)
    gain, cost = gain[known], cost[known]
    found = difference(cost)
    if not (found.clear and found.mean > 0):
        return Share(math.nan, math.nan, math.nan)
    from scipy.stats import t as student

    limit = float(student.ppf(1 - LEVEL / 2, len(cost) - 1)) ** 2 / len(cost)
    (of_gain, of_both), (_, of_cost) = limit * np.cov(gain, cost)
    a, b, c = found.mean**2 - of_cost, gain.mean() * found.mean - of_both, gain.mean() ** 2 - of_gain
    away = math.sqrt(max(0.0, b * b - a * c))
    return Share(float(gain.mean() / found.mean), float(b - away) / a, float(b + away) / a)
