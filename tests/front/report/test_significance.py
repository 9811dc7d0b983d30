"""Tests of significance, held against SciPy and against numbers printed elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedfleet.report import study_comparisons, study_figures, study_page, study_tables, verdicts
from fedfleet.report.significance import (
    contrast,
    critical_difference,
    difference,
    holm,
    in_order,
    power,
    ranked,
    recovery,
    seeds_needed,
    spread_at_most,
)
from fedfleet.report.study_tables import Tables

ACCURACY = "final/accuracy"
P = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def test_a_paired_difference_is_that_of_scipy():
    values = np.random.default_rng(0).normal(0.3, 1.0, 7)
    wanted: Any = stats.ttest_1samp(values, 0.0)
    found = difference(np.append(values, np.nan))
    low, high = wanted.confidence_interval(0.95)
    assert found[:4] == pytest.approx((values.mean(), (high - low) / 2, wanted.pvalue, 7), rel=1e-12)
    assert [difference(np.full(n, 2.0)).pairs for n in (0, 1, 3)] == [0, 1, 3]
    for value in (0.0, -0.3):  # 3 times 0.3 over 3 is not 0.3 in double precision: spread of rounding is none
        same = difference(np.full(3, value))
        assert same[:2] + same[3:4] == (value, 0.0, 3)
        assert np.isnan([same.p, same.effect]).all()
        assert (same.constant, same.equal, same.clear) == (True, not value, False)
    assert not found.constant
    assert not difference(np.array([2.0])).clear
    a = np.array([0.5, 0.7, 0.9])
    assert difference(contrast([a], [a - np.array([0.2, 0.2 + 1e-8, 0.2])])).constant
    assert not difference(contrast([a], [a - np.array([0.2, 0.2 + 1e-5, 0.2])])).constant


def test_effects_are_without_the_bias_of_small_samples():
    """Hedges (1981), table 2: c(m) of 2, 5 and 10 degrees of freedom; and the mean over many samples is the true effect."""
    for n, factor in ((3, 0.5642), (6, 0.8408), (11, 0.9228)):
        values = np.random.default_rng(n).normal(1.0, 1.0, n)
        assert difference(values).effect == pytest.approx(factor * values.mean() / values.std(ddof=1), rel=1e-3)
    assert math.isnan(difference(np.array([1.0, 2.0])).effect)
    many = np.random.default_rng(1).normal(0.8, 1.0, (4000, 5))
    assert np.mean([difference(values).effect for values in many]) == pytest.approx(0.8, abs=0.03)


def test_power_is_that_of_simulated_tests_and_of_known_sizes():
    """34, 15 and 10 pairs are what G*Power gives for d = 0.5, 0.8 and 1 (two-sided, 5 %, 80 %)."""
    assert [seeds_needed(d) for d in (0.5, 0.8, 1.0)] == [34, 15, 10]
    values = np.random.default_rng(0).normal(1.2, 1.0, (20_000, 6))
    p: Any = stats.ttest_1samp(values, 0.0, axis=1).pvalue
    for tests in (1, 5):
        assert power(1.2, 6, tests) == pytest.approx((p < 0.05 / tests).mean(), abs=0.01)
    assert power(0.0, 6) == pytest.approx(0.05)
    n = seeds_needed(0.7, 10)
    assert n is not None
    assert power(0.7, n, 10) >= 0.8 > power(0.7, n - 1, 10)
    assert (seeds_needed(1e-6), seeds_needed(math.inf)) == (None, 2)
    needed = [seeds_needed(effect, 3) for effect in np.geomspace(0.5, 50, 40)]
    assert needed == sorted(
        needed, reverse=True
    )  # a larger effect never needs more, also where SciPy's far tail is NaN
    assert spread_at_most(3) == pytest.approx(6.285, abs=1e-3)  # 2 degrees of freedom: chi-square 0.0506 at 2.5 %


def test_a_study_says_how_many_seeds_a_difference_would_need():
    tables = study({"A": 0.5, "B": 0.1}, seeds=4)
    tables.study["final/accuracy"] += np.random.default_rng(3).normal(0.0, 0.05, len(tables.study))
    assert study_comparisons.needed(tables) is None
    grid = study_comparisons.needed(replace(tables, sought=0.05))
    assert grid is not None
    kinds = ["label less the reference", "of these differences", "over all points"]
    assert [row[:2] for row in grid.rows][2:] == [[kinds[0], "B"], [kinds[1], "B"], [kinds[2], "any two"]]
    spreads = [each.result.spread for each in study_comparisons.interactions(tables, ACCURACY)]
    pairs = tables.study.set_index(["label", "availability.rate", "seed"])["final/accuracy"].unstack()
    lost = (pairs.loc[("B", 0.1)] - pairs.loc[("B", 1.0)]) - (pairs.loc[("A", 0.1)] - pairs.loc[("A", 1.0)])
    assert spreads[1] == pytest.approx(lost.std())
    wanted = [seeds_needed(0.05 / s, tests) for s in (np.median(spreads), max(spreads)) for tests in (1, len(spreads))]
    assert [int(str(grid.rows[-2][at])) for at in (3, 4, 6, 7)] == wanted


def test_an_order_names_the_pairs_that_differ_after_correction_for_all_pairs():
    seeds = np.arange(6.0)[:, None]
    noise = 0.01 * np.array([[1, -1, 1, -1, 1, -1], [1, 1, -1, -1, 1, 1], [-1, 1, 1, 1, 1, -1]]).T
    values = np.array([[0.5, 0.9, 0.901]]) + 0.1 * seeds + noise  # what is luck of the seed is shared
    found = in_order(values)
    assert (found.order, [pair[:2] for pair in found.apart], found.seeds) == ([2, 1, 0], [(2, 0), (1, 0)], 6)
    p = [stats.ttest_rel(values[:, a], values[:, b]).pvalue for a, b in ((2, 1), (2, 0), (1, 0))]
    assert [value < 0.05 for value in holm(p)] == [False, True, True]
    turned = in_order(-values, least_is_best=True)
    assert [pair[:2] for pair in turned.apart] == [pair[:2] for pair in found.apart]
    values[0, 1] = values[1, 2] = math.nan
    assert in_order(values).seeds == 4


def test_what_agrees_but_for_rounding_is_no_test():
    """Labels that are one by construction where nobody drops out: two of six tests are none, and interactions say the same."""
    whole = np.array([0.7, 0.1, math.nan, math.inf, 0.0])
    near = whole * [1 + 1e-8, 1 + 1e-4, 1, 1, 1]
    assert contrast([near], [whole]).tolist() == pytest.approx([0.0, 1e-5, math.nan, math.nan, 0.0], nan_ok=True)
    assert contrast([near, whole], [whole, near])[:2].tolist() == [0.0, 0.0]
    tables = study({"A": 0.5, "B": 0.1}, seeds=4)
    noise = np.random.default_rng(3).normal(0.0, 0.1, len(tables.study)) * (tables.study["availability.rate"] < 1)
    tables.study["final/accuracy"] += noise + 1e-9 * (tables.study["label"] == "B")
    by_label, both = (f(tables, ACCURACY) for f in (study_comparisons.by_label, study_comparisons.interactions))
    assert [each.result.equal for each in by_label] == [True, False, False]
    assert [each.adjusted for each in by_label[1:]] == pytest.approx([each.adjusted for each in both])
    of = {each.point["availability.rate"]: each.result.p for each in by_label[1:]}
    assert {each.point["availability.rate"]: each.adjusted for each in by_label[1:]} == pytest.approx(
        dict(zip(of, holm(list(of.values())), strict=True))
    )
    grid, needed = study_comparisons._compared(tables, ACCURACY), study_comparisons.needed(replace(tables, sought=0.05))
    assert grid is not None
    assert needed is not None
    assert grid.rows[0] == ["1", "equal"]
    spreads = {str(row[0]): row[2:] for row in needed.rows}
    assert spreads["label less the reference"] == spreads["of these differences"]
    assert in_order(np.array([[0.1, 0.2], [0.2, 0.5], [-0.3, 0.1]])).mean[0] == 0.0  # not 1e-17
    level = in_order(np.ones((3, 2)))
    assert (level.tests, level.apart) == (0, [])
    assert "agree on all 3 seeds" in verdicts.ranking(["A", "B"], level, "x")
    apart = in_order(np.ones((3, 2)) * [1.0, 0.9])  # by the same on each seed: nothing tells how much of that is chance
    assert (apart.tests, apart.apart) == (0, [])
    assert "differ alike" in verdicts.ranking(["A", "B"], apart, "x")
    alike = tables.study.assign(**{ACCURACY: np.where(tables.study["label"] == "B", 0.6, 0.5)})
    grid = study_comparisons._compared(replace(tables, study=alike), ACCURACY)
    assert grid is not None
    assert [row[1] for row in grid.rows] == ["+0.100, constant"] * 3


def test_points_that_have_the_results_of_another_are_no_tests_of_their_own():
    """Where nobody drops out, all models of who drops out are one."""
    tables = study({"A": 0.5, "B": 0.1, "C": 0.2}, seeds=4)
    noise = np.random.default_rng(3).normal(0.0, 0.05, (2, len(tables.study)))
    kinds = [tables.study.assign(**{"availability.kind": kind}) for kind in ("bernoulli", "markov")]
    for of, one in zip(kinds, noise, strict=True):
        of["final/accuracy"] += np.where(of["availability.rate"] == 1, noise[0], one)
    varied = {"availability.rate": [1.0, 0.5, 0.1], "availability.kind": ["bernoulli", "markov"]}
    both = replace(tables, varied=varied, study=pd.concat(kinds, ignore_index=True))
    found = study_comparisons.by_label(both, ACCURACY)
    assert [each.again for each in found] == [False] * 2 + [True] * 2 + [False] * 8
    assert [each.adjusted for each in found[2:4]] == [each.adjusted for each in found[:2]]
    own = [each for each in found if not each.again]
    assert [each.adjusted for each in own] == pytest.approx(holm([each.result.p for each in own]))
    assert not any(
        each.again
        for each in [*study_comparisons.by_value(both, ACCURACY), *study_comparisons.interactions(both, ACCURACY)]
    )
    ranks = study_tables.ranks(both, "accuracy")
    assert ranks is not None
    assert ranks.conditions == 5


def test_a_draw_of_clients_costs_nothing():
    tables = study({"A": 0.5, "B": 0.1}, seeds=4)
    drawn = replace(
        tables,
        varied={"population.partition_seed": [1.0, 0.5, 0.1]},
        study=tables.study.rename(columns={"availability.rate": "population.partition_seed"}),
    )
    (only,) = study_page.answers(drawn)
    assert only.startswith("By final accuracy, the mean over all points, the best is B")
    assert {name for name, grid in study_comparisons.grids(drawn) if grid is not None} == {"Labels compared"}


def test_labels_are_compared_over_all_points():
    tables = study({"A": 0.5, "B": 0.1, "C": 0.3}, seeds=5)
    tables.study["final/accuracy"] += np.random.default_rng(3).normal(0.0, 0.05, len(tables.study))
    at = tables.study.set_index(["label", "availability.rate", "seed"])["final/accuracy"].unstack()
    gain = {label: ((at.loc[label].loc[[0.5, 0.1]]) - at.loc[(label, 1.0)]).mean() for label in "ABC"}
    found = study_comparisons.overall(replace(tables, compared_with="C"), ACCURACY)
    assert [(each.label, each.reference) for each in found] == [("A", "C"), ("B", "C"), ("B", "A")]
    for each in found:
        wanted: Any = stats.ttest_rel(gain[each.label], gain[str(each.reference)])
        assert each.result.p == pytest.approx(wanted.pvalue)
        assert each.result.mean == pytest.approx((gain[each.label] - gain[str(each.reference)]).mean())
        assert math.copysign(1.0, each.result.effect) == math.copysign(1.0, each.result.mean)
    assert [each.adjusted for each in found] == pytest.approx(holm([each.result.p for each in found]))


def test_a_verdict_ranks_some_all_or_none():
    values = np.array([[0.1, 0.2], [0.11, 0.2], [0.1, 0.21]])

    def said(values: np.ndarray, **how: bool) -> str:
        return verdicts.ranking("ABC"[: values.shape[1]], in_order(values, **how), "x")

    p = float(stats.ttest_rel(values[:, 1], values[:, 0]).pvalue)  # type: ignore[attr-defined]
    assert said(values).startswith("By x, the best is B (0.2033), then A (0.1033): they differ by 0.100 ± 0.025, ")
    assert f"p = {p:.2g} (paired by 3 seeds" in said(values)
    assert "the best is A" in said(values, least_is_best=True)
    assert "cannot be ranked: they differ by" in said(values * [[1, 1], [1, 0], [1, 1]])
    assert "cannot be ranked: there is one seed" in said(values[:1])
    assert "cannot be ranked: no seed" in said(np.array([[0.1, math.nan], [math.nan, 0.1]]))
    three = np.column_stack([values, values[:, 1] + [0.001, -0.001, 0.0]])
    assert "B is ahead of A (p = " in said(three)
    assert "C is ahead of A (p = " in said(three)
    assert "the other pair cannot be told apart" in said(three)


def test_holm_by_hand():
    assert holm([0.01, 0.04, math.nan, 0.03, 0.005]) == pytest.approx([0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True)


@given(P)
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(p):
    found = holm(p)
    assert all(value <= got <= min(1.0, len(p) * value) for value, got in zip(p, found, strict=True))
    assert [found[i] for i in np.argsort(p, kind="stable")] == sorted(found)


def test_critical_differences_are_those_printed():
    """Demšar's table 5 (k = 4 and 14 conditions, section 3.2.4: 1.25), and three of a larger design."""
    found = [critical_difference(k, n) for k, n in ((4, 14), (8, 18), (10, 18), (12, 18))]
    assert [round(value, 2) for value in found] == [1.25, 2.47, 3.19, 3.93]


def test_ranks_by_hand():
    values = np.array([[0.9, 0.7, 0.8, 0.8], [0.5, 0.4, 0.6, 0.3], [0.2, np.nan, 0.1, 0.0], [0.9, 0.9, 0.9, 0.1]])
    found, whole = ranked(values), values[[0, 1, 3]]
    assert found.mean == pytest.approx([(1 + 2 + 2) / 3, (4 + 3 + 2) / 3, (2.5 + 1 + 2) / 3, (2.5 + 4 + 4) / 3])
    assert found.conditions == 3
    assert (found.statistic, found.p) == pytest.approx(stats.friedmanchisquare(*whole.T))
    assert found.order == [0, 2, 1, 3]
    assert found.groups == [[0, 2, 1, 3]]
    assert ranked(-values, least_is_best=True).mean == pytest.approx(found.mean)
    assert ranked(np.ones((3, 3))).p == 1.0


def test_groups_are_those_that_lie_within_the_critical_difference():
    order = np.arange(6.0) + np.zeros((40, 1))  # always the same order: neighbours alone cannot be told apart
    found = ranked(order)
    assert found.mean.tolist() == [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert 1.0 < found.distance < 2.0
    assert found.groups == [[5, 4], [4, 3], [3, 2], [2, 1], [1, 0]]


@pytest.mark.parametrize("shape", [(1, 3), (5, 2)])
def test_too_few_are_not_ranked(shape):
    with pytest.raises(ValueError, match="three methods and two conditions"):
        ranked(np.ones(shape))


def test_recovery_is_a_share_of_what_dropout_costs():
    noise = np.array([-0.01, 0.0, 0.01])
    without, uncorrected = 0.9 + noise, np.array([0.5, 0.52, 0.48])
    assert recovery(without, uncorrected, without) == pytest.approx((1.0, 1.0, 1.0))
    assert recovery(uncorrected, uncorrected, without) == (0.0, 0.0, 0.0)
    assert recovery((without + uncorrected) / 2, uncorrected, without) == pytest.approx((0.5, 0.5, 0.5))
    assert np.isnan(recovery(without, without - np.array([0.1, -0.1, 0.0]), without)).all()  # the cost may be chance
    assert np.isnan(recovery(without + 0.1, without, uncorrected)).all()  # dropout helps: there is nothing to recover


def test_the_interval_of_a_recovery_is_what_a_test_does_not_refuse():
    """Fieller's: at its ends the t-test of the gain less R times the cost has a p of exactly 5 %, within more, outside less."""
    random = np.random.default_rng(5)
    without, uncorrected, corrected = (random.normal(mean, 0.05, 6) for mean in (0.9, 0.6, 0.75))
    corrected[2] = math.nan  # a seed that failed counts for neither
    found = recovery(corrected, uncorrected, without)
    gain, cost = (np.delete(each - uncorrected, 2) for each in (corrected, without))
    assert found.part == pytest.approx(gain.mean() / cost.mean())
    p = [
        float(stats.ttest_1samp(gain - r * cost, 0.0).pvalue)
        for r in (*found[1:], found.part, found.low - 0.01, found.high + 0.01)
    ]  # type: ignore[attr-defined]
    assert p[:3] == pytest.approx([0.05, 0.05, 1.0])
    assert max(p[3:]) < 0.05


def study(labels: dict[str, float], *, seeds: int = 3) -> Tables:
    """Return tables of a made study: accuracy 1 at rate 1.0, and less at lower rates by a label's loss, a little more each seed."""
    rates, middle = [1.0, 0.5, 0.1], (seeds - 1) / 2
    rows = [
        {"label": label, "algorithm": "fedavg", "availability.rate": rate, "seed": seed, "status": "finished", "error": None,
         "final/accuracy": 1.0 - loss * (1.0 - rate) * (1 + 1e-4 * i * (seed - middle)) + 0.001 * seed, "best/accuracy": 1.0}
        for i, (label, loss) in enumerate(labels.items(), 1) for rate in rates for seed in range(seeds)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    return Tables({"availability.rate": rates}, None, frame, pd.DataFrame(), pd.DataFrame(), [None] * len(rows))


def test_a_study_says_which_label_dropout_costs_less():
    tables = study({"FedAvg": 0.5, "FedAU": 0.1, "MIFA": 0.0})
    grid = study_comparisons._interaction(tables, ACCURACY)
    assert grid is not None
    told = [["FedAU", "+0.200 ± 0.000 *, |g| > 100"], ["MIFA", "+0.250 ± 0.000 *, |g| > 100"]]
    assert [row[:2] for row in grid.rows] == told
    assert [(each.point, each.of) for each in study_comparisons.recovered(tables)] == [
        ({"availability.rate": rate}, {"FedAU": pytest.approx([0.8] * 3, abs=1e-3), "MIFA": pytest.approx([1.0] * 3)})
        for rate in (0.5, 0.1)
    ]
    won, ranked_ = study_page.answers(tables)
    assert won.startswith(
        "FedAvg, the reference, has its largest loss at availability.rate = 0.1: 0.450 ± 0.000 of accuracy, p < 0.0001"
    )
    assert won.endswith("Won back (95 % interval): MIFA 100 % (100 to 100) and FedAU 80 % (80 to 80).")
    best = "the best is MIFA (0), then FedAU (0.07), then FedAvg (0.35). Every pair differs, the largest p < 0.0001"
    assert ranked_.startswith(f"By the mean cost of availability.rate in final accuracy over all points, {best}")
    noisy = study({"FedAvg": 0.5, "MIFA": 0.0})
    wide = (noisy.study["label"] == "FedAvg") & (noisy.study["availability.rate"] == 0.1)
    noisy.study["final/accuracy"] -= 0.5 * wide * noisy.study["seed"]
    won = next(study_page.answers(noisy))
    assert won.startswith("Beyond chance FedAvg, the reference, has its largest loss at availability.rate = 0.5 (0.95")
    assert "which may be chance, at availability.rate = 0.1): 0.250" in won
    (line, _) = study_page.answers(study({"MIFA": 0.0, "FedAvg": 0.5}))
    assert "nobody can be said" in line
    doubtful = study({"FedAvg": 0.0, "MIFA": 0.0})  # each cost has p = 0.035, and 0.07 as one of two
    of = doubtful.study
    of["final/accuracy"] = 1.0 - (of["label"] == "FedAvg") * (of["availability.rate"] < 1) * (
        (2 + of["seed"]) / 30 + of["availability.rate"] / 1e4
    )
    assert "Shares won back are given where" in next(study_page.answers(doubtful))
    found = study_tables.ranks(tables, "accuracy")
    assert found is not None
    assert found.mean.tolist() == [(2 + 3 + 3) / 3, 2.0, (2 + 1 + 1) / 3]  # level without dropout
    picture = study_figures._ranking(tables, "accuracy")
    assert picture is not None
    assert picture.png.startswith(b"\x89PNG")


def test_whom_labels_are_compared_with_may_be_chosen():
    tables = study({"FedAvg": 0.5, "FedAU": 0.1, "MIFA": 0.0})
    by = replace(tables, compared_with="MIFA")
    assert (tables.reference, by.reference, by.other_labels) == ("FedAvg", "MIFA", ["FedAvg", "FedAU"])
    found = study_comparisons.frame(by).set_index(["kind", "label", "availability.rate"])
    assert found.loc[("interaction", "FedAvg", 0.1), "mean"] == pytest.approx(-0.45)
    assert found.loc[("label", "FedAU", 0.5), "mean"] == pytest.approx(-0.05)
    assert found.loc[("value", "FedAU", 0.5), "mean"] == pytest.approx(-0.05)
    assert found.groupby("kind").size().to_dict() == {
        "value": 3 * 2,
        "label": 2 * 3,
        "interaction": 2 * 2,
        "overall": 3,
    }
    assert found["reference"].dropna().unique().tolist() == ["MIFA", "FedAvg"]
    assert study_comparisons.recovered(by)[0].of.keys() == {"FedAvg", "FedAU"}


def test_differences_of_differences_are_those_of_scipy_whatever_the_order_of_rows():
    tables = study({"A": 0.5, "B": 0.1}, seeds=5)
    noise = np.random.default_rng(3).normal(0.0, 0.05, len(tables.study))
    tables.study["final/accuracy"] += noise
    mixed = replace(tables, study=tables.study.sample(frac=1.0, random_state=0))
    at = tables.study.set_index(["label", "availability.rate", "seed"])["final/accuracy"].unstack()
    for rate, found in zip((0.5, 0.1), study_comparisons.interactions(mixed, ACCURACY), strict=True):
        lost = [(at.loc[(label, rate)] - at.loc[(label, 1.0)]).to_numpy() for label in ("B", "A")]
        wanted: Any = stats.ttest_rel(*lost)
        assert (found.point, found.result.p) == ({"availability.rate": rate}, pytest.approx(wanted.pvalue))
        assert found.result.mean == pytest.approx((lost[0] - lost[1]).mean())


def test_two_labels_are_not_ranked():
    assert study_comparisons._ranking(study({"FedAvg": 0.5, "FedAU": 0.1})) is None
