"""The commands about data: traces of devices, look at what clients hold, deal it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedfleet.commands import completing
from fedfleet.commands.arguments import ConfigArg, OverridesArg, TrustArg, loaded, there
from fedfleet.simulator.errors import ConfigError


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
            help="data; compatibility; or a kind: algorithm, task, dataset, partition, attack, …; or a section: config, "
            "cohort, evaluation, executor, …",
            autocompletion=completing.shown,
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG|NAME]",
            help="A YAML file for data, and for who is online under its availability; else a name, or none for all of them.",
            autocompletion=completing.named,
        ),
    ] = None,
    overrides: OverridesArg = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, too, as FILE.svg or FILE.png.")] = None,
    clients: Annotated[int, typer.Option(min=0, help="Clients that have a row of their own.")] = 20,
    trust: TrustArg = False,
) -> None:
    """Show who holds what, who is online, or what goes with what; or the options of a name, or of a section. Nothing is run."""
    if what == "compatibility":
        return _show_compatibility(out)
    online = what == "availability" and config is not None and config.suffix in (".yaml", ".yml")
    if what != "data" and not online:
        if out is not None:
            raise ConfigError(
                f"--out={str(out)!r}: there is a picture of data and of availability alone, of a YAML file's"
            )
        return _show_named(what, config, overrides)
    if config is None:
        raise ConfigError("show data: give a configuration, such as configs/quickstart.yaml")
    if out is not None and out.suffix not in (".svg", ".png"):
        raise ConfigError(f"--out={str(out)!r}: give a name that ends in .svg or .png")
    chosen = loaded(config, overrides, trust=trust)
    if online:
        from fedfleet.commands import show_availability

        present = show_availability.look(chosen)
        Console(width=None if sys.stdout.isatty() else show_availability.PLAIN_WIDTH).print(
            show_availability.table(present)
        )
        if out is not None:
            typer.echo(show_availability.draw(present, out))
        return None
    from fedfleet.commands import show_data

    seen = show_data.look(chosen)
    console = Console(width=None if sys.stdout.isatty() else show_data.PLAIN_WIDTH)
    for table in show_data.tables(seen, clients):
        console.print(table)
    if out is not None:
        typer.echo(show_data.draw(seen, out))


def _show_compatibility(out: Path | None) -> None:
    from fedfleet.commands import show_compatibility

    if out is not None and out.suffix != ".md":
        raise ConfigError(f"--out={str(out)!r}: give a name that ends in .md")
    console = Console(stderr=True)
    with console.status("trying algorithms") as shown:
        found = show_compatibility.look(lambda name: shown.update(f"trying {name}"))
    if out is not None:
        out.write_text(show_compatibility.markdown(found), encoding="utf-8")
        return
    console = Console(width=None if sys.stdout.isatty() else show_compatibility.PLAIN_WIDTH)
    for table in show_compatibility.tables(found):
        console.print(table)


def _show_named(kind: str, name: Path | None, more: list[str] | None) -> None:
    from fedfleet.commands import show_named

    known = [*show_named.kinds(), *(sections := show_named.sections())]
    if (found := show_named.called(kind, known)) is None:
        of = [k for k, kinds in show_named.kinds().items() if kind in kinds.registry]
        hint = f"did you mean show {of[0]} {kind}? " if of else ""
        raise ConfigError(f"show {kind!r}: {hint}choose data, or one of {', '.join(known)}")
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
    trust: TrustArg = False,
) -> None:
    """Write the partition of a configuration, for population.partition={kind: file, path: OUT} here or elsewhere."""
    if out.exists():
        raise ConfigError(f"{out}: exists: choose another name, or remove it first")
    chosen = loaded(config, overrides, trust=trust)
    from fedfleet.commands.show_data import write_partition

    typer.echo(write_partition(chosen, out))
