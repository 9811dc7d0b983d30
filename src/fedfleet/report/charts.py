"""Charts that the page's script draws, zooms and reads out: the lines of a figure as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfleet.report import canvas
from fedfleet.report.canvas import Groups
from fedfleet.report.curves import Strand, bundles

DIGITS = 6


def chart(
    groups: Groups, column: str, name: str, *, smoothed: bool = False, log: bool = False
) -> dict[str, Any] | None:
    """The lines of a column against every axis that says something; None where there is none.

    `name` is that of what is drawn upwards. Numbers are tuples, which the page keeps once each.
    """
    axes = []
    for against in canvas.X_LABELS if not smoothed else ("rounds_completed",):
        if canvas.drawable(groups, column, against):
            title, result = canvas.scaled(groups, column, against)
            drawn = bundles(result, smoothed=smoothed)
            lines = [_line(i, s) for i, label in enumerate(groups) for s in drawn[label].strands]
            axes.append({"name": title, "whole": against == "rounds_completed", "lines": lines})
    if not axes:
        return None
    looks = [canvas.look(groups, label) for label in groups]
    labels = [
        {"name": label, "color": canvas.PALETTE.index(color), "dash": canvas.DASHES.index(dash)}
        for label, (color, dash) in zip(groups, looks, strict=True)
    ]
    return {"name": name, "log": log, "labels": labels, "axes": axes}


def _line(label: int, strand: Strand) -> dict[str, Any]:
    told: dict[str, Any] = {"label": label, "kind": strand.kind, "x": _numbers(strand.x), "y": _numbers(strand.y)}
    if strand.band is not None:
        told |= {"low": _numbers(strand.band[0]), "high": _numbers(strand.band[1])}
    return told


def _numbers(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
