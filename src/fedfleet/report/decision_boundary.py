"""The figure of a plane: points by class and domain, and where the last model of each label parts the classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedfleet.files import tensors
from fedfleet.report import canvas
from fedfleet.report.canvas import Groups
from fedfleet.report.picture import Picture
from fedfleet.report.tables import Run, Table

MARKERS = "os^DvP*X"
CLASSES = ("#F2B48C", "#9CC3E0", "#9AD3B8", "#DDB8CE", "#C9CCD1")
"""Pale, so that boundaries stand out."""
POINTS = {"linestyle": "none", "markersize": 3.5, "markeredgecolor": "white", "markeredgewidth": 0.3}


def draw(groups: Groups) -> Picture | None:
    """Points of the first run that has kept any, and the boundaries of the first run of each label."""
    result = {label: kept for label, runs in groups.items() if (kept := _kept(runs[0])) is not None}
    if not result:
        return None
    figure, (axes,) = canvas.panels(1, width=7.2, height=4.6)
    first = next(iter(result.values()))
    domains = _points(axes, first, next(iter(groups.values()))[0])
    for label, kept in result.items():
        color, dash = canvas.look(groups, label)
        for margin in _margins(kept["log_probability"]):
            axes.contour(*kept["axes"], margin, levels=[0.0], colors=[color], linestyles=[dash], linewidths=1.6)
    axes.set_xlabel("first input")
    axes.set_ylabel("second input")
    axes.grid(visible=False)
    _legend(figure, groups, list(result), domains)
    whose = "the last model of each label (of its first seed)" if len(groups) > 1 else "the last model"
    caption = f"Test examples in the colour of their class, a mark a domain; lines are where {whose} parts the classes."
    return canvas.picture(figure, "plane", "Decision boundaries", caption)


def _points(axes: Axes, kept: Table, run: Run) -> list[tuple[str, str]]:
    """Draw the points, and return the names and marks of their domains; none where there is one."""
    (x, y), label = kept["x"].T, kept["y"]
    domain = kept.get("domain", np.zeros(len(label), int))
    numbers = np.unique(domain)
    for d in numbers:
        for k in np.unique(label[domain == d]):
            mine = (domain == d) & (label == k)
            axes.plot(x[mine], y[mine], MARKERS[d % len(MARKERS)], color=CLASSES[k % len(CLASSES)], zorder=1, **POINTS)
    names = run.summary.get("domains") or []
    told = [str(names[d]) if d < len(names) else f"domain {d}" for d in numbers]
    marks = [MARKERS[d % len(MARKERS)] for d in numbers]
    return list(zip(told, marks, strict=True)) if len(numbers) > 1 else []


def _margins(likely: np.ndarray) -> list[np.ndarray]:
    """Return by how much each class is likelier than all others, each (g, g), of (g, g, classes); of two classes one."""
    classes = likely.shape[-1]
    others = [np.delete(likely, k, axis=-1).max(-1) for k in range(classes)]
    margins = [likely[..., k] - others[k] for k in range(classes)]
    kept = margins[1:] if classes == 2 else margins
    return [m for m in kept if m.min() < 0 < m.max()]


def _legend(figure: Figure, groups: Groups, labels: list[str], domains: list[tuple[str, str]]) -> None:
    handles = [Line2D([], [], marker=mark, color="#8A8F98", linestyle="none", markersize=5) for _, mark in domains]
    names = [canvas.plain(name) for name, _ in domains]
    if len(groups) > 1:
        looks: list[Any] = [canvas.look(groups, label) for label in labels]
        handles += [Line2D([], [], color=color, linestyle=dash) for color, dash in looks]
        names += [canvas.plain(label) for label in labels]
    if names:
        figure.legend(handles, names, loc="outside right upper")


def _kept(run: Run) -> Table | None:
    """Return what a run has kept of the plane; None where there is nothing, or nothing that can be drawn."""
    try:
        read = tensors.read(run.path / "decision_boundary.safetensors")
        result = {name: leaf.numpy() for name, leaf in read.items()}
        first, second = result["axes"]
        whole = result["log_probability"].shape[:2] == (len(second), len(first)) and result["x"].shape[1:] == (2,)
    except (*tensors.UNREADABLE, KeyError):
        return None
    return result if whole and len(result["y"]) == len(result["x"]) else None
