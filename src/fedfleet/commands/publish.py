"""Publication of runs: figures and tables for a paper, with the paragraph on methods and its bibliography."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfleet.commands import methods, tuned
from fedfleet.commands.arguments import PAPER
from fedfleet.commands.methods import configs
from fedfleet.commands.references import bibliography
from fedfleet.files.writing import write_text
from fedfleet.report import publication, run_folders, tables
from fedfleet.report.groups import grouped
from fedfleet.report.study_tables import Tables
from fedfleet.report.tables import Run
from fedfleet.simulator.errors import ConfigError, one_line


def runs(folders: Sequence[Path], out: Path, width: float | None = None, chosen: Path | None = None) -> list[Path]:
    """Write ``out/paper`` of run folders; return its files. Raises ConfigError, ValueError as ``write_report`` does."""
    groups = grouped([tables.read(folder) for folder in run_folders(folders)])
    return _written(
        out, lambda paper: publication.of_runs(groups, paper, width or publication.COLUMN), groups, None, chosen
    )


def check(folders: Sequence[Path], chosen: Path) -> None:
    """Refuse a search that chose what none of the runs has. Raises ConfigError, ValueError as ``runs`` does."""
    groups = grouped([tables.read(folder) for folder in run_folders(folders)])
    tuned.read(chosen).check(configs(groups))


def study(found: Tables, out: Path, width: float | None = None, chosen: Path | None = None) -> list[Path]:
    """Write ``out/paper`` of a study; return its files."""
    groups: dict[str, list[Run]] = {label: [] for label in found.labels}
    for label, run in zip(found.study["label"], found.runs, strict=True):
        groups[label] += [] if run is None else [run]
    groups = {label: of for label, of in groups.items() if of}
    return _written(
        out, lambda paper: publication.of_study(found, paper, width or publication.COLUMN), groups, found, chosen
    )


def _written(
    out: Path, draw: Any, groups: Mapping[str, Sequence[Run]], found: Tables | None, chosen: Path | None
) -> list[Path]:
    search, paper = None if chosen is None else tuned.read(chosen), out / PAPER
    try:
        paper.mkdir(parents=True, exist_ok=True)  # of a study that measured nothing there is no figure
        files = draw(paper)
        write_text(paper / "methods.tex", methods.paragraph(groups, found, search))
        write_text(paper / "references.bib", "\n\n".join(bibliography(groups, found)) + "\n")
    except OSError as e:
        raise ConfigError(
            f"{paper}: cannot be written ({one_line(e.strerror or e)}): give a folder you may write to"
        ) from None
    return [*files, paper / "methods.tex", paper / "references.bib"]
