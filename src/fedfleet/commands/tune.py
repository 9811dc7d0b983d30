"""Search for hyper-parameters: ``fedfleet tune``, and ``fedfleet resume`` of what it left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedfleet.config import schema as C
from fedfleet.config.schema import Config
from fedfleet.config.search import searched
from fedfleet.experiments.progress import Progress
from fedfleet.report.tuning_tables import Findings
from fedfleet.report.words import number, quantity
from fedfleet.tuning import found as findings
from fedfleet.tuning import search as searching
from fedfleet.tuning.search import Search

SHOWN = 15
"""Trials that the terminal shows; the report has them all."""


def configured(config: Config, search: list[str], seeds: int | None, given: Mapping[str, Any]) -> Config:
    """Return a configuration with what the command line says of a search. Raises ConfigError."""
    said: dict[str, Any] = {f"tune.search.{key}": value for text in search for key, value in searched(text).items()}
    said |= {f"tune.{key}": value for key, value in given.items() if value is not None}
    if seeds is not None:
        said["seeds"] = [*range(config.seed, config.seed + seeds)]
    return C.with_overrides(config, said)


def run(search: Search, out: Path, progress: Progress, console: Console, jobs: int = 1) -> None:
    """Run a search, write what it found, and show it. Raises FedfleetError where all trials failed."""
    trials = searching.run(search, out, progress, jobs)
    found = findings.write(search, trials, out)
    progress.say(f"report: {out / 'report.html'}")
    show(found, out, console)


def show(found: Findings, out: Path, console: Console) -> None:
    """Print the best trials and what is to be said of them."""
    after = [f"after/{rounds}" for rounds in found.rungs]
    table = Table(title=f"{found.metric} after so many rounds", title_justify="left")
    for i, name in enumerate(("trial", *found.keys, "state", *map(str, found.rungs), "sent")):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in found.ranked()[:SHOWN]:
        keys, values = (number(row[key]) for key in found.keys), (number(row[column]) for column in after)
        table.add_row(f"{row['trial']}", *keys, found.state(row), *values, quantity(row["bytes"], "B"))
    console.print(table)
    for line in (*findings.lines(found), f"{out / findings.BEST}: the winner, for fedfleet run"):
        console.print(line, markup=False, soft_wrap=True)


def describe(search: Search) -> str:
    """Return what would be run."""
    given = search.given
    seeds = f", {len(search.seeds)} seeds each" if len(search.seeds) > 1 else ""
    rungs = ", ".join(map(str, search.rungs))
    return f"{search.wanted} trials{seeds} of {given.searcher}, {given.scheduler}, compared after {rungs} rounds by {given.metric}"
