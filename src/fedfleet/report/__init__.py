"""The report of one run, or of a comparison of many: one HTML page that stands alone, and its figures as PNG files.

It reads run folders and nothing else, so it also serves runs that were made on another machine or were cut short.
`tables` reads them, `figures` draws, `overview` says what happened, `page` puts together what `sheet` writes as HTML.

May import: files, simulator, simulator.driver.evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfleet.report.study_tables import Target

__all__ = ["finals", "run_folders", "told", "write_card", "write_report"]

ROUNDS = "rounds.parquet"
NUMBERED = r"(\D*)(\d*(?:\.\d+)?(?:e[-+]?\d+)?)"
QUIET = ("_worst_tenth", "_spread")  # metrics for the tables alone
SEARCH_DEPTH = 3  # a comparison folder is <label>/seed-<n>/, and one level more for a folder of comparisons


def write_report(runs: Sequence[Path], out: Path, target: Target | None = None) -> Path:
    """Write `out/report.html`, which embeds its figures, and the same figures as `out/figures/*.png`.

    Args:
        runs: run folders, or comparison folders, which stand for the run folders up to three levels below them.
            Runs of one label (`summary.json`'s, else the algorithm's name) are one line with a band over seeds; those that
            differ in what ran, or in how, are lines of their own.
        out: the folder to write to, made if missing; it may be a run folder.
        target: a value of a metric: a table says what it took to reach it.

    Returns:
        The path of `report.html`.

    Raises:
        ValueError: no runs given, a folder that is or holds no run, a run folder with an unreadable file, or a target
            that no run has measured.
    """
    from fedfleet.report import figures, groups, page, sheet, tables  # here: matplotlib takes most of a second

    folders = run_folders(runs)
    if not folders:
        raise ValueError("no run to report on: give at least one run folder, such as runs/my-run")
    result = groups.grouped([tables.read(folder) for folder in folders])
    drawn = figures.draw(result)
    html = page.render(result, drawn, target)
    return sheet.write(Path(out), html, drawn)


def run_folders(runs: Sequence[Path]) -> list[Path]:
    """Return the run folders that these folders are or hold, each once. Raises ValueError where one has none."""
    return list(dict.fromkeys(run.resolve() for path in runs for run in _expand(Path(path))))


def write_card(
    run: Path, net: tuple[str, str] | None = None, rate: Callable[[int], float] = lambda rounds: 1.0
) -> None:
    """Write the `model_card.md` of a run folder that has a model. Raises ValueError where a file of it cannot be read.

    `net` is the run's net in Python: where it is from, such as "from nets import resnet", empty for torch; and an expression.
    `rate` says which share of its learning rate was left in the last of so many rounds.
    """
    from fedfleet.report import card, tables

    read = tables.read(run, wanted=("rounds",))
    card.write(read, net, rate(read.rounds_done))


def told(run: Path) -> list[str]:
    """Return what happened in a run, a paragraph a line, as its report says it. Raises ValueError."""
    from fedfleet.report import overview, tables

    return overview.of_run(tables.read(run))


def finals(runs: Sequence[Path]) -> list[str]:
    """Return a line a label: final metrics and the worst class' recall, mean and sample standard deviation over its runs.

    Where there are several runs, lines follow on what was not learnt, and on what makes labels hard to compare. Raises ValueError.
    """
    from fedfleet.report import tables, traps
    from fedfleet.report.words import mean_sd

    groups: dict[str, list[tables.Run]] = {}
    by_label: dict[str, list[dict[str, float | None]]] = {}
    for folder in runs:
        run = tables.read(folder, ("config.yaml", "classes.parquet"), ("classes",))
        label, worst = str(run.summary.get("label")), traps.worst_recalls([run])
        groups.setdefault(label, []).append(run)
        final = run.section("final") | ({"recall of the worst class": worst[0][1]} if worst else {})
        by_label.setdefault(label, []).append(final)
    width = max(map(len, by_label), default=0)
    lines = []
    for label, result in by_label.items():
        metrics = dict.fromkeys(name for one in result for name in one if not name.endswith(QUIET))
        told = ", ".join(f"{m.removeprefix('eval/')} {mean_sd([one.get(m) for one in result])}" for m in metrics)
        lines.append(
            f"{label:{width}}  final {told or 'metrics are missing'}"
            + (f" ({len(result)} runs)" if len(result) > 1 else "")
        )
    return [*lines, *traps.of_comparison(groups)] if len(runs) > 1 else lines


def _expand(path: Path) -> Iterator[Path]:
    """The run folder itself, or the run folders below a comparison folder, in natural order (seed-2 before seed-10)."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give the run folder that `fedfleet run` wrote")
    if (path / ROUNDS).is_file():
        yield path
        return
    level, result = [path], []
    for _ in range(SEARCH_DEPTH):
        below = [child for folder in level for child in folder.iterdir() if child.is_dir()]
        result += [child for child in below if (child / ROUNDS).is_file()]
        level = [child for child in below if not (child / ROUNDS).is_file()]
    if not result:
        raise ValueError(
            f"{path}: no {ROUNDS} here or below; give a run folder that `fedfleet run` wrote, or a folder of them"
        )
    yield from sorted(result, key=lambda run: _natural(run.relative_to(path)))


def _natural(path: Path) -> list[tuple[str, float]]:
    """A sort key that compares the numbers in a path as numbers, 0.05 before 0.2."""
    return [(text, float(number or 0)) for text, number in re.findall(NUMBERED, path.as_posix())]
