"""The figure of a paper's table: a panel a column, a row a method, ours with its seeds beside the paper's."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes

from fedfleet.report import canvas

Found = Mapping[str, Mapping[str, Sequence[float]]]
"""Row -> column -> a value a seed, NaN where there is none."""

ROW, WIDTH, HEAD = 0.28, 2.3, 0.75  # inches: a row, a panel, what is around the rows
COLUMNS = 5  # panels side by side
NAMES, LETTERS = 0.075, 13  # inches a letter of the rows' names; letters an inch of the title
CAPTION = "Dots: seeds; lines: mean and standard deviation; open diamonds: the paper's."


def draw(title: str, result: Found, printed: Mapping[str, Mapping[str, float]]) -> bytes:
    """Return the figure as PNG.

    Args:
        title: what the table is of.
        result: our values.
        printed: row -> column -> the paper's value, where it prints one.

    """
    rows, columns = list(result), list(next(iter(result.values())))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(canvas.STYLE)
        figure, panels = canvas.panels(len(columns), WIDTH, HEAD + ROW * len(rows), share_y=True, columns=COLUMNS)
        figure.set_figwidth(figure.get_figwidth() + NAMES * max(map(len, rows)))
        for axes, column in zip(panels, columns, strict=True):
            for place, row in enumerate(rows):
                _row(axes, place, result[row][column], printed.get(row, {}).get(column))
            axes.set_title(canvas.plain(column))
            axes.set_yticks(range(len(rows)), [canvas.plain(row) for row in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
        lines = textwrap.wrap(title.replace("$", r"\$"), int(LETTERS * figure.get_figwidth()))
        figure.set_figheight(figure.get_figheight() + ROW * len(lines))
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
        figure.supxlabel(CAPTION, fontsize=8, color="#5A606A")
        return canvas.png(figure)


def _row(axes: Axes, place: int, values: Sequence[float], paper: float | None) -> None:
    color, known = canvas.PALETTE[place % len(canvas.PALETTE)], [v for v in values if math.isfinite(v)]
    if known:
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1)) if len(known) > 1 else 0.0
        axes.errorbar(mean, place, xerr=spread, color=color, marker="|", markersize=9, linewidth=1.5)
        axes.plot(known, [place] * len(known), "o", color=color, markersize=3, alpha=0.45, markeredgewidth=0)
    if paper is not None and math.isfinite(paper):
        axes.plot([paper], [place], "D", color=color, markersize=5, markerfacecolor="none")
