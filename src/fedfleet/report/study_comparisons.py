"""Comparisons of a study, paired by seed: values with the first value, labels with the reference, and both at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedfleet.report import verdicts
from fedfleet.report.sheet import Grid
from fedfleet.report.significance import (
    LEVEL,
    MOST,
    POWER,
    Difference,
    Ranks,
    difference,
    holm,
    recovery,
    seeds_needed,
    spread_at_most,
)
from fedfleet.report.study_tables import Frame, Tables, combinations, paired, ranks, selected
from fedfleet.report.words import MISSING, joined, number, plain_value, share
from fedfleet.simulator.driver.evaluation import less_is_better

KINDS = {"value": "value less the first", "label": "label less the reference", "interaction": "of these differences"}
NAMED = 12  # labels that a sentence names at most
LARGEST = 100  # of an effect that is spelt out
PAIRED = (
    "paired by seed: mean ± half the width of its 95 % t-interval, and g, the effect in standard deviations of the differences "
    "(Hedges). A * marks p below 0.05 after Holm's correction for all differences of this table; intervals are not widened."
)


@dataclass(frozen=True)
class Comparison:
    """One difference of final metrics: what it is of, the point of the grid, the result, and p adjusted for all of its kind.

    ``kind`` is "value" (less the first value of the first key), "label" (less the reference) or "interaction" (both).
    """

    kind: str
    label: str
    point: Mapping[str, Any]
    result: Difference
    adjusted: float


def by_value(tables: Tables) -> list[Comparison]:
    """Return each value of the first key less the first of its values, of every label; empty where there is one value."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    column, differences = _column(tables), []
    for label in tables.labels:
        for point in combinations(tables, others):
            of = selected(tables.study[tables.study["label"] == label], point)
            differences += [
                (label, {key: v, **point}, paired(of[of[key] == v], of[of[key] == base], column)) for v in values
            ]
    return _tested("value", differences)


def by_label(tables: Tables) -> list[Comparison]:
    """Return each label less the reference, at every point; empty where there is one label."""
    column, differences = _column(tables), []
    for point in combinations(tables, list(tables.varied)):
        of = selected(tables.study, point)
        base = of[of["label"] == tables.reference]
        differences += [(label, point, paired(of[of["label"] == label], base, column)) for label in tables.other_labels]
    return _tested("label", differences)


def interactions(tables: Tables) -> list[Comparison]:
    """Return differences of differences: what the first key costs each label less what it costs the reference."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    reference, differences = tables.reference, []
    for label in tables.other_labels:
        for point in combinations(tables, others):
            at = _by_seed(selected(tables.study, point), key, _column(tables))
            differences += [
                (
                    label,
                    {key: value, **point},
                    (at(label, value) - at(label, base)) - (at(reference, value) - at(reference, base)),
                )
                for value in values
            ]
    return _tested("interaction", differences)


def frame(tables: Tables) -> Frame:
    """Return all comparisons as a table, a row each: ``docs/guides/study.md`` says what the columns mean."""
    rows = []
    for each in [*by_value(tables), *by_label(tables), *interactions(tables)] if tables.metrics else ():
        result = each.result
        found = {"mean": result.mean, "half": result.half, "p": result.p, "p_holm": each.adjusted}
        reference = None if each.kind == "value" else tables.reference
        of = {"kind": each.kind, "metric": tables.metrics[0], "label": each.label, "reference": reference}
        rows.append({**of, **each.point, **found, "g": result.effect, "seeds": result.pairs})
    columns = ["kind", "metric", "label", "reference", *tables.varied, "mean", "half", "p", "p_holm", "g", "seeds"]
    return pd.DataFrame(rows, columns=columns)


def grids(tables: Tables) -> Iterator[tuple[str, Grid | None]]:
    """Yield the comparisons as tables of the page, each with its heading."""
    yield f"What {next(iter(tables.varied))} costs", _costs(tables)
    yield "Who gets it back", _recovery(tables)
    yield "Labels compared", _compared(tables)
    yield "Labels compared", _interaction(tables)
    yield "Labels ranked", _ranking(tables)
    yield "Seeds needed", needed(tables)


def verdict(tables: Tables) -> str | None:
    """Return a sentence that ranks the labels by what the first key costs them, or says that it cannot; None for one label.

    The cost is the mean, over points, of the final metric at the key's first value less that at each other one. Where there is one
    value, labels are ranked by the final metric itself.
    """
    if len(tables.labels) < 2 or not tables.metrics:
        return None
    key, *others = tables.varied
    base, *values = tables.varied[key]
    falling = less_is_better(tables.metrics[0])
    costs = []
    for point in combinations(tables, others):
        at = _by_seed(selected(tables.study, point), key, _column(tables))
        lost = lambda label, value, at=at: at(label, base) - at(label, value)  # noqa: E731
        for value in values or [base]:
            columns = [lost(label, value) if values else at(label, base) for label in tables.labels]
            costs.append(np.stack(columns, axis=1))
    metric = f"final {tables.metrics[0]}"
    by = f"the mean cost of {key} in {metric} over all points" if values else f"{metric}, the mean over all points"
    cost = np.mean(costs, axis=0)
    if values and falling:
        cost = -cost
    return verdicts.ranking(tables.labels, cost, by, least_is_best=bool(values) or falling)


def needed(tables: Tables) -> Grid | None:
    """Return how many seeds a difference of the size sought would need, by the spread seen; None where there is none to tell."""
    if tables.sought is None or not tables.metrics:
        return None
    kinds = {"value": by_value(tables), "label": by_label(tables), "interaction": interactions(tables)}
    rows, least = [], math.inf
    for kind, comparisons in kinds.items():
        for label in dict.fromkeys(each.label for each in comparisons):
            known = [each.result for each in comparisons if each.label == label and each.result.pairs > 1]
            if known:
                least = min(least, *(result.pairs for result in known))
                spreads = [result.spread for result in known]
                of = (float(np.median(spreads)), max(spreads))
                rows.append([KINDS[kind], label, *itertools.chain(*(_seeds(s, tables, len(comparisons)) for s in of))])
    if not rows:
        return None
    head = ["difference", "label"]
    for which in ("median", "largest"):
        head += [f"{which} spread", "seeds", "seeds, all tests"]
    text = (
        f"Seeds with which a paired t-test at {share(LEVEL)} finds a difference of {tables.sought:g} in final {tables.metrics[0]} "
        f"with {share(POWER)} power, if the spread stays: the standard deviation over seeds of the paired differences. All tests: "
        f"each at {share(LEVEL)} divided by how many there are of its kind. A spread from {int(least)} seeds may really be "
        f"{spread_at_most(int(least)):.1f} times as large (95 % interval)."
    )
    return Grid(head, rows, text, f"A difference of {tables.sought:g}")


def _seeds(spread: float, tables: Tables, tests: int) -> list[str]:
    effect = math.inf if spread == 0 else (tables.sought or 0.0) / spread
    return [
        number(spread),
        *(f"> {MOST:,}" if n is None else f"{n:,}" for n in (seeds_needed(effect), seeds_needed(effect, tests))),
    ]


class Recovered(NamedTuple):
    """The cost of a value of the first key to the reference, and the share that each other label gets back; NaN if unclear."""

    point: Mapping[str, Any]
    cost: Difference
    of: Mapping[str, float]


def recovered(tables: Tables) -> list[Recovered]:
    """Return it for every value of the first key but the first, which stands for no cost, at every point of the others."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    reference, result = tables.reference, []
    sign = -1.0 if less_is_better(tables.metrics[0]) else 1.0
    for point in combinations(tables, others):
        by_seed = _by_seed(selected(tables.study, point), key, _column(tables))
        at = lambda label, value, by_seed=by_seed: sign * by_seed(label, value)  # noqa: E731
        for value in values:
            free, lost = at(reference, base), at(reference, value)
            back = {label: recovery(at(label, value), lost, free) for label in tables.other_labels}
            result.append(Recovered({key: value, **point}, difference(free - lost), back))
    return result


def gets_back(tables: Tables) -> Iterator[str]:
    """Say where the first key costs the reference most, and who gets how much of it back, if Holm's correction leaves a cost."""
    reference, labels = tables.reference, tables.other_labels
    if not labels or not tables.metrics or len(tables.varied[next(iter(tables.varied))]) < 2:
        return
    costs = recovered(tables)
    adjusted = holm([each.cost.p for each in costs])
    clear = [each for each, p in zip(costs, adjusted, strict=True) if p < LEVEL and each.cost.mean > 0]
    if not clear:
        key = next(iter(tables.varied))
        yield (
            f"At no single value of {key} is the cost for {reference} beyond the spread of the seeds ({len(costs)} tests, Holm's "
            f"correction), so nobody can be said to get it back."
        )
        return
    most = max(clear, key=lambda each: each.cost.mean)
    where = joined([f"{key} = {plain_value(value)}" for key, value in most.point.items()])
    back = {
        label: most.of[label] for label in sorted(labels, key=lambda one: -most.of[one]) if np.isfinite(most.of[label])
    }
    said = joined([f"{label} {_part(part)}" for label, part in list(back.items())[:NAMED]])
    lost = f"{most.cost.mean:.3f} ± {most.cost.half:.3f} of {tables.metrics[0]}"
    yield f"{reference} loses most at {where}: {lost}. Won back: {said}."


def _costs(tables: Tables) -> Grid | None:
    key, *others = tables.varied
    base, *values = tables.varied[key]
    if not values:
        return None
    text = f"Final {tables.metrics[0]} less that at {key} = {plain_value(base)}, {PAIRED}"
    return Grid(["label", *others, *map(plain_value, values)], _rows(by_value(tables), others, len(values)), text)


def _compared(tables: Tables) -> Grid | None:
    labels, keys = tables.other_labels, list(tables.varied)
    if not labels:
        return None
    text = f"Final {tables.metrics[0]} of each label less that of {tables.reference}, {PAIRED}"
    return Grid(
        [*keys, *labels], _rows(by_label(tables), keys, len(labels), labelled=False), text, "Against the reference"
    )


def _interaction(tables: Tables) -> Grid | None:
    key, *others = tables.varied
    base, *values = tables.varied[key]
    if not values or not tables.other_labels:
        return None
    text = (
        f"What each label gains from {key} = {plain_value(base)} to another value, less what {tables.reference} gains, in final "
        f"{tables.metrics[0]}: 0 where it costs both alike; {PAIRED}"
    )
    return Grid(
        ["label", *others, *map(plain_value, values)],
        _rows(interactions(tables), others, len(values)),
        text,
        "Differences of differences",
    )


def _rows(
    comparisons: Sequence[Comparison], keys: Sequence[str], width: int, *, labelled: bool = True
) -> list[list[str]]:
    """Return rows of cells, so many comparisons each, headed by the label and the values of keys."""
    rows = []
    for start in range(0, len(comparisons), width):
        first = comparisons[start]
        head = [*([first.label] if labelled else []), *(plain_value(first.point[key]) for key in keys)]
        rows.append([*head, *(_cell(c.result, c.adjusted) for c in comparisons[start : start + width])])
    return rows


def _recovery(tables: Tables) -> Grid | None:
    """The share of what the reference loses that each other label gets back."""
    labels = tables.other_labels
    if not labels or len(tables.varied[next(iter(tables.varied))]) < 2:
        return None
    rows = [
        [*map(plain_value, each.point.values()), _cell(each.cost, 1.0), *(_part(each.of[label]) for label in labels)]
        for each in recovered(tables)
    ]
    text = (
        f"What each label gets back of what {tables.reference} loses in final {tables.metrics[0]}: 100 % where it loses nothing. "
        f"Given where the 95 % interval of the loss leaves out 0."
    )
    return Grid([*tables.varied, f"{tables.reference} loses", *labels], rows, text)


def _ranking(tables: Tables) -> Grid | None:
    result = ranks(tables, tables.metrics[0])
    if result is None:
        return None
    rows = [[tables.labels[i], f"{result.mean[i]:.2f}"] for i in result.order]
    return Grid(["label", "mean rank"], rows, _of_ranks(tables, result), words=True)


def _of_ranks(tables: Tables, result: Ranks) -> str:
    """Say in words what ranks show, or that they show nothing."""
    test = (
        f"Friedman's test over {result.conditions} conditions: chi-square {result.statistic:.2f}, p = {result.p:.2g}."
    )
    if result.p >= LEVEL:
        return f"{test} That does not tell the labels apart: their order may be chance."
    best, last = result.order[0], result.order[-1]
    near = [i for i in result.order[1:] if result.mean[i] - result.mean[best] <= result.distance]
    apart = f"Mean ranks that differ by more than {result.distance:.2f} differ (Nemenyi, 5 %)."
    if last in near:
        return f"{test} {apart} No two labels do: more conditions are needed to say which."
    with_it = f", and cannot be told from {joined([tables.labels[i] for i in near])}" if near else ", before all others"
    return f"{test} {apart} {tables.labels[best]} ranks first{with_it}."


def _column(tables: Tables) -> str:
    return f"final/{tables.metrics[0]}"


def _by_seed(of: Frame, key: str, column: str) -> Callable[[str, Any], np.ndarray]:
    """Return what gives a column of a label at a value of the key (seeds,), NaN where there is none."""
    by = of.set_index(["label", key, "seed"])[column].astype(float)
    seeds = sorted(set(of["seed"]))
    return lambda label, value: np.array([by.get((label, value, seed), np.nan) for seed in seeds])


def _tested(kind: str, differences: Sequence[tuple[str, Mapping[str, Any], np.ndarray]]) -> list[Comparison]:
    """Return the comparisons of a kind, with p adjusted by Holm's correction for all of them."""
    results = [difference(values) for *_, values in differences]
    adjusted = holm([result.p for result in results])
    return [
        Comparison(kind, label, point, result, p)
        for (label, point, _), result, p in zip(differences, results, adjusted, strict=True)
    ]


def _cell(result: Difference, p: float) -> str:
    if not np.isfinite(result.mean):
        return MISSING
    star = " *" if p < LEVEL else ""
    spread = f" ± {result.half:.3f}{star}" if np.isfinite(result.half) else ""
    return f"{result.mean:+.3f}{spread}{_effect(result.effect)}"


def _effect(value: float) -> str:
    if math.isnan(value):
        return ""
    return f", g {value:+.1f}" if abs(value) < LARGEST else f", |g| > {LARGEST}"


def _part(value: float) -> str:
    return f"{100 * value:.0f} %" if np.isfinite(value) else MISSING
