"""Shared parts of figures: palette and style, panels, a line with its band, legends, and PNG bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedfleet.report import vector
from fedfleet.report.curves import Curve, Strand, bundles
from fedfleet.report.picture import Picture
from fedfleet.report.tables import Run, told_in
from fedfleet.report.words import quantity, shortened

Groups = Mapping[str, Sequence[Run]]

# Okabe and Ito's colours, told apart with any colour vision; past seven labels the line style changes too.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
DASHES = ("-", "--", ":", "-.")
CLOCK = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))
X_LABELS = {
    "rounds_completed": "rounds",
    "total/floats_up": "floats received by the server",
    "total/bytes_up": "bytes received by the server",
    "total/virtual_s": "virtual time",
}
DPI = 200  # twice what the page shows
COMPRESSION = 3  # of PNG: a fifth of a report's time less than with 6, for files a third larger
STYLE: Any = {
    "axes.edgecolor": "#8A8F98", "axes.grid": True, "axes.labelcolor": "#30343B", "axes.labelsize": 9.5,
    "axes.axisbelow": True, "axes.spines.right": False, "axes.spines.top": False, "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.linewidth": 0.8, "figure.facecolor": "white",
    "font.size": 9, "grid.color": "#E4E6EA", "grid.linewidth": 0.7, "legend.fontsize": 9, "legend.frameon": False,
    "lines.linewidth": 1.7, "lines.solid_capstyle": "round", "text.color": "#1B1E23", "xtick.color": "#8A8F98",
    "xtick.labelcolor": "#30343B", "ytick.color": "#8A8F98", "ytick.labelcolor": "#30343B",
    "legend.handletextpad": 0.5, "svg.fonttype": "none", "svg.hashsalt": "fedfleet",
}  # fmt: skip


def still(groups: Groups) -> list[str]:
    """What curves are drawn against where nothing moves: bytes go with floats, unless numbers are sent at other widths."""
    other = "floats" if told_in(run for runs in groups.values() for run in runs) == "bytes" else "bytes"
    return [against for against in X_LABELS if against != f"total/{other}_up"]


def lines(axes: Axes, groups: Groups, column: str, against: str, smoothed: bool = False) -> int:
    """One line a label, with a band if it has several seeds. Returns the greatest smoothing window used, in rounds."""
    name, result = scaled(groups, column, against)
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=against == "rounds_completed", steps=[1, 2, 2.5, 5, 10]))
    if against in ("total/floats_up", "total/bytes_up"):
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    drawn = bundles(result, smoothed=smoothed)
    for label, bundle in drawn.items():
        for strand in bundle.strands:
            _draw(axes, strand, *look(groups, label))
    return max((bundle.window for bundle in drawn.values()), default=1)


def scaled(groups: Groups, column: str, against: str) -> tuple[str, dict[str, list[Curve]]]:
    """What an axis is called, and the curves of each label against it; virtual time in a unit that suits the longest."""
    result = {label: [c for run in runs if len((c := run.curve(column, against))[0])] for label, runs in groups.items()}
    if against != "total/virtual_s":
        return X_LABELS[against], result
    top = max(x[-1] for curves in result.values() for x, _ in curves)
    scale, word = next((unit, word) for least, unit, word in CLOCK if top >= least)
    return f"{X_LABELS[against]}, {word}", {k: [(x / scale, y) for x, y in curves] for k, curves in result.items()}


def _draw(axes: Axes, strand: Strand, color: str, dash: str) -> None:
    x, y, between, kind = strand
    if kind == "pale":
        axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
    elif kind == "thin":
        axes.plot(
            x,
            y,
            color=color,
            linestyle=dash,
            linewidth=0.8,
            alpha=0.8,
            marker="o" if len(x) <= 15 else "",
            markersize=2.5,
        )
    else:
        axes.plot(x, y, color=color, linestyle=dash, marker="o" if len(x) <= 15 else "", markersize=3.5)
    if between is not None:
        axes.fill_between(x, *between, color=color, alpha=0.16, linewidth=0)


def steps(axes: Axes, bars: np.ndarray, edges: np.ndarray, color: str, filled: bool) -> None:
    """A histogram with heights `bars` (n,) between `edges` (n + 1,): bars if it is alone, else an outline."""
    if filled:
        axes.bar(edges[:-1], bars, np.diff(edges), align="edge", color=color, edgecolor="white", linewidth=0.4)
    else:
        axes.stairs(bars, edges, color=color, linewidth=1.5)
        axes.stairs(bars, edges, color=color, fill=True, alpha=0.06)


def panels(
    count: int, width: float, height: float, share_y: bool = False, columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, at most so many a row, each width x height inches."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=share_y, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_axis_off()
    return figure, panels[:count]


def legend(figure: Figure, groups: Groups, notes: Mapping[str, str] | None = None) -> None:
    """A legend of the labels below the panels, each with its note in brackets; none for a single label.

    Where it has many rows, the figure is higher for them.
    """
    if len(groups) < 2:
        return
    looks: list[Any] = [look(groups, label) for label in groups]
    handles = [Line2D([], [], color=color, linestyle=dash) for color, dash in looks]
    notes = notes or {}
    labels = [name + (f" ({notes[label]})" if label in notes else "") for label, name in plain_names(groups).items()]
    widths = [0.5 + 0.068 * len(label) for label in labels]  # inches, roughly: one row if it fits, else columns that do
    fitting = len(labels) if sum(widths) < figure.get_figwidth() else int(figure.get_figwidth() / max(widths))
    columns = max(1, fitting)
    more = -(-len(labels) // columns) - 3  # rows that a figure has no room for: it grows, or the panels would vanish
    figure.set_figheight(figure.get_figheight() + 0.19 * max(0, more))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def look(groups: Groups, label: str) -> tuple[str, str]:
    """A label's colour and line style, the same in every figure."""
    turn, place = divmod(list(groups).index(label), len(PALETTE))
    return PALETTE[place], DASHES[turn % len(DASHES)]


def drawable(groups: Groups, column: str, against: str) -> bool:
    """Some run has two points with different x; all-zero communication or virtual time says nothing."""
    curves = [run.curve(column, against)[0] for runs in groups.values() for run in runs]
    return any(len(x) > 1 and x[-1] > x[0] for x in curves)


def band_note(groups: Groups) -> str:
    """The sentence of a caption that says what lines and bands are; empty without several seeds."""
    if all(len(runs) == 1 for runs in groups.values()):
        return ""
    return (
        "Lines are means over seeds where all seeds have data, bands reach from the least to the greatest seed; "
        "a thin line past a band's end is a single seed that went much further."
    )


def plain_names(groups: Iterable[str]) -> dict[str, str]:
    """Labels as texts for matplotlib: whole where they would be cut alike."""
    cut = {label: plain(label) for label in groups}
    return cut if len({*cut.values()}) == len(cut) else {label: _escaped(label) for label in cut}


def plain(text: str) -> str:
    """Text for matplotlib: no mathematics, no leading underscore (a legend would hide it), not too long."""
    return _escaped(shortened(text, 48))


def _escaped(text: str) -> str:
    return text.replace("$", r"\$").replace("_", "\u200a_", 1) if text.startswith("_") else text.replace("$", r"\$")


def picture(figure: Figure, name: str, title: str, caption: str, chart: Mapping[str, Any] | None = None) -> Picture:
    """The figure as a PNG, and as SVG for the page; `chart` is what the page's script draws in its place."""
    image = png(figure)
    mark = f"f{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    drawn = vector.element(figure, mark, title, caption.strip())
    return Picture(name=name, title=title, caption=caption.strip(), png=image, svg=drawn, chart=chart)


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes; as it is laid out for them it stays."""
    buffer = io.BytesIO()
    figure.set_dpi(DPI)
    if (layout := figure.get_layout_engine()) is not None:  # savefig would lay it out by drawing it once more
        layout.execute(figure)
        figure.set_layout_engine("none")
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None}, pil_kwargs={"compress_level": COMPRESSION})
    return buffer.getvalue()


def write(make: Callable[[], Figure], path: Path) -> None:
    """Write a figure as .svg or .png, the same bytes each time. Raises OSError."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        drawn = make()
        matplotlib.rcParams["svg.fonttype"] = "path"  # whoever looks at the file may have no such font
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            path.write_bytes(png(drawn))
        else:
            drawn.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def distinct(pictures: Iterable[Picture]) -> Iterator[Picture]:
    """File names made of letters, digits, dot and dash, no two the same (metric names are free text)."""
    taken: set[str] = set()
    for picture in pictures:
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", picture.name).strip("-.").lower()[:80]
        name, turn = stem, 2
        while name in taken:
            name, turn = f"{stem}-{turn}", turn + 1
        taken.add(name)
        yield dataclasses.replace(picture, name=name)
