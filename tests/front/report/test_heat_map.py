"""Heat maps of studies over two varied keys."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedfleet.report import heat_map, study_figures
from fedfleet.report.study_tables import Tables

KEYS = {"algorithm.steps": [20, 5, 10], "algorithm.eta3.value": [0.1, 1.0, 0.3]}


def study(varied=KEYS, failed=(10, 1.0)) -> Tables:
    """A study in which steps s, eta e and seed n give accuracy s / 100 + e / 1000 + n / 10; one point failed on all seeds."""
    first, second = varied
    rows = [
        {"label": label, first: s, second: e, "seed": n, "error": None}
        | ({"status": "failed", "final/accuracy": math.nan} if (s, e) == failed and label == "a" else
           {"status": "finished", "final/accuracy": s / 100 + e / 1000 + n / 10})
        for label in ("a", "b") for s in varied[first] for e in varied[second] for n in (0, 1)
    ]  # fmt: skip
    return Tables(varied, None, pd.DataFrame(rows), pd.DataFrame(), pd.DataFrame(), [None] * len(rows))


def test_a_cell_is_the_mean_over_seeds_and_blank_where_none_ended(monkeypatch):
    drawn = []
    monkeypatch.setattr(heat_map, "_cells", lambda axes, values, ends: drawn.append((values, ends)))
    picture = heat_map.draw(study(), "accuracy")
    assert picture is not None
    assert (picture.name, picture.title) == (
        "heat-accuracy",
        "Final accuracy over algorithm.steps and algorithm.eta3.value",
    )
    wanted = np.array([[s / 100 + e / 1000 + 0.05 for s in (5, 10, 20)] for e in (0.1, 0.3, 1.0)])
    (first, ends), (second, other) = drawn  # a panel a label, both in one range of colours
    np.testing.assert_allclose(second, wanted)
    wanted[2, 1] = math.nan
    np.testing.assert_allclose(first, wanted)
    assert ends == other
    assert ends == pytest.approx((0.1001, 0.251))


def test_it_is_drawn_where_two_keys_have_three_numbers_each(subtests):
    names = {picture.name for picture in study_figures.draw(study())}
    assert {"final-accuracy", "heat-accuracy"} <= names
    for varied in ({"steps": [1, 2, 3], "rate": [0.1, 0.2]}, {"on": [True, False, 2], "rate": [0.1, 0.2, 0.3]}):
        with subtests.test(str(varied)):
            assert heat_map.draw(study(varied, failed=None), "accuracy") is None
    tables = study()
    nothing = tables.study.assign(status="failed")
    assert heat_map.draw(replace(tables, study=nothing), "accuracy") is None
