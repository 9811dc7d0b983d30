"""Learning curves of studies: at the ends of a range of numbers, at each of several names."""

from __future__ import annotations

import pandas as pd
import pytest

from fedfleet.report import canvas, study_figures
from fedfleet.report.study_tables import Tables


@pytest.mark.parametrize(
    ("key", "values", "titles"),
    [
        ("rate", [0.5, 0.1, 0.9], ["rate = 0.1", "rate = 0.9"]),
        ("population.dataset", ["mnist", "cifar10", "cifar100"], [f"dataset = {n}" for n in ("mnist", "cifar10", "cifar100")]),
    ],
)  # fmt: skip
def test_numbers_have_two_panels_and_names_one_each(monkeypatch, key, values, titles):
    drawn, panels = [], canvas.panels

    def kept(*args, **options):
        figure, axes = panels(*args, **options)
        drawn.extend(axes)
        return figure, axes

    monkeypatch.setattr(canvas, "panels", kept)
    monkeypatch.setattr(canvas, "drawable", lambda *_: True)
    monkeypatch.setattr(canvas, "lines", lambda *_: 1)
    rows = [{"label": "a", key: value, "seed": 0, "status": "finished", "final/accuracy": 0.5} for value in values]
    tables = Tables({key: values}, None, pd.DataFrame(rows), pd.DataFrame(), pd.DataFrame(), [None] * len(rows))
    picture = study_figures._curves(tables, "accuracy")
    assert picture is not None
    assert picture.title == f"Learning curves at {'the extremes of' if key == 'rate' else 'each'} {key}"
    assert [axes.get_title() for axes in drawn] == titles
