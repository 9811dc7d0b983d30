"""The figures of domains and classes: how each fares over the rounds, lines for few of them, a heat map for many."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedfleet.report import canvas
from fedfleet.report.canvas import Groups
from fedfleet.report.picture import Picture
from fedfleet.report.tables import Run, Table, by_each, class_names, domain_columns, domain_names
from fedfleet.report.words import number

FEW = 14  # domains that lines can tell apart
ROWS = 100  # of a heat map, at most
LABELS = 6  # panels, at most
COSINES = {"mean": "mean cosine", "worst": "least cosine", "variance": "variance of cosines"}


class Each(NamedTuple):
    """The lines of a figure: a row each of a table, told apart by a column, and what they are called."""

    one: str
    several: str
    table: Callable[[Run], Table]
    key: str
    names: Callable[[Groups], Sequence[str]]


EACH_DOMAIN = Each("domain", "domains", lambda run: run.domains, "domain", domain_names)
EACH_CLASS = Each("class", "classes", lambda run: run.recall, "label", class_names)


def draw(groups: Groups) -> list[Picture]:
    """A figure a column of ``domains.parquet``, of recall by class, and of how far updates point where the model goes."""
    drawn = [_column(groups, column, EACH_DOMAIN) for column in domain_columns(groups)]
    drawn.append(_column(groups, "recall", EACH_CLASS))
    return [picture for picture in [_cosines(groups), *drawn] if picture is not None]


def _cosines(groups: Groups) -> Picture | None:
    """Draw the mean and the variance over domains, or clients, of the cosines of updates with the model's movement."""
    if not all(canvas.drawable(groups, f"algorithm/cosine_{what}", "rounds_completed") for what in COSINES):
        return None
    figure, panels = canvas.panels(len(COSINES), width=4.1, height=3.2)
    window = 1
    for panel, (what, said) in zip(panels, COSINES.items(), strict=True):
        window = max(window, canvas.lines(panel, groups, f"algorithm/cosine_{what}", "rounds_completed", smoothed=True))
        panel.set_title(said)
    canvas.legend(figure, groups)
    smoothed = f" Smoothed: centred means over {window} rounds." if window > 1 else ""
    caption = (
        "Cosine of what the models of clients moved by, or in the mean those of a domain, with what the round made of it: "
        f"of all that were heard in a round.{smoothed} {canvas.band_note(groups)}"
    )
    return canvas.picture(figure, "cosines", "Updates and where the model goes", caption)


def _column(groups: Groups, column: str, each: Each) -> Picture | None:
    tables = {label: table for label, runs in groups.items() if (table := _mean(runs, column, each)) is not None}
    if not tables or all(values.shape[1] < 2 for _, values in tables.values()):
        return None
    shown = dict(list(tables.items())[:LABELS])
    figure, panels = canvas.panels(len(shown), width=7.2 if len(shown) == 1 else 4.1, height=3.2, share_y=True)
    few = all(values.shape[1] <= FEW for _, values in shown.values())
    span = _span(np.concatenate([values.ravel() for _, values in shown.values()]))
    for panel, (label, (rounds, values)) in zip(panels, shown.items(), strict=True):
        if few:
            _lines(panel, rounds, values)
        else:
            _heat(figure, panel, rounds, values, span, last=panel is panels[-1])
        panel.set_xlabel("rounds")
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(groups) > 1:
            panel.set_title(canvas.plain(label))
    panels[0].set_ylabel(canvas.plain(column) if few else f"{each.several}, in the order of the last row")
    if few:
        count = max(values.shape[1] for _, values in shown.values())
        names = [canvas.plain(name) for name in each.names(groups)]
        handles = [Line2D([], [], color=_look(k)[0], linestyle=_look(k)[1]) for k in range(count)]
        figure.legend(
            handles,
            [*names[:count], *(f"{each.one} {k}" for k in range(len(names), count))],
            loc="outside lower center",
            ncols=min(count, 7),
        )
    told = "; ".join(
        f"{label + ': ' if len(groups) > 1 else ''}{' to '.join(map(number, _span(values[-1])))}"
        for label, (_, values) in shown.items()
    )
    seeds = " Means over seeds." if any(len(groups[label]) > 1 for label in shown) else ""
    how = "" if few else f" Colour is the mean of neighbouring {each.several}, {ROWS} rows at most."
    left = f" The first {LABELS} labels." if len(shown) < len(tables) else ""
    caption = f"{column} of each {each.one} at every evaluation; at the last one from {told}.{how}{seeds}{left}"
    return canvas.picture(figure, f"{each.several}-{column}", f"{column} by {each.one}", caption)


def _mean(runs: Sequence[Run], column: str, each: Each) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the rounds evaluated by all runs, (t,), and the mean over runs of a column, (t, domains); None without values."""
    tables = [table for run in runs if (table := by_each(each.table(run), each.key, column)) is not None]
    if not tables:
        return None
    rounds = sorted(set.intersection(*({*table} for table in tables)))
    width = min(len(values) for table in tables for values in table.values())
    if not rounds or not width:
        return None
    stacked = np.array([[table[at][:width] for at in rounds] for table in tables])
    known = np.isfinite(stacked)
    mean = np.where(known, stacked, 0).sum(0) / np.maximum(known.sum(0), 1)
    return np.array(rounds) + 1, np.where(known.any(0), mean, np.nan)


def _span(values: np.ndarray) -> tuple[float, float]:
    """Return the least and the greatest of what is known, NaN where nothing is."""
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if len(known) else (np.nan, np.nan)


def _lines(panel: Axes, rounds: np.ndarray, values: np.ndarray) -> None:
    for k, line in enumerate(values.T):
        color, dash = _look(k)
        # Between values that are not known there is no line to be seen.
        mark = "o" if len(rounds) <= 15 or np.isnan(line).any() else ""
        panel.plot(rounds, line, color=color, linestyle=dash, marker=mark, markersize=3)


def _heat(
    figure: Figure, panel: Axes, rounds: np.ndarray, values: np.ndarray, span: tuple[float, float], *, last: bool
) -> None:
    order = np.argsort(values[-1], kind="stable")
    rows = np.array_split(values[:, order], min(ROWS, values.shape[1]), axis=1)
    with warnings.catch_warnings(action="ignore"):  # a row of which nothing is known stays blank
        image = np.array([np.nanmean(row, axis=1) for row in rows])
    edges = (rounds[0] - 0.5, rounds[-1] + 0.5, 0, values.shape[1])
    drawn = panel.imshow(
        image,
        aspect="auto",
        origin="lower",
        extent=edges,
        vmin=span[0],
        vmax=span[1],
        cmap="viridis",
        interpolation="none",
    )
    panel.grid(visible=False)
    if last:
        figure.colorbar(drawn, ax=panel, fraction=0.05)


def _look(k: int) -> tuple[str, Any]:
    turn, place = divmod(k, len(canvas.PALETTE))
    return canvas.PALETTE[place], canvas.DASHES[turn % len(canvas.DASHES)]
