"""The command line: each function with ``@app.command`` is a command; those about data are in ``convert`` and ``data``."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from fedfleet.commands import completing, convert, data, several
from fedfleet.commands.arguments import (
    TERMINATED,
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
from fedfleet.commands.terminal import AGAIN, INTERRUPTED, Interrupted, apart, interruptible, print_json, progress, wide
from fedfleet.config.reading import check_free, check_there
from fedfleet.files.documents import YAML_BYTES, is_there, text_of
from fedfleet.simulator.errors import ConfigError, FedfleetError

ABOUT = "Simulate federated learning on many unreliable devices."
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=ABOUT)
FAILED, BAD_INPUT = 1, 2
METHODS = ("cosine", "dlg", "closed")  # of invert


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"fedfleet {version('fedfleet')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take what stands before a command."""


@app.command()
def run(
    config: ConfigArg,
    overrides: OverridesArg = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the run; runs/<name of CONFIG> if not given.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Stop once a metric is reached, such as eval/auc=0.95.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Stop after so many seconds.")] = None,
    warm_start: Annotated[Path | None, typer.Option(help="Start from this model.safetensors.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of each, instead of the configuration's.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, for a configuration of several runs.")] = 1,
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    as_json: JsonArg = False,
    trust: TrustArg = False,
) -> None:
    """Run an experiment, or several of one configuration, and write its run folder."""
    if out is not None:
        check_free(out)
    check_seeds(seeds, overrides)
    chosen = loaded(config, overrides, trust=trust)
    from fedfleet.config.schema import with_overrides
    from fedfleet.experiments import campaign

    numbers = None if seeds is None else [*range(chosen.seed, chosen.seed + seeds)]
    given = {"until": until, "max_seconds": max_seconds, "warm_start": warm_start, "seeds": numbers}
    chosen = with_overrides(chosen, {k: v for k, v in given.items() if v is not None})
    out = out or _new_folder(config)
    with interruptible(f"go on with `fedfleet resume {out}`", out), apart(as_json):
        runs = campaign.run(chosen, out, progress(), jobs, report=report)
    if as_json:
        print_json(_ended(out, report, (run.folder for run in runs)))


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="What was given as --out.", autocompletion=completing.runs)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="What is to change, such as rounds=200.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    as_json: JsonArg = False,
    trust: TrustArg = False,
) -> None:
    """Go on with a run, or several in one folder, from the last checkpoint; the result is that of one never interrupted."""
    check_there(folder, "config.yaml", "campaign.yaml", "tune.yaml")
    from fedfleet.experiments import campaign

    with interruptible(f"go on with `fedfleet resume {folder}`"):
        if (folder / "tune.yaml").exists():
            if as_json:
                raise ConfigError(f"--json: {folder} is a search, whose tables are its results: leave it out")
            from fedfleet.commands import tune as tuning
            from fedfleet.tuning import several as searching

            shown = progress()
            tuning.run(searching.again(folder, overrides, shown, trust=trust), folder, shown, wide())
            return
        with apart(as_json):
            runs = campaign.resume(folder, overrides, progress(), report=report, trust=trust)
    if as_json:
        print_json(_ended(folder, report, (run.folder for run in runs)))


@app.command()
def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder, or a folder of runs, such as a study's.", autocompletion=completing.runs
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show how it stands, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
) -> None:
    """Show how a run that goes on elsewhere stands, from its folder alone, until it ends."""
    if not is_there(folder) and (once or not sys.stdout.isatty()):  # else it may be there soon
        raise ConfigError(f"{folder}: no such folder: give that of a run, or of several")
    from fedfleet.commands import watch as watching

    watching.watch(folder, wide(), every, once=once)


@app.command()
def plan(config: ConfigArg, overrides: OverridesArg = None, as_json: JsonArg = False, trust: TrustArg = False) -> None:
    """Check a configuration and show what a run would do, without running it."""
    chosen = loaded(config, overrides, trust=trust)
    from fedfleet.commands import plan as planning
    from fedfleet.experiments import campaign, sweep

    console = Console()
    data_by_key: dict[Any, Any] = {}
    plans: list[dict[str, Any]] = []
    for trial in sweep.distinct(sweep.planned(chosen)):
        with apart(as_json):
            x = campaign.prepare(trial, data_by_key)
            lines = list(planning.describe(x))
        table = Table(title=trial.name or None, show_header=False)
        if trial.lost:
            lines.insert(1, ("left out", "\n".join(trial.lost)))
        if chosen.seeds is not None:
            lines.insert(1, ("seeds", f"{', '.join(map(str, chosen.seeds))}: the first is shown"))
        if as_json:
            plans.append({"name": trial.name, **planning.as_dict(x, lines)})
            continue
        for key, value in lines:
            table.add_row(key, value)
        console.print(table)
    if as_json:
        print_json({"runs": plans})


for command in (several.study, several.runs, several.tune, several.paper):
    app.command()(command)


@app.command()
def bench(
    config: ConfigArg,
    overrides: OverridesArg = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="Measure which executor.inner and executor.block_size are fastest.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Timed rounds; by default a few, and with --rules up to 30 of each candidate."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no round after so many seconds; 20, or 60 with --rules.")
    ] = None,
    as_json: JsonArg = False,
    trust: TrustArg = False,
) -> None:
    """Run a few rounds and show where their time goes; nothing of the run is written."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    chosen = loaded(config, overrides, trust=trust)
    from fedfleet.commands import bench as measuring
    from fedfleet.commands import rules as turns
    from fedfleet.experiments import campaign

    experiment, tell = campaign.only(chosen, "bench"), progress().say
    given = {k: v for k, v in {"rounds": rounds, "seconds": seconds}.items() if v is not None}
    measure, show = (turns.take_turns, turns.show) if rules else (measuring.measure, measuring.show)
    with apart(as_json):
        result = measure(experiment, tell=tell, **given)
    if as_json:
        print_json(result)
    else:
        show(result, wide())


@app.command()
def invert(
    source: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", callback=there, help="A YAML file, or a run folder.")],
    overrides: OverridesArg = None,
    client: Annotated[
        int | None, typer.Option(min=0, help="Whose message; the first that is heard, if not given.")
    ] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", min=0, help="Of which round: 0, or of a run the one after its last checkpoint."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Rebuild at most so many together, or refuse to.")] = 64,
    method: Annotated[
        str, typer.Option(help="cosine (Geiping et al.), dlg, or closed, of a linear first layer.")
    ] = "cosine",
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Of each restart: 1000, or 60 of dlg, if not given.")
    ] = None,
    tv: Annotated[float, typer.Option(min=0, help="Weight of the total variation of images (cosine).")] = 0.0,
    labels: Annotated[str, typer.Option(help="known, or inferred from the last layer.")] = "known",
    restarts: Annotated[
        int | None, typer.Option(min=1, help="Begin so often, from other noise; once if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder; runs/<name>-inverted if not given.")] = None,
    trust: TrustArg = False,
) -> None:
    """Rebuild a client's examples from what it sends in one round: what compression, privacy and secure sums are for."""
    if labels not in ("known", "inferred"):
        raise ConfigError(f"--labels {labels!r}: choose known, inferred")
    if method not in METHODS:
        raise ConfigError(f"--method {method!r}: choose {', '.join(METHODS)}")
    if out is not None:
        check_free(out)
    from fedfleet.commands import invert as inverting

    how = inverting.search(method, iterations, tv, restarts)
    asked: Any = inverting.Asked(client, round_, examples, labels, how)  # pyright: ignore[reportArgumentType] # looked at above
    folder = out or _new_folder(source.with_name(f"{source.stem}-inverted"))
    with interruptible(AGAIN):
        inverting.run(source, overrides, asked, folder, wide(), progress().say, trust=trust)
    typer.echo(f"{folder}: inversion.json, inversion.safetensors, inversion.png")


@app.command(name="list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, datasets, tasks, partitions, attacks, trackers, callbacks, …",
            autocompletion=completing.kinds,
        ),
    ] = "",
) -> None:
    """List what can be named in a configuration; `fedfleet show` has the options of each."""
    from fedfleet.commands import show_named

    kinds = [*show_named.kinds(), show_named.CORRECTION]
    if (result := show_named.called(what, kinds)) is None:
        raise ConfigError(f"list{f' {what!r}' if what else ''}: choose one of {', '.join(kinds)}")
    typer.echo(show_named.listed(result))


@app.command()
def configs() -> None:
    """List the configurations that come with the package; run one by its name."""
    from fedfleet.config.shipped import names

    every = [*names()]
    width = max(len(name) for name, _ in every)
    for name, about in every:
        typer.echo(f"{name:{width}}  {about}")


@app.command()
def schema(
    kind: Annotated[str, typer.Argument(help="config, or table: what `fedfleet paper` takes.")] = "config",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")] = None,
) -> None:
    """Print the JSON Schema of configurations, by which editors complete, explain and check them."""
    if kind not in ("config", "table"):
        raise ConfigError(f"schema {kind!r}: choose config or table")
    from fedfleet.commands import schema as schemas

    text = dumps(schemas.KINDS[kind](), indent=1, ensure_ascii=False)
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--out={str(out)!r}: it cannot be written ({e.strerror or e}): give another path") from None


for command in (convert.convert, data.trace, data.show, data.partition):
    app.command()(command)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or folders of runs.", autocompletion=completing.runs),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html; the first RUN if not given.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Say what it took to reach this, such as eval/accuracy=0.8.")
    ] = None,
    paper: PaperArg = False,
    width: WidthArg = None,
    tuned: TunedArg = None,
    as_json: JsonArg = False,
) -> None:
    """Write one report on one or several runs."""
    check_paper(paper, width, tuned)
    from fedfleet.config.resolve import parse_until
    from fedfleet.experiments import campaign
    from fedfleet.report import run_folders, write_report
    from fedfleet.report.study_page import write_study_report
    from fedfleet.report.study_tables import MARK, Target

    if studies := [run for run in runs if (run / MARK).exists()]:
        raise ConfigError(
            f"{studies[0]}: a study, which has a page of its own: for files of a paper give its command again with --paper, which "
            f"runs nothing that is finished"
        )
    try:
        wanted = None if target is None else Target(*parse_until(target, "--target"))
        if tuned is not None:
            from fedfleet.commands import publish

            publish.check(runs, tuned)
        varied = campaign.tables(runs[0], wanted) if len(runs) == 1 else None
        if varied is None:
            written = write_report(runs, out or runs[0], wanted)
        else:
            config = text_of(runs[0] / campaign.CAMPAIGN, YAML_BYTES)
            written = write_study_report(varied, out or runs[0], config, runs[0])
        if paper:
            from fedfleet.commands import publish

            if varied is None:
                publish.runs(runs, out or runs[0], width, tuned)
            else:
                publish.study(varied, out or runs[0], width, tuned)
        if as_json:
            print_json(_ended(written.parent, True, run_folders(runs)))
        else:
            typer.echo(written)
            if not paper:
                tell_of_paper(written.parent)
    except ValueError as e:
        raise ConfigError(str(e)) from None


def _ended(folder: Path, report: bool, runs: Iterable[Path]) -> dict[str, Any]:
    """Return what there is to say of runs in JSON: their folder, their report, and the summary of each."""
    from fedfleet.files.summary import summary_of

    page = folder / "report.html" if report else None
    return {"folder": folder, "report": page, "runs": [{"folder": run, "summary": summary_of(run)} for run in runs]}


def _new_folder(config: Path) -> Path:
    """Return runs/<name>, numbered where it is taken."""
    base = Path("runs") / config.stem
    number, folder = 1, base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def main() -> None:
    """Run the command line and end the process with its status: 2 for bad input, 1 for a failed run, 130 or 143 if interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a label may have letters that a terminal has not
    if strange := [text for text in sys.argv if "\0" in text]:  # as where it is called from Python
        _end(f"error: {strange[0]!r}: text with the character NUL, which no path has: leave it out", BAD_INPUT)
    try:
        status = app(standalone_mode=False)
        if status == INTERRUPTED:  # before there was anything to go on with; of which typer says nothing
            raise KeyboardInterrupt
        sys.exit(status)
    except ConfigError as e:
        _end(f"error: {e}", BAD_INPUT)
    except FedfleetError as e:
        _end(f"failed: {e}", FAILED)
    except Interrupted as e:
        _end(*e.args)
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except Exception as e:
        usage = getattr(
            e, "format_message", None
        )  # click's errors of usage, of which some versions of typer have a copy
        if usage is not None:
            commands = ", ".join(c.name or c.callback.__name__ for c in app.registered_commands if c.callback)
            _end(f"error: {' '.join(usage().split()) or f'give a command, one of {commands}'}", BAD_INPUT)
        from fedfleet.datasets.files import DataError  # here, for it imports PyTorch

        if not isinstance(e, DataError):
            raise
        _end(f"error: {e}", BAD_INPUT)


def _end(text: str, status: int) -> NoReturn:
    typer.echo(text, err=True)
    sys.exit(status)
