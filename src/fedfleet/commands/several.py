"""The commands of several runs: studies, searches, papers' tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fedfleet.commands import completing
from fedfleet.commands.arguments import (
    ConfigArg,
    JsonArg,
    OverridesArg,
    PaperArg,
    TrustArg,
    TunedArg,
    WidthArg,
    check_paper,
    check_seeds,
    loaded,
    tell_of_paper,
    there,
)
from fedfleet.commands.terminal import interruptible, print_json, progress, results, wide
from fedfleet.files.documents import is_there
from fedfleet.simulator.errors import ConfigError


def study(
    config: ConfigArg,
    overrides: OverridesArg = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,...", help="Run at each of these values; may be given several times."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of each, instead of the configuration's.")] = None,
    target: Annotated[str | None, typer.Option(help="What it costs to reach a metric, such as eval/auc=0.9.")] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Whom labels are compared with; the first one if not given.")
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(metavar="SIZE", help="Say how many seeds a difference of this size would need, such as 0.02."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; one that is there is gone on with.")] = None,
    paper: PaperArg = False,
    width: WidthArg = None,
    tuned: TunedArg = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials at a time; as many as the CPUs if not given.")] = None,
    executor: Annotated[
        str, typer.Option(help="local: a trial runs in one process; config: as the configuration's executor says.")
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and show what would be run.")] = False,
    trust: TrustArg = False,
) -> None:
    """Run every label of a configuration at every point of a grid on every seed; write four tables and a report.

    The same command goes on where it was interrupted.
    """
    _check_executor(executor)
    if power is not None and not 0 < power < math.inf:
        raise ConfigError(f"--power={power:g}: must be a difference above 0, such as 0.02")
    if out is None and not dry_run:
        raise ConfigError("--out: not given: give the folder of the study")
    check_paper(paper, width, tuned)
    check_seeds(seeds, overrides)
    chosen = loaded(config, overrides, trust=trust)
    from fedfleet.commands import study as studying

    studying.check_varied(vary or [], overrides or [])
    shown = progress()
    planned = studying.plan(
        chosen, vary or [], seeds, target, reference=reference, sought=power, in_process=executor == "local"
    )
    prepared = studying.prepare(planned, shown)
    if tuned is not None:
        from fedfleet.commands.tuned import read

        by_label: dict[str, list[dict[str, Any]]] = {}
        for trial, resolved in zip(planned.trials, prepared.resolved, strict=True):
            by_label.setdefault(trial.label, []).append(resolved)
        read(tuned).check(by_label)
    if dry_run or out is None:
        for line in studying.describe(prepared, out):
            typer.echo(line)
        return
    with interruptible("the same command goes on"):
        tables = studying.run(prepared, out, shown, jobs)
    if paper:
        from fedfleet.commands import publish

        publish.study(tables, out, width, tuned)
    else:
        tell_of_paper(out)
    from fedfleet.report.study_comparisons import needed
    from fedfleet.report.study_page import answers, finals

    head, rows = finals(tables)
    wide().print(results(head, rows), soft_wrap=True)
    grid = needed(tables)
    if power is not None and grid is None:
        typer.echo(f"--power={power:g}: no spread can be told: that takes two seeds of two labels or values")
    if grid is not None:
        wide().print(results(grid.head, [[str(cell) for cell in row] for row in grid.rows]), soft_wrap=True)
        typer.echo(grid.caption)
    for line in answers(tables):
        typer.echo(line)
    studying.check(studying.failures(tables, planned), planned)
    typer.echo(f"{out}: {len(tables.study)} trials")


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of runs, such as runs.", autocompletion=completing.runs)
    ],
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION", help="In SQL, such as \"algorithm = 'fedavg' and availability.rate < 0.5\"."
        ),
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help="Such as eval/auc: least first.")] = None,
    descending: Annotated[bool, typer.Option("--descending", help="Sort the greatest first.")] = False,
    table_: Annotated[
        str | None,
        typer.Option("--table", help="Rows of this table of the runs, such as rounds, instead of a row a run."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="COLUMN,...", help="Show these columns instead of some that matter.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Show so many rows.")] = None,
    as_json: JsonArg = False,
) -> None:
    """Find runs again, by their settings and metrics, in a folder of any depth."""
    if not is_there(folder):
        raise ConfigError(f"{folder}: no such folder: give a folder of runs, such as runs")
    if descending and sort is None:
        raise ConfigError("--descending: nothing is sorted: give --sort COLUMN, or leave it out")
    from fedfleet.commands import runs as finding
    from fedfleet.report.words import count, plain_value  # here, for it imports numpy

    every = finding.rows(folder)
    found: Any = finding.ordered(finding.select(every, where, table_), sort, descending=descending)
    asked = [name.strip() for name in columns.split(",")] if columns is not None else []
    names = finding.shown(found, every, asked, where, sort, table_)
    several, of = len(found), len(every) if table_ is None else found["path"].nunique() or len(every)
    found = found.head(limit) if limit is not None else found
    hint = None if several else finding.why_none(where, every, table_)
    if as_json:
        if hint is not None:
            typer.echo(hint, err=True)
        print_json({"rows": several, "runs": finding.plain(found[names] if asked else found)})
        return
    cells = [
        [plain_value(value) if value is not None else "" for value in row.values()]
        for row in finding.plain(found[names])
    ]
    wide().print(results(names, cells, whole=1), soft_wrap=True)  # a folder to be copied
    left = f", of which {len(found)} are shown" if len(found) < several else ""
    told = count(several, "row") if table_ else f"{several:,}"
    typer.echo(f"{told} of {count(of, 'run')} in {folder}{left}")
    if hint is not None:
        typer.echo(hint)


def tune(
    config: ConfigArg,
    overrides: OverridesArg = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=DISTRIBUTION", help="Such as algorithm.lr=loguniform(1e-3,1); several times."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What is compared, such as eval/validation_accuracy.")] = None,
    goal: Annotated[str | None, typer.Option(help="max or min, where the metric's name does not say.")] = None,
    of: Annotated[str | None, typer.Option(help="Which evaluation counts: last or best.")] = None,
    trials: Annotated[
        int | None, typer.Option(help="How many configurations are drawn, for each label and point.")
    ] = None,
    searcher: Annotated[str | None, typer.Option(help="random, grid or tpe (Optuna).")] = None,
    scheduler: Annotated[str | None, typer.Option(help="sha, asha or none.")] = None,
    min_rounds: Annotated[int | None, typer.Option(help="Rounds to the first rung.")] = None,
    reduction: Annotated[int | None, typer.Option(help="One in so many goes on at a rung.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds a trial, of which the mean counts.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the search; one that is there is gone on with.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    executor: Annotated[
        str, typer.Option(help="local: a run trains in one process; config: as the configuration's executor says.")
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and show what would be run.")] = False,
    trust: TrustArg = False,
) -> None:
    """Search for hyper-parameters, for each label of `compare` at each point of `vary`; trials that fall behind are stopped early.

    The same command goes on where it was interrupted.
    """
    _check_executor(executor)
    if out is None and not dry_run:
        raise ConfigError("--out: not given: give the folder of the search")
    check_seeds(seeds, overrides)
    chosen = loaded(config, overrides, trust=trust)
    from fedfleet.commands import tune as tuning
    from fedfleet.tuning import several as searching

    given = {"metric": metric, "goal": goal, "of": of, "trials": trials, "searcher": searcher, "scheduler": scheduler}
    given |= {"min_rounds": min_rounds, "reduction": reduction}
    chosen, shown = tuning.configured(chosen, search or [], seeds, given), progress()
    prepared = searching.prepare(chosen, shown, in_process=executor == "local")
    if dry_run or out is None:
        typer.echo(tuning.describe(prepared))
        return
    with interruptible("the same command goes on"):
        tuning.run(prepared, out, shown, wide(), jobs)


def paper(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", callback=there, help="A file such as configs/afl/adult_table.yaml.")
    ],
    overrides: OverridesArg = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of each row, instead of the configuration's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; one that is there is gone on with.")] = Path("runs/paper"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; as many as the CPUs if not given.")] = None,
) -> None:
    """Run a paper's table again, and print ours beside the paper's."""
    check_seeds(seeds, overrides)
    from fedfleet.commands import paper as papers

    with interruptible("the same command goes on"):
        typer.echo(papers.run(table, overrides, seeds, out, progress(), jobs), nl=False)


def _check_executor(given: str) -> None:
    if given not in ("local", "config"):
        raise ConfigError(f"--executor {given!r}: give local or config")
