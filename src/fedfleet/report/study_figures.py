"""The figures of a study: what is measured against the first varied key, a panel for each combination of the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedfleet.report import canvas, heat_map
from fedfleet.report.picture import Picture
from fedfleet.report.study_tables import TO_TARGET, Frame, Tables, interval, ranks
from fedfleet.report.words import joined, quantity, share

LOG_FROM = 30  # largest over least value of the varied key from which its axis is logarithmic
MARGIN = 0.08
BANDS = 3  # labels up to which intervals are bands; more would cover each other, and are drawn as bars side by side
ASIDE = 0.012  # of the axis, between the marks of neighbouring labels
EACH = (
    "Dots are seeds, lines their means, bands or bars 95 % t-intervals of the mean (cut off at the edge of the panel)."
)


class Part(NamedTuple):
    """The trials of one panel, and what they share: values of the varied keys but the first."""

    name: str
    rows: Frame


def draw(tables: Tables) -> list[Picture]:
    """Every figure there is data for, in the order of the page."""
    if not tables.metrics:
        return []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(canvas.STYLE)
        drawn = [
            each and replace(each, folded=metric in tables.parted[1])
            for metric in tables.metrics
            for each in (_final(tables, metric), heat_map.draw(tables, metric))
        ]
        drawn += [_to_target(tables), *(_curves(tables, metric) for metric in tables.metrics[:1])]
        drawn += [_ranking(tables, tables.metrics[0]), _histogram(tables), _evenness(tables)]
    return list(canvas.distinct(picture for picture in drawn if picture))


def parts(tables: Tables) -> list[Part]:
    """The trials by the values of the varied keys but the first; one part if there is only one key."""
    others = list(tables.varied)[1:]
    result = []
    for values in itertools.product(*(tables.varied[key] for key in others)):
        chosen = np.ones(len(tables.study), dtype=bool)
        for key, value in zip(others, values, strict=True):
            chosen &= (tables.study[key] == value).to_numpy()
        name = ", ".join(f"{key.split('.')[-1]} = {value}" for key, value in zip(others, values, strict=True))
        result.append(Part(name, tables.study[chosen]))
    return result


class _Axis:
    """The axis of the first varied key: numbers where they are, anything else side by side."""

    def __init__(self, tables: Tables):
        self.key = next(iter(tables.varied))
        self.values = list(tables.varied[self.key])
        self.numeric = all(isinstance(v, int | float) for v in self.values)
        positive = self.numeric and min(self.values) > 0
        self.log = positive and max(self.values) / min(self.values) >= LOG_FROM
        self.places = sorted(self.values) if self.numeric else list(range(len(self.values)))

    def beside(self, number: int, labels: int) -> list[float]:
        """Where the marks of a label stand: next to the values, so that labels do not cover each other."""
        if not self.numeric:
            return [place + 0.5 * (number + 0.5) / labels - 0.25 for place in self.places]
        aside = ASIDE * (number - (labels - 1) / 2)
        if self.log:
            return [place * (self.places[-1] / self.places[0]) ** aside for place in self.places]
        return [place + aside * (self.places[-1] - self.places[0]) for place in self.places]

    def ordered(self) -> list[Any]:
        """The values from left to right."""
        return sorted(self.values) if self.numeric else self.values

    def shown(self) -> list[Any]:
        """The values that have a panel of curves: the least and the greatest number, or every name, which has no order."""
        values = self.ordered()
        return list(dict.fromkeys((values[0], values[-1]))) if self.numeric else values

    def dress(self, axes: Axes) -> None:
        """Label the axis."""
        axes.set_xlabel(canvas.plain(self.key))
        if self.log:
            axes.set_xscale("log")
        elif not self.numeric:
            axes.set_xlim(-0.5, len(self.values) - 0.5)
        if self.log or not self.numeric or len(self.values) <= 7:
            axes.set_xticks(self.places, [canvas.plain(f"{v:g}" if self.numeric else v) for v in self.ordered()])
            axes.minorticks_off()


def _look(tables: Tables) -> dict[str, list[Any]]:
    """Labels as groups, from which the canvas takes colours and legends."""
    return {label: [] for label in tables.labels}


def _against(axes: Axes, tables: Tables, rows: Frame, column: str, complete: bool = False, unit: float = 1.0) -> bool:
    """Draw a column, in units, against the first varied key, a line a label; returns whether there was anything.

    If `complete`, a mean counts only where every seed has a value; it is a hollow mark where only some have one.
    """
    x, groups, drawn = _Axis(tables), _look(tables), False
    every: list[float] = []
    for number, label in enumerate(groups):
        color, dash = canvas.look(groups, label)
        line = []
        for value, place in zip(x.ordered(), x.beside(number, len(groups)), strict=True):
            of = rows[(rows["label"] == label) & (rows[x.key] == value)]
            result = of[column].to_numpy(dtype=float, na_value=np.nan) / unit
            known = result[np.isfinite(result)]
            every += known.tolist()
            axes.plot([place] * len(known), known, linestyle="", marker="o", markersize=2.5, color=color, alpha=0.45)
            mean, half = interval(result)
            if complete and len(known) < len(result):
                if len(known):
                    axes.plot([place], [mean], linestyle="", marker="o", markersize=6, color=color, fillstyle="none")
                mean = half = math.nan
            line.append((place, mean, half))
        at, mean, half = (np.array(v, dtype=float) for v in zip(*line, strict=True))
        drawn |= bool(np.isfinite(mean).any())
        axes.plot(at, mean, color=color, linestyle=dash if x.numeric else "", marker="o", markersize=4)
        if x.numeric and len(groups) <= BANDS:
            axes.fill_between(at, mean - half, mean + half, color=color, alpha=0.14, linewidth=0)
        else:
            axes.errorbar(at, mean, np.nan_to_num(half), color=color, linestyle="", capsize=2.5, linewidth=0.9)
    if every:
        low, high = min(every), max(every)
        room = MARGIN * (high - low) or MARGIN * abs(high) or MARGIN
        axes.set_ylim(*((0, (1 + MARGIN) * high or 1) if complete else (low - room, high + room)))
    x.dress(axes)
    return bool(every) or drawn


def panel(tables: Tables, part: Part, column: str, width: float, height: float) -> Figure | None:
    """Return a figure of one panel, in inches: a column against the first varied key; None where there is nothing to draw."""
    figure, (axes,) = canvas.panels(1, width=width, height=height)
    if not _against(axes, tables, part.rows, column):
        return None
    axes.set_ylabel(canvas.plain(column.replace("/", " ")))
    canvas.legend(figure, _look(tables))
    return figure


def _final(tables: Tables, metric: str) -> Picture | None:
    column, panels = f"final/{metric}", parts(tables)
    if not tables.study[column].notna().any():
        return None
    figure, axes = canvas.panels(len(panels), width=7.2 if len(panels) == 1 else 4.6, height=3.6)
    for panel, part in zip(axes, panels, strict=True):
        _against(panel, tables, part.rows, column)
        panel.set_title(canvas.plain(part.name))
    _same_y(axes)
    axes[0].set_ylabel(f"final {canvas.plain(metric)}")
    canvas.legend(figure, _look(tables))
    key = next(iter(tables.varied))
    return canvas.picture(
        figure, f"final-{metric}", f"Final {metric} against {key}", f"{metric} of the final model. {EACH}"
    )


def _to_target(tables: Tables) -> Picture | None:
    if tables.target is None or not any(c in tables.study and tables.study[c].notna().any() for c in TO_TARGET):
        return None
    words = {"floats": "floats, up and down", "bytes_up": "bytes up", "bytes_down": "bytes down"}
    sent = {f"target/{name}": words[name] for name in tables.sent}
    measures = {"target/rounds": "rounds", **sent, "target/virtual_s": "virtual time"}
    wide = len(measures)
    panels = parts(tables)
    longest = tables.study["target/virtual_s"].max()
    second, clock = next((unit, word) for least, unit, word in canvas.CLOCK if longest >= least)
    figure, axes = canvas.panels(wide * len(panels), width=4.1, height=3.1, columns=wide)
    for row, part in enumerate(panels):
        for panel, (column, name) in zip(axes[wide * row : wide * (row + 1)], measures.items(), strict=True):
            timed = column == "target/virtual_s"
            if not _against(panel, tables, part.rows, column, complete=True, unit=second if timed else 1.0):
                panel.text(0.5, 0.5, "never reached", ha="center", va="center", transform=panel.transAxes)
            if column in sent:
                panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
            title = f"{name}, {clock}" if timed else name
            panel.set_title("\n".join(map(canvas.plain, filter(None, [title, part.name]))))
    canvas.legend(figure, _look(tables))
    caption = (
        f"Rounds, {joined(list(sent.values()))} and virtual time until an evaluation first found {tables.target}. {EACH} "
        "A filled mark is the mean of seeds all of which got there; a hollow one is the mean of those that did, and too good: "
        "others never did. "
        "No mark: none did."
    )
    return canvas.picture(figure, "target", f"Cost of reaching {tables.target}", caption)


def _curves(tables: Tables, metric: str) -> Picture | None:
    x, column = _Axis(tables), f"eval/{metric}"
    shown, drawn = x.shown(), []
    for part in parts(tables):
        for value in shown:
            rows = part.rows[part.rows[x.key] == value]
            groups = {
                label: [run for i in rows.index[rows["label"] == label] if (run := tables.runs[i]) is not None]
                for label in tables.labels
            }
            name = ", ".join(filter(None, [f"{x.key.split('.')[-1]} = {value}", part.name]))
            drawn.append((name, groups))
    drawn = [(name, groups) for name, groups in drawn if canvas.drawable(groups, column, "rounds_completed")]
    if not drawn:
        return None
    wide = 7.2 if len(drawn) == 1 else 4.6
    figure, axes = canvas.panels(len(drawn), width=wide, height=3.1, share_y=True, columns=min(len(shown), 2))
    for panel, (name, groups) in zip(axes, drawn, strict=True):
        canvas.lines(panel, groups, column, "rounds_completed")
        panel.set_title(canvas.plain(name))
    axes[0].set_ylabel(canvas.plain(metric))
    canvas.legend(figure, _look(tables))
    words = ("the least and the greatest value", "the extremes of") if x.numeric else ("each value", "each")
    caption = f"{metric} by round at {words[0]} of {x.key}. {canvas.band_note(drawn[0][1])}"
    return canvas.picture(figure, f"curves-{metric}", f"Learning curves at {words[1]} {x.key}", caption)


def ranking(tables: Tables, metric: str, width: float = 7.2) -> Figure | None:
    """Critical-difference diagram (Demšar 2006, figure 1): mean ranks on a line, bars below those that cannot be told apart."""
    result = ranks(tables, metric)
    if result is None:
        return None
    k, groups = len(tables.labels), result.groups
    left = [*result.order[: (k + 1) // 2]]
    deepest = 0.6 + 0.3 * len(groups)
    figure, (axes,) = canvas.panels(1, width=width, height=0.9 + 0.25 * (k + len(groups)))
    axes.set_axis_off()
    axes.set(xlim=(0.5 - 0.35 * k, k + 0.5 + 0.35 * k), ylim=(deepest + 0.6 * (k + 1) / 2, -1.2))
    axes.plot([1, k], [0, 0], color="black", linewidth=1)
    for rank in range(1, k + 1):
        axes.plot([rank, rank], [0, -0.12], color="black", linewidth=1)
        axes.text(rank, -0.2, str(rank), ha="center", va="bottom")
    axes.plot([1, 1 + result.distance], [-0.9, -0.9], color="black", linewidth=2)
    axes.text(1 + result.distance, -0.9, f"  critical difference {result.distance:.2f}", ha="left", va="center")
    for place, i in enumerate(result.order):
        side = i in left
        depth = deepest + 0.6 * (place if side else k - 1 - place)
        edge = 0.9 if side else k + 0.1
        color = canvas.look(_look(tables), tables.labels[i])[0]
        axes.plot([result.mean[i], result.mean[i], edge], [0, depth, depth], color=color, linewidth=1.2)
        words = canvas.plain(f"{tables.labels[i]}  {result.mean[i]:.2f}")
        axes.text(edge, depth, f"{words} " if side else f" {words}", ha="right" if side else "left", va="center")
    for depth, group in enumerate(groups):
        ends = [result.mean[group[0]] - 0.04, result.mean[group[-1]] + 0.04]
        axes.plot(ends, [0.3 + 0.3 * depth] * 2, color="black", linewidth=3.5, solid_capstyle="butt")
    return figure


def of_ranks(tables: Tables, metric: str) -> str:
    """Return the caption of ``ranking``; empty where there are no ranks."""
    result = ranks(tables, metric)
    if result is None:
        return ""
    return (
        f"Mean rank of each label in final {metric} over {result.conditions} conditions, 1 for the best, each a mean over seeds. "
        f"Labels joined by a bar cannot be told apart (Nemenyi's test at 5 %; Friedman's: p = {result.p:.2g})."
    )


def _ranking(tables: Tables, metric: str) -> Picture | None:
    figure = ranking(tables, metric)
    return figure and canvas.picture(figure, f"ranks-{metric}", "Labels ranked", of_ranks(tables, metric))


def _histogram(tables: Tables) -> Picture | None:
    x, counts = _Axis(tables), tables.participation
    if not len(counts):
        return None
    names = [(part, value) for part in parts(tables) for value in x.ordered()]
    top = int(counts["completed"].max())
    width = math.ceil((top + 1) / 30)
    edges = np.arange(0, top + 1 + width, width) - 0.5
    keys = list(tables.varied)
    by_trial = {key: rows["completed"].to_numpy() for key, rows in counts.groupby(["label", *keys, "seed"], sort=False)}
    columns = min(3, len(x.values)) if len(parts(tables)) == 1 else len(x.values) if len(x.values) <= 5 else 3
    figure, axes = canvas.panels(len(names), width=max(2.6, 9.6 / columns), height=2.3, share_y=True, columns=columns)
    for panel, (part, value) in zip(axes, names, strict=True):
        rows = part.rows[(part.rows[x.key] == value) & part.rows["gini"].notna()]
        for label in tables.labels:
            bars = []
            for _, row in rows[rows["label"] == label].iterrows():
                heard = by_trial.get((label, *(row[k] for k in keys), row["seed"]), np.empty(0, dtype=np.int64))
                result = np.histogram(heard, edges)[0].astype(float)
                result[0] += int(row["clients"]) - len(heard)
                bars.append(result)
            if bars:
                canvas.steps(panel, np.mean(bars, axis=0), edges, canvas.look(_look(tables), label)[0], filled=False)
        text = filter(None, [f"{x.key.split('.')[-1]} = {value}", part.name])
        panel.set_title("\n".join(map(canvas.plain, text)), fontsize=8.5)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v)))
    for panel in axes[-columns:]:
        panel.set_xlabel("rounds completed")
    for panel in axes[::columns]:
        panel.set_ylabel("clients")
    canvas.legend(figure, _look(tables))
    caption = "How many clients completed how many rounds, mean over seeds; the clients at 0 never did." + (
        f" Bins of {width} rounds." if width > 1 else ""
    )
    return canvas.picture(figure, "participation", "Participation", caption)


def _evenness(tables: Tables) -> Picture | None:
    shown = {"gini": "Gini coefficient", "never_completed": "clients that never completed"}
    if not all(c in tables.study and tables.study[c].notna().any() for c in shown):
        return None
    panels = parts(tables)
    figure, axes = canvas.panels(2 * len(panels), width=4.6, height=3.1, columns=2)
    for row, part in enumerate(panels):
        for panel, (column, name) in zip(axes[2 * row : 2 * row + 2], shown.items(), strict=True):
            _against(panel, tables, part.rows, column)
            panel.set_title("\n".join(map(canvas.plain, filter(None, [name, part.name]))))
            panel.set_ylim(-0.03, 1.03)
    for panel in axes[1::2]:
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: share(max(0.0, value))))
    canvas.legend(figure, _look(tables))
    caption = (
        "Left: Gini coefficient of the rounds that each client completed, 0 if all completed equally many, near 1 if few "
        f"did all the work. Right: share of the clients that never completed a round. {EACH}"
    )
    return canvas.picture(figure, "evenness", "Evenness, and who never completes", caption)


def _same_y(axes: Sequence[Axes]) -> None:
    """Give panels one range of y, so that they compare."""
    low, high = min(a.get_ylim()[0] for a in axes), max(a.get_ylim()[1] for a in axes)
    for panel in axes:
        panel.set_ylim(low, high)
