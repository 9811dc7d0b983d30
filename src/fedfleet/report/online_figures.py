"""The picture of who is online: clients by rounds or moments, and how many are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedfleet.report import canvas

ROWS = 100  # clients of the picture, evenly spaced where there are more


@dataclass(frozen=True)
class Presence:
    """Who of n clients is online in T rounds, or at T moments.

    Attributes:
        title: the model of availability.
        clients: N, of whom n are shown.
        shown: (n,) their numbers, rising.
        online: (n, T) bool.
        at: (T,) the rounds, or the moments in ``unit``.
        unit: "round", or of virtual time.
        long_run: (n,) shares of all rounds or moments in which each is online, as the model tells; None where it does not.

    """

    title: str
    clients: int
    shown: np.ndarray
    online: np.ndarray
    at: np.ndarray
    unit: str
    long_run: np.ndarray | None


def figure(seen: Presence) -> Figure:
    """Return panels: who is online, and the share of those shown that is."""
    made, panels = canvas.panels(2, width=5.2, height=3.6)
    _who(panels[0], seen)
    _share(panels[1], seen)
    return made


def _who(axes: Axes, seen: Presence) -> None:
    count = len(seen.shown)
    rows = np.unique(np.linspace(0, count - 1, min(count, ROWS)).round().astype(int))
    # A pixel is a round: its edges lie half a round before and after it.
    half = (seen.at[1] - seen.at[0]) / 2 if len(seen.at) > 1 else 0.5
    ends = (seen.at[0] - half, seen.at[-1] + half, len(rows) - 0.5, -0.5)
    axes.imshow(seen.online[rows], aspect="auto", cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest", extent=ends)
    axes.grid(visible=False)
    told = "" if len(rows) == seen.clients else f", {len(rows)} of {seen.clients:,}"
    axes.set_title("Online (dark)")
    axes.set_xlabel(seen.unit)
    axes.set_ylabel(f"client{told}")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=seen.unit == "round"))
    axes.set_yticks(ticks := np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 6)).round().astype(int)))
    axes.set_yticklabels([str(seen.shown[rows[i]]) for i in ticks])


def _share(axes: Axes, seen: Presence) -> None:
    axes.plot(seen.at, seen.online.mean(0), color=canvas.PALETTE[0], label="online")
    if seen.long_run is not None:
        axes.axhline(seen.long_run.mean(), color=canvas.PALETTE[1], linestyle="--", label="in the long run")
        axes.legend()
    axes.set_title("Share online")
    axes.set_xlabel(seen.unit)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=seen.unit == "round"))
