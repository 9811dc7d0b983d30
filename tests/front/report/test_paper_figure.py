"""The figure of a paper's table says what the table says."""

import math

from matplotlib.figure import Figure

from fedfleet.report import canvas, paper_figure

FOUND = {"A": {"x": [1.0, 3.0], "y": [5.0, math.nan]}, "B": {"x": [2.0, 2.0], "y": [math.nan, math.nan]}}
PRINTED = {"A": {"x": 2.5}}


def test_rows_columns_seeds_means_and_what_is_printed(monkeypatch):
    kept: list[Figure] = []
    png = canvas.png
    monkeypatch.setattr(canvas, "png", lambda figure: kept.append(figure) or png(figure))
    assert paper_figure.draw("Costs $5 " + "and more " * 20, FOUND, PRINTED).startswith(b"\x89PNG")
    assert "\n" in kept[0].get_suptitle()  # a long title is wrapped
    assert r"\$5" in kept[0].get_suptitle()  # and no mathematics
    x, y = kept[0].axes[:2]
    assert [axes.get_title(loc="left") for axes in (x, y)] == ["x", "y"]
    assert [label.get_text() for label in x.get_yticklabels()] == ["A", "B"]
    assert x.get_ylim() == (1.5, -0.5)  # the first row on top
    of = {(line.get_marker(), float(line.get_ydata()[0])): [float(v) for v in line.get_xdata()] for line in x.lines}
    assert of["o", 0] == [1.0, 3.0]
    assert of["|", 0] == [2.0]
    assert of["D", 0] == [2.5]
    assert ("D", 1) not in of
    (bar, _) = x.collections[:2]
    low, high = sorted(point[0] for point in bar.get_segments()[0])
    assert math.isclose(high - low, 2 * math.sqrt(2))
    assert {line.get_marker() for line in y.lines} == {"o", "|"}  # of B there is nothing
