"""Publication: figures at the width of a column as PDF and SVG, a file a panel, and tables as LaTeX and CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from fedfleet.files.writing import replacing, write_text
from fedfleet.report import canvas, latex, study_comparisons, study_figures, study_page
from fedfleet.report.canvas import Groups
from fedfleet.report.meanings import measured_on
from fedfleet.report.overview import headline
from fedfleet.report.shown import asked_for, parted
from fedfleet.report.study_tables import WORST, Tables
from fedfleet.report.tables import Run
from fedfleet.report.traps import worst_recalls
from fedfleet.report.words import count

COLUMN = 3.3
"""Inches: a column of a page of two."""
RATIO = 0.72  # height over width
STYLE: Any = canvas.STYLE | {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "legend.fontsize": 7.5, "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5, "lines.linewidth": 1.2, "axes.linewidth": 0.6, "grid.linewidth": 0.5,
    "pdf.fonttype": 42, "svg.fonttype": "path",
}  # fmt: skip
"""Fonts are embedded whole (42) in PDF, as proceedings ask for, and drawn in SVG."""
FORMATS: Mapping[str, Mapping[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}
"""Suffix -> what is left out of the file, so that the same data give the same bytes."""


class Drawn(NamedTuple):
    """A figure by its name, None where there is nothing to draw, and its caption."""

    name: str
    figure: Figure | None
    caption: str


def of_runs(groups: Groups, out: Path, width: float = COLUMN) -> list[Path]:
    """Write a figure a metric against rounds, and final metrics as a table; return the files.

    Args:
        groups: runs by label.
        out: the folder, made if missing.
        width: of figures, in inches.

    Raises OSError.

    """
    runs = [run for of in groups.values() for run in of]
    rows = final_metrics(groups)
    metrics, _ = parted([metric for metric in headline(runs) if metric in rows], asked_for(runs))
    seeds = len({run.seed for run in runs})
    over = (
        f": means over {seeds} seeds, and the area from the least to the greatest of them"
        if seeds > 1
        else ", of one seed"
    )
    with _style():
        drawn = [
            Drawn(
                f"{metric}-by-round",
                _curves(groups, metric, width),
                f"{metric} by round, on {_examples(runs, metric)}{over}.",
            )
            for metric in metrics
        ]
        files = _figures(drawn, out)
    return [*files, *_finals(rows, ["label"], metrics, out)]


def _examples(runs: Sequence[Run], metric: str) -> str:
    """Say of which examples a metric of several runs is."""
    every = {measured_on(metric, run.get("population", "held_out") or 0.0) for run in runs if metric in run.metrics}
    return every.pop() if len(every) == 1 else "clients' own examples, held out or not"


def of_study(tables: Tables, out: Path, width: float = COLUMN) -> list[Path]:
    """Write a figure a metric and panel, a diagram of critical differences a metric, and tables; as ``of_runs``."""
    if not tables.metrics:
        return []
    key, parts = next(iter(tables.varied)), [*study_figures.parts(tables)]
    drawn: list[Drawn] = []
    seeds = count(tables.study["seed"].nunique(), "seed")
    with _style():
        for metric in tables.parted[0]:
            for part in parts:
                name = " ".join(filter(None, [f"final-{metric}-by-{key}", part.name]))
                figure = study_figures.panel(tables, part, f"final/{metric}", width, RATIO * width)
                at = f" at {part.name}" if part.name else ""
                drawn.append(Drawn(name, figure, f"Final {metric} against {key}{at}, {seeds}. {study_figures.EACH}"))
            figure = study_figures.ranking(tables, metric, width)
            drawn.append(Drawn(f"ranks-{metric}", figure, study_figures.of_ranks(tables, metric)))
        files = _figures(drawn, out)
    renamed = {f"final/{m}": m for m in tables.metrics}
    files += _finals(tables.study.rename(columns=renamed), [*tables.varied, "label"], tables.parted[0], out)
    compared = study_comparisons.frame(tables)
    path = out / "comparisons.csv"
    compared.to_csv(path, index=False)
    files.append(path)
    for name, grid in [*study_comparisons.grids(tables), ("Cost of the target", study_page.to_target(tables))]:
        if grid is not None:
            stem = _stem(f"{name} {grid.title}" if grid.title else name)
            path = out / f"{stem}.tex"
            number = 2
            while path in files:
                path, number = out / f"{stem}-{number}.tex", number + 1
            cells = [[str(cell) for cell in row] for row in grid.rows]
            write_text(path, latex.table(grid.head, cells, caption=grid.caption, label=f"tab:{path.stem}"))
            files.append(path)
    return files


def final_metrics(groups: Groups) -> pd.DataFrame:
    """Return a row a run: label, seed, its final metrics, and of a classifier the recall of the worst class."""
    rows = []
    for label, runs in groups.items():
        for run in runs:
            row: dict[str, Any] = {"label": label, "seed": run.seed}
            row |= {metric: run.final(metric) for metric in run.metrics}
            for _, worst in worst_recalls([run]):
                row[WORST] = worst
            rows.append(row)
    return pd.DataFrame(rows)


def _finals(rows: Any, keys: Sequence[str], metrics: Sequence[str], out: Path) -> Iterator[Path]:
    """Write final metrics: those that a page shows, and the recall of the worst class."""
    metrics = [*metrics, WORST] if WORST in rows else metrics
    yield (path := out / "results.tex")
    write_text(path, latex.finals(rows, keys, metrics))
    yield (path := out / "results.csv")
    latex.means(rows, keys, metrics).to_csv(path, index=False)


def _curves(groups: Groups, metric: str, width: float) -> Figure | None:
    column = f"eval/{metric}"
    known = {label: runs for label, runs in groups.items() if _drawable(runs, column)}
    if not known:
        return None
    figure, (axes,) = canvas.panels(1, width=width, height=RATIO * width)
    canvas.lines(axes, known, column, "rounds_completed")
    axes.set_ylabel(canvas.plain(metric))
    canvas.legend(figure, known)
    return figure


def _drawable(runs: Sequence[Run], column: str) -> bool:
    return canvas.drawable({"": runs}, column, "rounds_completed")


def _style() -> Any:
    """Return a context in which figures are drawn for paper."""
    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE})


def _figures(drawn: Sequence[Drawn], out: Path) -> list[Path]:
    """Write figures, and what puts them into a paper with their captions."""
    out.mkdir(parents=True, exist_ok=True)
    files, there = list[Path](), [each for each in drawn if each.figure is not None]
    for each in there:
        for suffix, metadata in FORMATS.items():
            path = out / f"{_stem(each.name)}.{suffix}"
            with replacing(path) as scratch:
                each.figure.savefig(scratch, format=suffix, metadata=dict(metadata))  # type: ignore[union-attr]
            files.append(path)
    if there:
        files.append(out / "figures.tex")
        write_text(files[-1], "\n".join(latex.figure(f"{_stem(one.name)}.pdf", one.caption) for one in there))
    return files


def _stem(name: str) -> str:
    """Return a file's name of letters, digits and dashes: a dot would end it in LaTeX."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:80]
