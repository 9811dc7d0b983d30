"""Verdicts in a sentence: which methods are ahead of which by paired tests, or that they cannot be ranked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedfleet.report.significance import LEVEL, in_order
from fedfleet.report.words import count, joined, number, share

PAIRS = 6  # that a sentence names at most


def ranking(names: Sequence[str], values: np.ndarray, by: str, *, least_is_best: bool = False) -> str:
    """Return the sentence.

    Args:
        names: of the methods, two or more.
        values: (seeds, k), a row a seed and a column a method; NaN where there is none.
        by: what the values are, such as "final accuracy".
        least_is_best: whether the least value is the best.

    """
    result = in_order(values, least_is_best=least_is_best)
    ordered = [f"{names[i]} ({number(result.mean[i])})" for i in result.order]
    pairs = len(names) * (len(names) - 1) // 2
    if result.pairs < 2:
        shared = "there is one seed" if result.pairs else "no seed is shared by all"
        return f"By {by}, {joined(ordered)} cannot be ranked: {shared}."
    how = f"paired by {count(result.pairs, 'seed')}, {share(LEVEL)} with Holm's correction for {count(pairs, 'pair')}"
    if not result.apart:
        return f"By {by}, {joined(ordered)} cannot be ranked: no pair differs ({how})."
    if len(result.apart) == pairs:
        return f"By {by}, the best is {', then '.join(ordered)}. Every pair differs ({how})."
    ahead = {better: [worse for first, worse in result.apart if first == better] for better, _ in result.apart}
    told = [f"{names[better]} is ahead of {joined([names[i] for i in worse])}" for better, worse in ahead.items()]
    more = f"; {len(told) - PAIRS} more are ahead of some" if len(told) > PAIRS else ""
    left = pairs - len(result.apart)
    return (
        f"By {by}, {'; '.join(told[:PAIRS])}{more}; the other {count(left, 'pair')} cannot be told apart ({how}). "
        f"Means: {', '.join(ordered)}."
    )
