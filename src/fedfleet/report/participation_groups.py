"""Clients grouped by how often they took part: a metric of each group over the rounds, and weighted by participation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedfleet.report import canvas
from fedfleet.report.canvas import Groups
from fedfleet.report.picture import Picture
from fedfleet.report.tables import Run, by_each, heard_clients
from fedfleet.report.words import number

NAMES = ("never", "rarely", "sometimes", "often")
"""Clients that completed no round; and the thirds of the others, by how many they completed."""
WEIGHTED, MEAN = "participation-weighted", "mean of clients"
COLORS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")
LABELS = 6  # panels, at most


@dataclass(frozen=True)
class Grouped:
    """A metric of clients by how often they took part in the whole run.

    Attributes:
        rounds: done at each evaluation (t,).
        group: of each client, its place in ``NAMES`` (n,).
        completed: rounds that each client completed (n,).
        sizes: clients in each group of ``NAMES`` (4,).
        values: mean of each group (t, 4), NaN of an empty one.
        mean: over all clients (t,), each counted once.
        weighted: over all clients (t,), each counted as often as it completed a round; NaN where none did.

    """

    rounds: np.ndarray
    group: np.ndarray
    completed: np.ndarray
    sizes: np.ndarray
    values: np.ndarray
    mean: np.ndarray
    weighted: np.ndarray


def completed(run: Run, clients: int) -> np.ndarray | None:
    """Return in how many rounds each client was heard (clients,); None without outcomes."""
    found = heard_clients(run)
    if found is None:
        return None
    who, counts, _ = found
    result = np.zeros(max(clients, int(who.max(initial=-1)) + 1))
    result[who.astype(int)] = counts
    return result[:clients]


def group_of(counts: np.ndarray) -> np.ndarray:
    """Return the group of each client (clients,): clients with equally many rounds are of one group, where their middle is."""
    values, which, size = np.unique(counts, return_inverse=True, return_counts=True)
    size = np.where(values > 0, size, 0)
    middle = (np.cumsum(size) - size / 2) / max(size.sum(), 1)
    return np.where(values > 0, 1 + np.floor(3 * middle), 0).astype(int)[which]


def grouped(run: Run, column: str) -> Grouped | None:
    """Return a column of ``clients.parquet`` by participation; None where it, or who took part, is not on record."""
    table = by_each(run.clients, "client", column)
    if not table:
        return None
    clients = len(next(iter(table.values())))
    if any(len(values) != clients for values in table.values()) or (counts := completed(run, clients)) is None:
        return None
    values, group = np.array([table[at] for at in sorted(table)]), group_of(counts)
    members = [group == k for k in range(len(NAMES))]
    return Grouped(
        rounds=np.array(sorted(table)) + 1,
        group=group,
        completed=counts,
        sizes=np.array([mine.sum() for mine in members]),
        values=np.stack([_mean(values, mine.astype(float)) for mine in members], axis=1),
        mean=_mean(values, np.ones(clients)),
        weighted=_mean(values, counts),
    )


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted mean over clients (t,) of what is finite of values (t, clients); NaN where no weight is."""
    known = np.isfinite(values)
    total = (known * weights).sum(1)
    return np.divide(
        (np.where(known, values, 0) * weights).sum(1), total, out=np.full(len(values), np.nan), where=total > 0
    )


def frame(run: Run, columns: Sequence[str]) -> pd.DataFrame:
    """Return a row an evaluation and group: the round, the rounds done by then, the group, its clients, and the columns.

    ``least`` and ``most`` are the rounds that a client of the group completed in the whole run. The two means are groups, too.
    """
    found = {column: each for column in columns if (each := grouped(run, column)) is not None}
    rows = []
    for first in list(found.values())[:1]:
        for i, done in enumerate(first.rounds.astype(int).tolist()):
            for k, name in enumerate(NAMES):
                each = {column: result.values[i, k] for column, result in found.items()}
                rows.append({"round": done - 1, "rounds": done, "group": name, **_bounds(first, k), **each})
            for name, of in ((MEAN, "mean"), (WEIGHTED, "weighted")):
                each = {column: getattr(result, of)[i] for column, result in found.items()}
                rows.append({"round": done - 1, "rounds": done, "group": name, **_bounds(first), **each})
    return pd.DataFrame(rows, columns=["round", "rounds", "group", "clients", "least", "most", *found]).astype(
        {"least": "Int64", "most": "Int64"}
    )


def _bounds(of: Grouped, k: int | None = None) -> dict[str, Any]:
    """Return how many clients a group has, and the fewest and most rounds that one of them completed; of all if None."""
    mine = of.completed if k is None else of.completed[of.group == k]
    ends = (int(mine.min()), int(mine.max())) if len(mine) else (None, None)
    return {"clients": len(mine), "least": ends[0], "most": ends[1]}


def draw(groups: Groups, column: str) -> Picture | None:
    """A panel a label: a line a group, the mean of clients, and the mean weighted by participation."""
    found = {label: [one for run in runs if (one := grouped(run, column))] for label, runs in groups.items()}
    shown = dict([(label, several) for label, several in found.items() if several][:LABELS])
    apart = [one for several in shown.values() for one in several if (one.sizes > 0).sum() > 1 and len(one.rounds) > 1]
    if not apart:
        return None
    figure, panels = canvas.panels(len(shown), width=7.2 if len(shown) == 1 else 4.1, height=3.2, share_y=True)
    told = []
    for panel, (label, several) in zip(panels, shown.items(), strict=True):
        rounds, lines = _over_seeds(several)
        for color, line in zip(COLORS, lines, strict=False):
            panel.plot(rounds, line, color=color)
        panel.plot(rounds, lines[-2], color="black", linestyle="--")
        panel.plot(rounds, lines[-1], color="black")
        panel.set_xlabel("rounds")
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(groups) > 1:
            panel.set_title(canvas.plain(label))
        known = [
            f"{name} {number(line[-1])}" for name, line in zip(NAMES, lines, strict=False) if np.isfinite(line[-1])
        ]
        whose = f"{label}: " if len(groups) > 1 else ""
        told.append(f"{whose}{', '.join(known)}; all {number(lines[-2][-1])}, weighted {number(lines[-1][-1])}")
    panels[0].set_ylabel(canvas.plain(column))
    drawn = [Line2D([], [], color=color) for color in COLORS]
    drawn += [Line2D([], [], color="black", linestyle=dash) for dash in ("--", "-")]
    figure.legend(drawn, [*NAMES, MEAN, WEIGHTED], loc="outside lower center", ncols=6)
    seeds = " Means over seeds." if any(len(several) > 1 for several in shown.values()) else ""
    caption = (
        f"{column} on their own data of clients that completed no round of the run (never), and of the thirds of the others by how "
        f"many they completed. Weighted: each client counts as often as it completed a round, so the model as those see it that "
        f"take part. At the last evaluation: {'. '.join(told)}.{seeds}"
    )
    return canvas.picture(figure, f"clients-by-participation-{column}", f"{column} by participation", caption)


def _over_seeds(several: Sequence[Grouped]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the rounds that all have (t,), and the mean over seeds of each group, of all clients, and weighted (t,)."""
    rounds = sorted(set.intersection(*({*one.rounds.tolist()} for one in several)))
    at = [np.isin(one.rounds, rounds) for one in several]
    columns = [np.column_stack([one.values, one.mean, one.weighted]) for one in several]
    each = np.array([values[mine] for values, mine in zip(columns, at, strict=True)])
    known = np.isfinite(each)
    total = np.where(known, each, 0).sum(0)
    mean = np.divide(total, known.sum(0), out=np.full(total.shape, np.nan), where=known.any(0))
    return np.array(rounds), list(mean.T)
