"""Tests of significance, held against SciPy and against numbers printed elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedfleet.report import study_figures, study_page, study_tables
from fedfleet.report.significance import critical_difference, difference, holm, ranked, recovery
from fedfleet.report.study_tables import Tables

P = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


def test_a_paired_difference_is_that_of_scipy():
    values = np.random.default_rng(0).normal(0.3, 1.0, 7)
    wanted: Any = stats.ttest_1samp(values, 0.0)
    found = difference(np.append(values, np.nan))
    low, high = wanted.confidence_interval(0.95)
    assert found == pytest.approx((values.mean(), (high - low) / 2, wanted.pvalue, 7), rel=1e-12)
    assert [difference(np.full(n, 2.0)).pairs for n in (0, 1, 3)] == [0, 1, 3]
    assert difference(np.full(3, 2.0)) == (2.0, 0.0, 0.0, 3)
    assert difference(np.zeros(3)).p == 1.0
    assert not difference(np.array([2.0])).clear


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
    grid = study_page._interaction(tables)
    assert grid is not None
    assert [row[:2] for row in grid.rows] == [["FedAU", "+0.200 ± 0.000 *"], ["MIFA", "+0.250 ± 0.000 *"]]
    assert [(each.point, each.of) for each in study_page.recovered(tables)] == [
        ({"availability.rate": rate}, {"FedAU": pytest.approx(0.8), "MIFA": pytest.approx(1.0)}) for rate in (0.5, 0.1)
    ]
    assert list(study_page.gets_back(tables)) == [
        "FedAvg loses most at availability.rate = 0.1: 0.450 ± 0.000 of accuracy. Of that get back: MIFA 100 % and FedAU 80 %."
    ]
    (line,) = study_page.gets_back(study({"MIFA": 0.0, "FedAvg": 0.5}))
    assert "nobody can be said" in line
    found = study_tables.ranks(tables, "accuracy")
    assert found is not None
    assert found.mean.tolist() == [(2 + 3 + 3) / 3, 2.0, (2 + 1 + 1) / 3]  # level without dropout
    picture = study_figures._ranking(tables, "accuracy")
    assert picture is not None
    assert picture.png.startswith(b"\x89PNG")


def test_two_labels_are_not_ranked():
    assert study_page._ranking(study({"FedAvg": 0.5, "FedAU": 0.1})) is None
