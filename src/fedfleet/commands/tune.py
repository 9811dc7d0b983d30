"""Search for hyper-parameters: ``fedfleet tune``, and ``fedfleet resume`` of what it left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedfleet.commands.terminal import results
from fedfleet.config import schema as C
from fedfleet.config.schema import Config
from fedfleet.config.search import searched
from fedfleet.experiments.progress import Progress
from fedfleet.report import winners_page
from fedfleet.report.tuning_tables import Findings, Winners
from fedfleet.report.words import number, quantity
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.tuning import findings as findings
from fedfleet.tuning import several, winners
from fedfleet.tuning.search import Search
from fedfleet.tuning.several import Searches
from fedfleet.tuning.winners import Result

SHOWN = 15
"""Trials that the terminal shows; the report has them all."""


def configured(config: Config, search: list[str], seeds: int | None, given: Mapping[str, Any]) -> Config:
    """Return a configuration with what the command line says of a search. Raises ConfigError."""
    said: dict[str, Any] = {}
    for key, value in (pair for text in search for pair in searched(text).items()):
        if f"tune.search.{key}" in said:
            raise ConfigError(f"--search {key}: given twice: give one distribution for it")
        said[f"tune.search.{key}"] = value
    said |= {f"tune.{key}": value for key, value in given.items() if value is not None}
    if seeds is not None:
        said["seeds"] = [*range(config.seed, config.seed + seeds)]
    return C.with_overrides(config, said)


def run(searches: Searches, out: Path, progress: Progress, console: Console, jobs: int = 1) -> None:
    """Run searches, write what they found, and show it. Raises FedfleetError where all trials of one failed."""
    results: dict[Path, Result] = {}
    for cell, folder, trials in several.run(searches, out, progress, jobs):
        result = findings.write(cell.search, trials, folder)
        results[folder] = Result(cell, result, trials)
        if searches.several:
            best = result.failure or next(findings.lines(result))
            progress.say(f"search {len(results)} of {len(searches.cells)} done: {cell.point.name}: {best}")
    ordered = [results[out / cell.point.place] for cell in searches.cells]
    if searches.several:
        _end(winners.write(searches, ordered, out), out, progress, console)
        return
    alone = ordered[0].found
    if alone.failure is not None:
        raise FedfleetError(alone.failure)
    progress.say(f"report: {out / 'report.html'}")
    show(alone, out, console)


def _end(result: Winners, out: Path, progress: Progress, console: Console) -> None:
    """Show the winners of several searches. Raises FedfleetError where one has none."""
    progress.say(f"report: {out / 'report.html'}")
    show_winners(result, out, console)
    for name, failure in result.failed.items():
        raise FedfleetError(f"{len(result.failed)} of {len(result.each)} searches: {name}: {failure}")


def show(result: Findings, out: Path, console: Console) -> None:
    """Print the best trials and what is to be said of them."""
    after = [f"after/{rounds}" for rounds in result.rungs]
    head, rows = ["trial", *result.keys, "state", *map(str, result.rungs), "sent"], []
    for row in result.ranked()[:SHOWN]:
        keys, values = (number(row[key]) for key in result.keys), (number(row[column]) for column in after)
        rows.append([f"{row['trial']}", *keys, result.state(row), *values, quantity(row["bytes"], "B")])
    console.print(f"{result.metric} after so many rounds", style="italic", markup=False)
    console.print(results(head, rows), soft_wrap=True)
    for line in (*findings.lines(result), f"{out / findings.BEST}: the winner, for fedfleet run"):
        console.print(line, markup=False, soft_wrap=True)


def show_winners(result: Winners, out: Path, console: Console) -> None:
    """Print the winner of each search and what is to be said of them."""
    cells = [winners_page.cells(result, each) for each in result.each]
    console.print(results(winners_page.head(result), cells), soft_wrap=True)
    first = result.each[0].found
    said = [
        *result.to_extend,
        f"{result.metric} is of {first.measured_on}",
        *([first.warning] if first.on_test else []),
    ]
    if result.best is not None:
        said.append(f"{out / findings.BEST}: the winners, for fedfleet run")
    for line in said:
        console.print(line, markup=False, soft_wrap=True)


def describe(searches: Searches) -> str:
    """Return what would be run, a line a search."""
    return "\n".join(f"{cell.search.told}{_described(cell.search)}" for cell in searches.cells)


def _described(search: Search) -> str:
    given = search.given
    seeds = f", {len(search.seeds)} seeds each" if len(search.seeds) > 1 else ""
    rungs = ", ".join(map(str, search.rungs))
    return f"{search.wanted} trials{seeds} of {given.searcher}, {given.scheduler}, compared after {rungs} rounds by {given.metric}"
