"""Heat maps of a study: final metrics over the first two varied keys, a panel for each label and each value of the other keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from fedfleet.report import canvas
from fedfleet.report.picture import Picture
from fedfleet.report.study_tables import DONE, Frame, Tables, combinations, selected
from fedfleet.report.words import number

LEAST = 3  # values of each key: of fewer, lines tell as much
LIGHT, DARK = "#fefefe", "#111318"  # on cells whose colours are those of no mode of the page
COLOURS = "viridis"


def draw(tables: Tables, metric: str) -> Picture | None:
    """Return the mean over seeds at each pair of numbers; None where two keys have not three numbers each, or nothing ended."""
    keys, column = list(tables.varied)[:2], f"final/{metric}"
    if len(keys) < 2 or not all(_plane(tables.varied[key]) for key in keys):
        return None
    others = list(tables.varied)[2:]
    panels = [(label, point) for label in tables.labels for point in combinations(tables, others)]
    means = [_means(tables, selected(tables.study[tables.study["label"] == la], at), column) for la, at in panels]
    known = np.concatenate([each[np.isfinite(each)] for each in means])
    if not len(known):
        return None
    across, up = (sorted(tables.varied[key]) for key in keys)
    wide = max(3.6, 0.75 * len(across) + 1.2)
    figure, axes = canvas.panels(len(panels), width=wide, height=0.45 * len(up) + 1.5)
    for panel, (label, point), values in zip(axes, panels, means, strict=True):
        _cells(panel, values, (float(known.min()), float(known.max())))
        panel.set_xticks(np.arange(len(across)) + 0.5, [f"{value:g}" for value in across])
        panel.set_yticks(np.arange(len(up)) + 0.5, [f"{value:g}" for value in up])
        panel.set_xlabel(canvas.plain(keys[0]))
        panel.set_ylabel(canvas.plain(keys[1]))
        told = [label, *(f"{key.split('.')[-1]} = {value}" for key, value in point.items())]
        panel.set_title(canvas.plain(", ".join(told)))
    caption = f"Final {metric}, mean over the seeds that ended. Blank: none did, as where a run diverged."
    return canvas.picture(figure, f"heat-{metric}", f"Final {metric} over {keys[0]} and {keys[1]}", caption)


def _plane(values: Any) -> bool:
    """Say whether values are enough numbers for an axis."""
    return len(values) >= LEAST and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _means(tables: Tables, rows: Frame, column: str) -> npt.NDArray[np.float64]:
    """Return the means over seeds (values of the second key, of the first), both in rising order; NaN where no seed ended."""
    first, second = list(tables.varied)[:2]
    by = rows[rows["status"].isin(DONE)].groupby([second, first])[column].mean()
    grid = [[by.get((b, a), np.nan) for a in sorted(tables.varied[first])] for b in sorted(tables.varied[second])]
    return np.array(grid, dtype=float)


def _cells(axes: Axes, values: npt.NDArray[np.float64], ends: tuple[float, float]) -> None:
    """Draw a cell a value, with its number; none where there is no value."""
    low, high = ends
    axes.pcolormesh(np.ma.masked_invalid(values), cmap=COLOURS, vmin=low, vmax=high, edgecolors="white", linewidth=1)
    axes.grid(visible=False)
    for (row, place), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = DARK if value > (low + high) / 2 else LIGHT
            axes.text(place + 0.5, row + 0.5, number(value), ha="center", va="center", color=color, fontsize=8)
