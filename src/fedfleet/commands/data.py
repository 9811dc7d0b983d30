"""The commands about data: convert them, deal them, look at them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedfleet.commands import completing
from fedfleet.commands.arguments import TERMINATED, ConfigArg, OverridesArg, loaded, there
from fedfleet.simulator.errors import ConfigError


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", callback=there, help="A Parquet file or a folder of them, or another layout."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the clients.")],
    test: Annotated[Path | None, typer.Option(help="Test examples, in the same layout.")] = None,
    hold_out: Annotated[
        float, typer.Option(min=0, max=1, help="Without --test: share of clients held out for testing.")
    ] = 0.1,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Labels are below this; by default the largest + 1.")
    ] = None,
    domain: Annotated[str, typer.Option(metavar="COLUMN", help="The column that says the domain.")] = "domain",
    layout: Annotated[
        str | None, typer.Option(help="parquet, leaf, tff, hf or image_folder; by the looks of IN if not given.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of another layout than Parquet, such as side=32.")
    ] = None,
) -> None:
    """Convert Parquet, a row an example, or another layout to a folder of clients for population.dataset=disk.

    Columns: client, y (labels from 0), and x (lists of numbers) or a column a feature; domain, if there are domains.
    """
    from fedfleet.config.reading import override
    from fedfleet.datasets.convert import convert as convert_parquet
    from fedfleet.datasets.keep import keep
    from fedfleet.datasets.sources import SOURCES, source_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    started = time.monotonic()
    chosen = layout or source_of(source) or "parquet"
    asked = dict(pair for text in option or [] for pair in override(text).items())
    if chosen in SOURCES and chosen != "torchvision":
        given = {
            "path": str(source),
            "test": test if test is None else str(test),
            "classes": classes,
            "hold_out": hold_out,
        }
        takes = SOURCES[chosen].options.model_fields
        given |= {"domain": domain} if domain != "domain" else {}
        totals = keep(chosen, {k: v for k, v in given.items() if k in takes and v is not None} | asked, out)
    elif chosen != "parquet":
        raise ConfigError(f"--layout {chosen!r}: choose parquet, leaf, tff, hf or image_folder")
    elif asked:
        raise ConfigError(f"--option {next(iter(asked))}: Parquet has none: leave it out")
    else:
        with _rows_done() as tell:
            given = {"test": test, "hold_out": hold_out, "classes": classes, "domain": domain}
            totals = convert_parquet(source, out, **given, tell=tell, say=lambda text: typer.echo(text, err=True))
    typer.echo(
        f"{out}: {totals.clients:,} clients, {totals.examples:,} examples, {totals.test_examples:,} test examples, "
        f"{totals.classes} classes, {len(totals.domains)} domains, in {time.monotonic() - started:.1f} s"
    )


def trace(
    source: Annotated[
        Path, typer.Argument(metavar="IN", callback=there, help="A pickle or JSON file in FedScale's layout.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New Parquet file.")],
) -> None:
    """Convert a trace of device behaviour in FedScale's layout to Parquet for availability=trace. Nothing is unpickled.

    Layout: {client: {active: [seconds, ...], inactive: [seconds, ...], finish_time: seconds}}.
    """
    from fedfleet.datasets.fedscale import convert_trace

    done = convert_trace(source, out)
    typer.echo(
        f"{out}: {done.clients:,} clients, {done.intervals:,} intervals; left out: {done.empty_intervals:,} intervals without a "
        f"length, {done.idle_clients:,} clients that are never active"
    )


def show(
    what: Annotated[
        str,
        typer.Argument(
            help="data; or a kind: algorithm, task, dataset, partition, availability, attack, tracker, …; or a section: config, "
            "cohort, evaluation, executor, …",
            autocompletion=completing.shown,
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG|NAME]",
            help="A YAML file for data; else a name, or none for all of them.",
            autocompletion=completing.named,
        ),
    ] = None,
    overrides: OverridesArg = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, too, as FILE.svg or FILE.png.")] = None,
    clients: Annotated[int, typer.Option(min=0, help="Clients that have a row of their own.")] = 20,
) -> None:
    """Show who holds what: sizes, labels by client, domains; or the options of a name, or of a section. Nothing is run."""
    if what != "data":
        return _show_named(what, config, overrides)
    if config is None:
        raise ConfigError("show data: give a configuration, such as configs/quickstart.yaml")
    if out is not None and out.suffix not in (".svg", ".png"):
        raise ConfigError(f"--out={str(out)!r}: give a name that ends in .svg or .png")
    chosen = loaded(config, overrides)
    from fedfleet.commands import show_data

    seen = show_data.look(chosen)
    console = Console(width=None if sys.stdout.isatty() else show_data.PLAIN_WIDTH)
    for table in show_data.tables(seen, clients):
        console.print(table)
    if out is not None:
        typer.echo(show_data.draw(seen, out))


def _show_named(kind: str, name: Path | None, more: list[str] | None) -> None:
    from fedfleet.commands import show_named

    known = [*show_named.nameable(), *(sections := show_named.sections())]
    if (found := show_named.called(kind, known)) is None:
        raise ConfigError(f"show {kind!r}: choose data, or one of {', '.join(known)}")
    kind, section = found, found in sections
    if more or (name is not None and section):
        raise ConfigError(f"show {kind} {name}{' ' + more[0] if more else ''}: give {'no' if section else 'one'} name")
    if name is None and not section:
        typer.echo(show_named.listed(kind))
        return
    console = Console(width=None if sys.stdout.isatty() else show_named.PLAIN_WIDTH)
    console.print(show_named.section_page(kind) if section else show_named.page(kind, str(name)))


def partition(
    config: ConfigArg,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New Parquet file, a row an example: client, index.")],
    overrides: OverridesArg = None,
) -> None:
    """Write the partition of a configuration, for population.partition={kind: file, path: OUT} here or elsewhere."""
    if out.exists():
        raise ConfigError(f"{out}: exists: choose another name, or remove it first")
    chosen = loaded(config, overrides)
    from fedfleet.commands.show_data import write_partition

    typer.echo(write_partition(chosen, out))


@contextmanager
def _rows_done() -> Iterator[Callable[[int, int], None]]:
    """Show how many rows are done: a bar on a terminal, a line every few seconds elsewhere."""
    from rich.progress import Progress as Bar

    from fedfleet.experiments.progress import PLAIN_EVERY_S

    console, shown = Console(stderr=True), time.monotonic()
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=None)

        def tell(done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - shown > PLAIN_EVERY_S:
                shown = time.monotonic()
                console.print(f"{done:,} of {total:,} rows")

        yield tell
