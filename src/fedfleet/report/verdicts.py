"""Verdicts in a sentence: which methods are ahead of which by paired tests, or that they cannot be ranked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedfleet.report.significance import LEVEL, Order
from fedfleet.report.words import count, joined, number, plus_minus, probability, share

PAIRS = 6  # that a sentence names at most


def ranking(names: Sequence[str], result: Order, by: str, means: np.ndarray | None = None) -> str:
    """Return the sentence.

    Args:
        names: of the methods, two or more.
        result: their order.
        by: what the values are, such as "final accuracy".
        means: (k,) in the place of those of the order.

    """
    means = result.mean if means is None else means
    ordered = [f"{names[i]} ({number(means[i])})" for i in result.order]
    if result.seeds < 2:
        shared = "some two share one seed alone" if result.seeds else "no seed is shared by all"
        shared = "there is one seed" if result.of_all == 1 else shared
        return f"By {by}, {joined(ordered)} cannot be ranked: {shared}."
    if not result.tests:
        alike = all(pair.result.equal for pair in result.pairs)
        how = "agree on all" if alike else "differ alike, without spread, on all"
        return f"By {by}, {joined(ordered)} cannot be ranked: they {how} {result.seeds} seeds."
    tested = f"paired by {count(result.seeds, 'seed')}, {share(LEVEL)}"
    tested += f" with Holm's correction for {count(result.tests, 'pair')}" * (result.tests > 1)
    p = [pair.p for pair in result.pairs if not pair.result.constant]
    if len(names) == 2:
        between = result.pairs[0].result
        how = f"they differ by {plus_minus(abs(between.mean), between.half)}, {probability(p[0])} ({tested})"
        if result.apart:
            return f"By {by}, the best is {', then '.join(ordered)}: {how}."
        return f"By {by}, {joined(ordered)} cannot be ranked: {how}."
    if not result.apart:
        return (
            f"By {by}, {joined(ordered)} cannot be ranked: no pair differs, the least {probability(min(p))} ({tested})."
        )
    if len(result.apart) == len(result.pairs):
        return f"By {by}, the best is {', then '.join(ordered)}. Every pair differs, the largest {probability(max(p))} ({tested})."
    ahead: dict[int, list[str]] = {}
    for pair in result.apart:
        ahead.setdefault(pair.better, []).append(f"{names[pair.worse]} ({probability(pair.p)})")
    told = [f"{names[better]} is ahead of {joined(worse)}" for better, worse in ahead.items()]
    more = f"; {len(told) - PAIRS} more are ahead of some" if len(told) > PAIRS else ""
    left = len(result.pairs) - len(result.apart)
    others = count(left, "pair") if left > 1 else "pair"
    return (
        f"By {by}, {'; '.join(told[:PAIRS])}{more}; the other {others} cannot be told apart ({tested}). "
        f"Means: {', '.join(ordered)}."
    )
