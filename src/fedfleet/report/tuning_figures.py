"""The figures of a search: how trials fared from rung to rung, and what was found where each key was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from fedfleet.report import canvas
from fedfleet.report.picture import Picture
from fedfleet.report.tuning_tables import Findings, Row

QUIET, BEST, FIRST = "#9AA1AB", canvas.PALETTE[1], canvas.PALETTE[0]


def draw(result: Findings) -> list[Picture]:
    """Every figure there is data for."""
    if all(row["value"] is None for row in result.rows):
        return []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(canvas.STYLE)
        drawn = [_rungs(result) if len(result.rungs) > 1 else None, _keys(result)]
    return list(canvas.distinct(picture for picture in drawn if picture))


def _rungs(result: Findings) -> Picture:
    figure, (axes,) = canvas.panels(1, width=7.2, height=3.4)
    for row in result.rows:
        values = [(rounds, row[f"after/{rounds}"]) for rounds in result.rungs if row[f"after/{rounds}"] is not None]
        best = row["trial"] == result.winner
        axes.plot(
            *zip(*values, strict=True) if values else ([], []),
            color=BEST if best else QUIET,
            marker="o",
            markersize=4 if best else 3,
            linewidth=2 if best else 0.9,
            zorder=3 if best else 2,
        )
    axes.set_xscale("log")
    axes.set_xticks(list(result.rungs), [f"{rounds}" for rounds in result.rungs])
    axes.minorticks_off()
    axes.set_xlabel("rounds")
    axes.set_ylabel(canvas.plain(result.metric))
    text = f"{result.metric} at each rung; a line ends where its trial was stopped. In colour the winner, trial {result.winner}."
    return canvas.picture(figure, "rungs", "From rung to rung", text)


def _keys(result: Findings) -> Picture:
    column = f"after/{result.rungs[0]}"
    figure, panels = canvas.panels(len(result.keys), width=3.6, height=2.9, share_y=True)
    rows = [row for row in result.rows if row[column] is not None]
    for axes, key in zip(panels, result.keys, strict=True):
        _key(axes, result, rows, key, column)
    panels[0].set_ylabel(canvas.plain(result.metric))
    when = f"after {result.rungs[0]} rounds" + (", the first rung," if len(result.rungs) > 1 else "")
    text = f"{result.metric} {when} by each key. Filled: trials that went on; in colour the winner. Failed trials are left out."
    return canvas.picture(figure, "keys", "What each key did", text)


def _key(axes: Axes, result: Findings, rows: Sequence[Row], key: str, column: str) -> None:
    places: dict[Any, Any] = {v: i for i, v in enumerate(result.choices.get(key, ()))}
    for row in rows:
        color = BEST if row["trial"] == result.winner else FIRST
        on = row["rounds"] > result.rungs[0] or len(result.rungs) == 1
        axes.plot(
            places.get(row[key], row[key]),
            row[column],
            "o",
            color=color,
            fillstyle="full" if on else "none",
            markersize=5,
        )
    if key in result.log:
        axes.set_xscale("log")
    if places:
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xticks(list(places.values()), [canvas.plain(str(v)) for v in places])
    axes.set_xlabel(canvas.plain(key))
