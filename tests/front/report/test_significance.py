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

P = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def test_a_paired_difference_is_that_of_scipy():
    values = np.random.default_rng(0).normal(0.3, 1.0, 7)
    wanted: Any = stats.ttest_1samp(values, 0.0)
    found = difference(np.append(values, np.nan))
    low, high = wanted.confidence_interval(0.95)
    assert found[:4] == pytest.approx((values.mean(), (high - low) / 2, wanted.pvalue, 7), rel=1e-12)
    assert [difference(np.full(n, 2.0)).pairs for n in (0, 1, 3)] == [0, 1, 3]
    assert difference(np.full(3, -2.0)) == (-2.0, 0.0, 0.0, 3, -math.inf)
    assert difference(np.zeros(3)) == (0.0, 0.0, 1.0, 3, 0.0)
    assert not difference(np.array([2.0])).clear


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
    assert [row[:2] for row in grid.rows][2:] == [["label less the reference", "B"], ["of these differences", "B"]]
    spreads = [each.result.spread for each in study_comparisons.interactions(tables)]
    pairs = tables.study.set_index(["label", "availability.rate", "seed"])["final/accuracy"].unstack()
    lost = (pairs.loc[("B", 0.1)] - pairs.loc[("B", 1.0)]) - (pairs.loc[("A", 0.1)] - pairs.loc[("A", 1.0)])
    assert spreads[1] == pytest.approx(lost.std())
    wanted = [seeds_needed(0.05 / s, tests) for s in (np.median(spreads), max(spreads)) for tests in (1, len(spreads))]
    assert [int(str(grid.rows[-1][at])) for at in (3, 4, 6, 7)] == wanted


def test_an_order_names_the_pairs_that_differ_after_correction_for_all_pairs():
    seeds = np.arange(6.0)[:, None]
    noise = 0.01 * np.array([[1, -1, 1, -1, 1, -1], [1, 1, -1, -1, 1, 1], [-1, 1, 1, 1, 1, -1]]).T
    values = np.array([[0.5, 0.9, 0.901]]) + 0.1 * seeds + noise  # what is luck of the seed is shared
    found = in_order(values)
    assert (found.order, found.apart, found.pairs) == ([2, 1, 0], [(2, 0), (1, 0)], 6)
    p = [stats.ttest_rel(values[:, a], values[:, b]).pvalue for a, b in ((2, 1), (2, 0), (1, 0))]
    assert [value < 0.05 for value in holm(p)] == [False, True, True]
    assert in_order(-values, least_is_best=True)[1:] == found[1:]
    values[0, 1] = values[1, 2] = math.nan
    assert in_order(values).pairs == 4


def test_a_verdict_ranks_some_all_or_none():
    names, values = ["A", "B"], np.array([[0.1, 0.2], [0.11, 0.2], [0.1, 0.21]])
    assert verdicts.ranking(names, values, "x").startswith("By x, the best is B (0.2033), then A (0.1033). ")
    assert "the best is A" in verdicts.ranking(names, values, "x", least_is_best=True)
    assert "cannot be ranked: no pair" in verdicts.ranking(names, values * [[1, 1], [1, 0], [1, 1]], "x")
    assert "cannot be ranked: there is one seed" in verdicts.ranking(names, values[:1], "x")
    assert "cannot be ranked: no seed" in verdicts.ranking(names, np.array([[0.1, math.nan], [math.nan, 0.1]]), "x")
    three = np.column_stack([values, values[:, 1] + [0.001, -0.001, 0.0]])
    assert "B is ahead of A" in (said := verdicts.ranking([*names, "C"], three, "x"))
    assert "C is ahead of A" in said
    assert "the other 1 pair cannot be told apart" in said


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
    assert recovery(without, uncorrected, without) == pytest.approx(1.0)
    assert recovery(uncorrected, uncorrected, without) == 0.0
    assert recovery((without + uncorrected) / 2, uncorrected, without) == pytest.approx(0.5)
    assert math.isnan(recovery(without, without - np.array([0.1, -0.1, 0.0]), without))  # the cost may be chance
    assert math.isnan(recovery(without + 0.1, without, uncorrected))  # dropout helps: there is nothing to recover


def study(labels: dict[str, float], *, seeds: int = 3) -> Tables:
    """Return tables of a made study: accuracy 1 at rate 1.0, and less by a label's loss at lower rates."""
    rates = [1.0, 0.5, 0.1]
    rows = [
        {"label": label, "algorithm": "fedavg", "availability.rate": rate, "seed": seed, "status": "finished", "error": None,
         "final/accuracy": 1.0 - loss * (1.0 - rate) + 0.001 * seed, "best/accuracy": 1.0}
        for label, loss in labels.items() for rate in rates for seed in range(seeds)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    return Tables({"availability.rate": rates}, None, frame, pd.DataFrame(), pd.DataFrame(), [None] * len(rows))


def test_a_study_says_which_label_dropout_costs_less():
    tables = study({"FedAvg": 0.5, "FedAU": 0.1, "MIFA": 0.0})
    grid = study_comparisons._interaction(tables)
    assert grid is not None
    told = [["FedAU", "+0.200 ± 0.000 *, |g| > 100"], ["MIFA", "+0.250 ± 0.000 *, |g| > 100"]]
    assert [row[:2] for row in grid.rows] == told
    assert [(each.point, each.of) for each in study_comparisons.recovered(tables)] == [
        ({"availability.rate": rate}, {"FedAU": pytest.approx(0.8), "MIFA": pytest.approx(1.0)}) for rate in (0.5, 0.1)
    ]
    assert list(study_page.answers(tables)) == [
        "FedAvg loses most at availability.rate = 0.1: 0.450 ± 0.000 of accuracy. Won back: MIFA 100 % and FedAU 80 %.",
        "By the mean cost of availability.rate in final accuracy over all points, the best is MIFA (0), then FedAU (0.07), then "
        "FedAvg (0.35). Every pair differs (paired by 3 seeds, 5 % with Holm's correction for 3 pairs).",
    ]
    (line, _) = study_page.answers(study({"MIFA": 0.0, "FedAvg": 0.5}))
    assert "nobody can be said" in line
    doubtful = study({"FedAvg": 0.0, "MIFA": 0.0})  # each cost has p = 0.035, and 0.07 as one of two
    of = doubtful.study
    of["final/accuracy"] = 1.0 - (of["label"] == "FedAvg") * (of["availability.rate"] < 1) * (2 + of["seed"]) / 30
    assert "nobody can be said" in next(study_page.answers(doubtful))
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
    assert len(found) == 3 * 2 + 2 * 3 + 2 * 2
    assert found["reference"].dropna().unique().tolist() == ["MIFA"]
    assert study_comparisons.recovered(by)[0].of.keys() == {"FedAvg", "FedAU"}


def test_differences_of_differences_are_those_of_scipy_whatever_the_order_of_rows():
    tables = study({"A": 0.5, "B": 0.1}, seeds=5)
    noise = np.random.default_rng(3).normal(0.0, 0.05, len(tables.study))
    tables.study["final/accuracy"] += noise
    mixed = replace(tables, study=tables.study.sample(frac=1.0, random_state=0))
    at = tables.study.set_index(["label", "availability.rate", "seed"])["final/accuracy"].unstack()
    for rate, found in zip((0.5, 0.1), study_comparisons.interactions(mixed), strict=True):
        lost = [(at.loc[(label, rate)] - at.loc[(label, 1.0)]).to_numpy() for label in ("B", "A")]
        wanted: Any = stats.ttest_rel(*lost)
        assert (found.point, found.result.p) == ({"availability.rate": rate}, pytest.approx(wanted.pvalue))
        assert found.result.mean == pytest.approx((lost[0] - lost[1]).mean())


def test_two_labels_are_not_ranked():
    assert study_comparisons._ranking(study({"FedAvg": 0.5, "FedAU": 0.1})) is None
