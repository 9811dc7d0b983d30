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
    Order,
    Ranks,
    Share,
    contrast,
    difference,
    holm,
    in_order,
    recovery,
    seeds_needed,
    spread_at_most,
)
from fedfleet.report.study_tables import WORST, Frame, Tables, combinations, paired, ranks, selected
from fedfleet.report.words import MISSING, count, joined, number, plain_value, probability, share
from fedfleet.simulator.driver.evaluation import less_is_better

KINDS = {
    "value": "value less the first",
    "label": "label less the reference",
    "interaction": "of these differences",
    "overall": "over all points",
}
NAMED = 12  # labels that a sentence names at most
LARGEST = 100  # of an effect that is spelt out
ONE_SEED = "of the one seed there is: no interval or test can be told."
G = ", and g, the effect in standard deviations of the differences (Hedges)"
PAIRED = (
    f"paired by seed: mean ± half the width of its 95 % t-interval{G}. A * marks p below 0.05 after Holm's correction for all "
    "differences of this table; intervals are not widened. Where all seeds agree it says equal, where they have one and the same "
    "difference it says constant: neither is a test."
)
EQUAL, CONSTANT, EVERY = "equal", "constant", "any two"


@dataclass(frozen=True)
class Comparison:
    """One difference of final metrics: what it is of, the point of the grid, the result, and p adjusted for all of its kind.

    ``kind`` is "value" (less the first value of the first key), "label" (less the reference), "interaction" (both), or "overall",
    the mean over all points of differences of any two labels.
    """

    kind: str
    label: str
    reference: str | None
    """The label that it is less; None where both are of one label."""
    point: Mapping[str, Any]
    result: Difference
    adjusted: float
    again: bool = False
    """Whether it is one of those before, of points that have the same results: it is no test of its own."""


def by_value(tables: Tables, column: str) -> list[Comparison]:
    """Return each value of the first key less the first of its values, of every label; empty where there is one value.

    ``column`` is of the table of trials, such as "final/accuracy"; as in the functions below.
    """
    key, *others = tables.varied
    base, *values = tables.varied[key]
    differences = []
    for label in tables.labels:
        for point in combinations(tables, others):
            of = selected(tables.study[tables.study["label"] == label], point)
            differences += [
                (label, {key: v, **point}, paired(of[of[key] == v], of[of[key] == base], column)) for v in values
            ]
    return _tested(tables, "value", None, differences, base)


def by_label(tables: Tables, column: str) -> list[Comparison]:
    """Return each label less the reference, at every point; empty where there is one label."""
    differences = []
    for point in combinations(tables, list(tables.varied)):
        of = selected(tables.study, point)
        base = of[of["label"] == tables.reference]
        differences += [(label, point, paired(of[of["label"] == label], base, column)) for label in tables.other_labels]
    return _tested(tables, "label", tables.reference, differences)


def interactions(tables: Tables, column: str) -> list[Comparison]:
    """Return differences of differences: what the first key costs each label less what it costs the reference."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    reference, differences = tables.reference, []
    for label in tables.other_labels:
        for point in combinations(tables, others):
            at = _by_seed(selected(tables.study, point), key, column)
            differences += [
                (
                    label,
                    {key: value, **point},
                    contrast([at(label, value), at(reference, base)], [at(label, base), at(reference, value)]),
                )
                for value in values
            ]
    return _tested(tables, "interaction", reference, differences, base)


def order(tables: Tables, column: str) -> Order | None:
    """Return the order of labels by the mean over all points of what each gains from the first value of the first key to another.

    Where there is one value it is the order by the column itself. None for one label.
    """
    if len(tables.labels) < 2:
        return None
    key, *others = tables.varied
    base, *values = tables.varied[key]
    if not treats(tables):
        others, values = [key, *others], []
    gains, largest = [], []
    for point in combinations(tables, others):
        at = _by_seed(selected(tables.study, point), key, column)
        base = point.get(key, base)
        before = np.stack([at(label, base) for label in tables.labels], axis=1)
        after = [np.stack([at(label, value) for label in tables.labels], axis=1) for value in values]
        gains += [each - before for each in after] or [before]
        largest += [np.abs(each) for each in [before, *after]]
    return in_order(np.mean(gains, axis=0), least_is_best=_falling(column), scale=np.max(largest, axis=0))


def overall(tables: Tables, column: str) -> list[Comparison]:
    """Return the differences of any two labels by ``order``, the reference or else the earlier label taken from the other."""
    found, result = order(tables, column), []
    for pair in found.pairs if found is not None else ():
        label, of, sign = tables.labels[pair.better], tables.labels[pair.worse], 1.0
        if label == tables.reference or (of != tables.reference and pair.better < pair.worse):
            label, of, sign = of, label, -1.0
        turned = pair.result._replace(mean=sign * pair.result.mean, effect=sign * pair.result.effect)
        result.append(Comparison("overall", label, of, {}, turned, pair.p))
    return sorted(result, key=lambda each: tables.labels.index(each.label))


def every(tables: Tables, column: str) -> list[Comparison]:
    """Return the comparisons of all kinds."""
    return [each for kind in (by_value, by_label, interactions, overall) for each in kind(tables, column)]


def columns(tables: Tables) -> list[str]:
    """Return the columns of trials that are compared: the first final metric, and the recall of the worst class."""
    return [f"final/{metric}" for metric in tables.metrics[:1]] + [WORST] * (WORST in tables.study)


def frame(tables: Tables) -> Frame:
    """Return all comparisons as a table, a row each: ``docs/guides/study.md`` says what the columns mean."""
    rows = []
    for column in columns(tables):
        for each in every(tables, column):
            result = each.result
            found = {"mean": result.mean, "half": result.half, "p": result.p, "p_holm": each.adjusted}
            metric = column.removeprefix("final/")
            of = {"kind": each.kind, "metric": metric, "label": each.label, "reference": each.reference}
            rows.append({**of, **each.point, **found, "g": result.effect, "seeds": result.pairs})
    head = ["kind", "metric", "label", "reference", *tables.varied, "mean", "half", "p", "p_holm", "g", "seeds"]
    return pd.DataFrame(rows, columns=head)


def grids(tables: Tables) -> Iterator[tuple[str, Grid | None]]:
    """Yield the comparisons as tables of the page, each with its heading; of the recall of the worst class they are folded."""
    key, (first, *more) = next(iter(tables.varied)), columns(tables)
    yield f"What {key} costs", _costs(tables, first)
    yield "Who gets it back", _recovery(tables)
    yield "Labels compared", _compared(tables, first)
    yield "Labels compared", _interaction(tables, first)
    yield "Labels compared", _overall(tables, first)
    yield "Labels ranked", _ranking(tables)
    for column in more:
        for heading, made in (
            (f"What {key} costs", _costs),
            ("Labels compared", _compared),
            ("Labels compared", _interaction),
        ):
            grid = made(tables, column)
            title = f"{grid.title}: {_metric(column)}" if grid is not None and grid.title else _metric(column)
            yield heading, grid and grid._replace(title=title, folded=True)
    yield "Seeds needed", needed(tables)


def verdict(tables: Tables) -> str | None:
    """Return a sentence that ranks the labels by what the first key costs them, or says that it cannot; None for one label.

    The cost is the mean, over points, of the final metric at the key's first value less that at each other one. Where there is one
    value, labels are ranked by the final metric itself.
    """
    if not tables.metrics or (result := order(tables, _column(tables))) is None:
        return None
    key, metric = next(iter(tables.varied)), f"final {tables.metrics[0]}"
    if not treats(tables):
        return verdicts.ranking(tables.labels, result, f"{metric}, the mean over all points")
    cost = result.mean if _falling(_column(tables)) else 0.0 - result.mean
    return verdicts.ranking(tables.labels, result, f"the mean cost of {key} in {metric} over all points", cost)


def needed(tables: Tables) -> Grid | None:
    """Return how many seeds a difference of the size sought would need, by the spread seen; None where there is none to tell."""
    if tables.sought is None or not tables.metrics:
        return None
    by_kind: dict[str, list[Comparison]] = {}
    for each in every(tables, _column(tables)):
        if each.result.pairs > 1 and not each.result.constant and not each.again:
            by_kind.setdefault(each.kind, []).append(each)
    rows, least = [], math.inf
    for kind, comparisons in by_kind.items():
        by_name: dict[str, list[Difference]] = {name: [] for name in (*tables.labels, EVERY)}
        for each in comparisons:
            by_name[EVERY if kind == "overall" else each.label].append(each.result)
        for name, results in by_name.items():
            if not results:
                continue
            least = min(least, *(result.pairs for result in results))
            spreads = [result.spread for result in results]
            of = (float(np.median(spreads)), max(spreads))
            rows.append([KINDS[kind], name, *itertools.chain(*(_seeds(s, tables, len(comparisons)) for s in of))])
    if not rows:
        return None
    head = ["difference", "label"]
    for which in ("median", "largest"):
        head += [f"{which} spread", "seeds", "seeds, all tests"]
    text = (
        f"Seeds with which a paired t-test at {share(LEVEL)} finds a difference of {tables.sought:g} in final {tables.metrics[0]} "
        f"with {share(POWER)} power, if the spread stays: the standard deviation over seeds of the paired differences. All tests: "
        f"each at {share(LEVEL)} divided by how many there are of its kind. A spread from {int(least)} seeds may really be "
        f"{spread_at_most(int(least)):.1f} times as large (95 % interval). Differences that are the same on every seed, and "
        f"those of points that have all results of another, do not count."
    )
    return Grid(head, rows, text, f"A difference of {tables.sought:g}")


def _seeds(spread: float, tables: Tables, tests: int) -> list[str]:
    effect = (tables.sought or 0.0) / spread
    return [
        number(spread),
        *(f"> {MOST:,}" if n is None else f"{n:,}" for n in (seeds_needed(effect), seeds_needed(effect, tests))),
    ]


class Recovered(NamedTuple):
    """What a value of the first key costs the reference, the share that each other label gets back, and p of the cost.

    The share is NaN where the cost is not clear; p is by Holm's correction for all that ``by_value`` returns.
    """

    point: Mapping[str, Any]
    cost: Difference
    of: Mapping[str, Share]
    p: float


def recovered(tables: Tables) -> list[Recovered]:
    """Return it for every value of the first key but the first, which stands for no cost, at every point of the others."""
    key, *others = tables.varied
    base = tables.varied[key][0]
    reference, column, result = tables.reference, _column(tables), []
    sign = -1.0 if _falling(column) else 1.0
    for each in by_value(tables, column):
        if each.label == reference:
            by_seed = _by_seed(selected(tables.study, {k: each.point[k] for k in others}), key, column)
            at = lambda label, value, by_seed=by_seed: sign * by_seed(label, value)  # noqa: E731
            free, lost = at(reference, base), at(reference, each.point[key])
            back = {label: recovery(at(label, each.point[key]), lost, free) for label in tables.other_labels}
            cost = each.result._replace(mean=-sign * each.result.mean, effect=-sign * each.result.effect)
            result.append(Recovered(each.point, cost, back, each.adjusted))
    return result


def recovers(tables: Tables) -> bool:
    """Whether a share won back is given anywhere."""
    shares = [of.part for each in recovered(tables) for of in each.of.values()] if treats(tables) else []
    return bool(np.isfinite(shares).any())


def treats(tables: Tables) -> bool:
    """Whether the first key has several values that cost something, and is no draw of clients, such as a partition's seed."""
    key = next(iter(tables.varied))
    return len(tables.varied[key]) > 1 and not key.endswith("_seed")


def gets_back(tables: Tables) -> Iterator[str]:
    """Say where the first key costs the reference most, and who gets how much of it back, if Holm's correction leaves a cost.

    Nothing where no cost could be tested, as of one seed.
    """
    reference, labels = tables.reference, tables.other_labels
    if not labels or not tables.metrics or not treats(tables):
        return
    every_one = recovered(tables)
    if all(each.cost.pairs < 2 for each in every_one):
        return
    clear = [each for each in every_one if each.p < LEVEL and each.cost.mean > 0]
    if not clear:
        key = next(iter(tables.varied))
        tests = sum(not each.result.constant and not each.again for each in by_value(tables, _column(tables)))
        without = " Shares won back are given where the 95 % interval of the cost is above 0 without that correction."
        yield (
            f"At no single value of {key} is the cost for {reference} beyond the spread of the seeds by Holm's correction for "
            f"{count(tests, 'difference')}, those of all labels: nobody can be said to get it back."
            f"{without * recovers(tables)}"
        )
        return
    most = max(clear, key=lambda each: each.cost.mean)
    back = [label for label in sorted(labels, key=lambda one: -most.of[one].part) if np.isfinite(most.of[label].part)]
    said = joined([f"{label} {_part(most.of[label])}" for label in back[:NAMED]])
    lost = f"{most.cost.mean:.3f} ± {most.cost.half:.3f} of {tables.metrics[0]}, {probability(most.p)} by Holm's correction"
    largest = max(every_one, key=lambda each: each.cost.mean if np.isfinite(each.cost.mean) else -math.inf)
    told = f"{reference}, the reference, has its largest loss at {_place(most)}"
    if largest.cost.mean > most.cost.mean:
        noise = f"{largest.cost.mean:.3f} ± {largest.cost.half:.3f}, which may be chance"
        told = f"Beyond chance {told} ({noise}, at {_place(largest)})"
    yield f"{told}: {lost}. Won back (95 % interval): {said}."


def _place(of: Recovered) -> str:
    return joined([f"{key} = {plain_value(value)}" for key, value in of.point.items()])


def _paired(tables: Tables) -> str:
    """Return how differences are told."""
    seeds = tables.study["seed"].nunique()
    return ONE_SEED if seeds < 2 else PAIRED.replace(G, "") if seeds < 3 else PAIRED


def _costs(tables: Tables, column: str) -> Grid | None:
    key, *others = tables.varied
    base, *values = tables.varied[key]
    if not treats(tables):
        return None
    text = f"{_metric(column).capitalize()} less that at {key} = {plain_value(base)}, {_paired(tables)}"
    return Grid(
        ["label", *others, *map(plain_value, values)], _rows(by_value(tables, column), others, len(values)), text
    )


def _compared(tables: Tables, column: str) -> Grid | None:
    labels, keys = tables.other_labels, list(tables.varied)
    if not labels:
        return None
    text = f"{_metric(column).capitalize()} of each label less that of {tables.reference}, {_paired(tables)}"
    return Grid(
        [*keys, *labels],
        _rows(by_label(tables, column), keys, len(labels), labelled=False),
        text,
        "Against the reference",
    )


def _interaction(tables: Tables, column: str) -> Grid | None:
    key, *others = tables.varied
    base, *values = tables.varied[key]
    if not treats(tables) or not tables.other_labels:
        return None
    text = (
        f"What each label gains from {key} = {plain_value(base)} to another value, less what {tables.reference} gains, in "
        f"{_metric(column)}: 0 where it costs both alike; {_paired(tables)}"
    )
    return Grid(
        ["label", *others, *map(plain_value, values)],
        _rows(interactions(tables, column), others, len(values)),
        text,
        "Differences of differences",
    )


def _overall(tables: Tables, column: str) -> Grid | None:
    key = next(iter(tables.varied))
    base = tables.varied[key][0]
    rows = [
        [each.label, each.reference, _cell(each.result, each.adjusted), _p(each.result.p), _p(each.adjusted)]
        for each in overall(tables, column)
    ]
    if not rows:
        return None
    gain = f"What a label gains in {_metric(column)} from {key} = {plain_value(base)} to another value"
    gain = gain if treats(tables) else ""
    text = f"{gain or _metric(column).capitalize()}, the mean over all points, less that of another label, {_paired(tables)}"
    return Grid(["label", "less", "difference", "p", "p (Holm)"], rows, text, "Over all points")


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
    labels, key = tables.other_labels, next(iter(tables.varied))
    base = tables.varied[key][0]
    if not labels or not treats(tables):
        return None
    rows = [
        [*map(plain_value, each.point.values()), _cell(each.cost, each.p), *(_part(each.of[label]) for label in labels)]
        for each in recovered(tables)
    ]
    text = (
        f"What each label gets back of what {tables.reference} loses in final {tables.metrics[0]}: by how much it is ahead of "
        f"{tables.reference} at that point, as a share of that loss. 100 % is where it is as good as {tables.reference} is at "
        f"{key} = {plain_value(base)}. Its 95 % interval is Fieller's. Given where the 95 % interval of the loss leaves out 0. "
        f"A * marks a loss with p below 0.05 after Holm's correction for all costs, those of other labels too."
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


def _falling(column: str) -> bool:
    return less_is_better(column.removeprefix("final/"))


def _metric(column: str) -> str:
    """Return what a column holds, in words."""
    return "recall of the worst class" if column == WORST else column.replace("/", " ")


def _tested(
    tables: Tables,
    kind: str,
    reference: str | None,
    differences: Sequence[tuple[str, Mapping[str, Any], np.ndarray]],
    base: Any = None,
) -> list[Comparison]:
    """Return the comparisons of a kind, with p adjusted by Holm's correction for all of them that are tests of their own.

    ``base`` is the value of the first key that others are compared with, where they are.
    """
    key = next(iter(tables.varied))

    def same(label: str, point: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what is the same for differences of one label that have the same results at both ends."""
        ends = [point] if base is None else [point, {**point, key: base}]
        return label, *(tables.original[tuple(end[name] for name in tables.varied)] for end in ends)

    results, first = [difference(values) for *_, values in differences], dict[Any, int]()
    at = [first.setdefault(same(label, point), i) for i, (label, point, _) in enumerate(differences)]
    own = list(first.values())
    adjusted = dict(zip(own, holm([results[i].p for i in own]), strict=True))
    return [
        Comparison(kind, label, reference, point, results[i], adjusted[at[i]], again=at[i] != i)
        for i, (label, point, _) in enumerate(differences)
    ]


def _cell(result: Difference, p: float) -> str:
    if not np.isfinite(result.mean):
        return MISSING
    if result.equal:
        return EQUAL
    if result.constant:
        return f"{_signed(result.mean, 3)}, {CONSTANT}"
    star = " *" if p < LEVEL else ""
    spread = f" ± {result.half:.3f}{star}" if np.isfinite(result.half) else ""
    return f"{_signed(result.mean, 3)}{spread}{_effect(result.effect)}"


def _p(value: float) -> str:
    return f"{value:.2g}" if np.isfinite(value) else MISSING


def _effect(value: float) -> str:
    if math.isnan(value):
        return ""
    return f", g {_signed(value, 1)}" if abs(value) < LARGEST else f", |g| > {LARGEST}"


def _part(value: Share) -> str:
    if not np.isfinite(value.part):
        return MISSING
    part, low, high = (_signed(100 * each, 0).lstrip("+") for each in value)
    return f"{part} % ({low} to {high})"


def _signed(value: float, digits: int) -> str:
    """Return a number to so many digits with its sign, of which 0 has none."""
    text = f"{value:+.{digits}f}"
    return text.lstrip("+-") if not float(text) else text
