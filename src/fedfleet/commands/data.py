"""The commands about data: traces of devices, look at what clients hold, deal it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedfleet.commands import completing
from fedfleet.commands.arguments import ConfigArg, JsonArg, OverridesArg, TrustArg, loaded, there
from fedfleet.commands.terminal import apart, print_json, wide
from fedfleet.simulator.errors import ConfigError


def trace(
    source: Annotated[
        Path, typer.Argument(metavar="IN", callback=there, help="A pickle or JSON file in FedScale's layout.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New Parquet file.")],
) -> None:
    """Convert a trace of device behaviour in FedScale's layout to Parquet for availability=trace. Nothing is unpickled.

    Layout: {client: {active: LIST, inactive: LIST, finish_time: SECONDS}}, lists of seconds.
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
            help="data; compatibility; or a kind: algorithm, correction, task, dataset, attack, …; or a section: config, "
            "cohort, evaluation, executor, …",
            autocompletion=completing.shown,
        ),
    ] = "",
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
    bibtex: Annotated[
        bool, typer.Option("--bibtex", help="Print the papers of an algorithm, or of a correction, as BibTeX.")
    ] = False,
    as_json: JsonArg = False,
    trust: TrustArg = False,
) -> None:
    """Show who holds what, who is online, or what goes with what; or the options of a name, or of a section. Nothing is run."""
    if bibtex and (what.removesuffix("s") not in ("algorithm", "correction") or config is None or as_json):
        fix = "--json has the papers, too" if as_json else "give show algorithm NAME --bibtex, or show correction NAME"
        raise ConfigError(f"--bibtex: it is for the papers of one algorithm, or of one correction: {fix}")
    if not what:
        return _show_all(as_json)
    if what == "compatibility":
        return _show_compatibility(out, as_json)
    online = what == "availability" and config is not None and config.suffix in (".yaml", ".yml")
    if what != "data" and not online:
        if out is not None:
            raise ConfigError(
                f"--out={str(out)!r}: there is a picture of data and of availability alone, of a YAML file's"
            )
        return _show_named(what, config, overrides, bibtex=bibtex, as_json=as_json)
    if config is None:
        raise ConfigError("show data: give a configuration, such as configs/quickstart.yaml")
    if out is not None and out.suffix not in (".svg", ".png"):
        raise ConfigError(f"--out={str(out)!r}: give a name that ends in .svg or .png")
    chosen = loaded(config, overrides, trust=trust)
    if online:
        from fedfleet.commands import show_availability

        with apart(as_json):
            present = show_availability.look(chosen)
        drawn = None if out is None else show_availability.draw(present, out)
        if as_json:
            return print_json({**asdict(present), "picture": drawn})
        wide().print(show_availability.table(present))
        if drawn is not None:
            typer.echo(drawn)
        return None
    from fedfleet.commands import show_data

    with apart(as_json):
        seen = show_data.look(chosen)
    drawn = None if out is None else show_data.draw(seen, out)
    if as_json:
        return print_json({**asdict(seen), "picture": drawn})
    console = wide()
    for table in show_data.tables(seen, clients):
        console.print(table)
    if drawn is not None:
        typer.echo(drawn)
    return None


def _show_all(as_json: bool) -> None:
    from fedfleet.commands import show_named

    if as_json:
        return print_json(show_named.everything())
    return typer.echo(show_named.overview())


def _show_compatibility(out: Path | None, as_json: bool) -> None:
    from fedfleet.commands import show_compatibility

    if out is not None and out.suffix != ".md":
        raise ConfigError(f"--out={str(out)!r}: give a name that ends in .md")
    console = Console(stderr=True)
    with console.status("trying algorithms") as shown:
        result = show_compatibility.look(lambda name: shown.update(f"trying {name}"))
    if out is not None:
        out.write_text(show_compatibility.markdown(result), encoding="utf-8")
    if as_json:
        return print_json(asdict(result))
    if out is not None:
        return None
    console = wide(show_compatibility.PLAIN_WIDTH)
    for table in show_compatibility.tables(result):
        console.print(table)
    return None


def _show_named(kind: str, name: Path | None, more: list[str] | None, *, bibtex: bool, as_json: bool) -> None:
    from fedfleet.commands import show_named

    known = [*show_named.kinds(), show_named.CORRECTION, *(sections := show_named.sections())]
    if (result := show_named.called(kind, known)) is None:
        of = [k for k, kinds in show_named.kinds().items() if kind in kinds.registry]
        hint = f"did you mean show {of[0]} {kind}? " if of else ""
        raise ConfigError(f"show {kind!r}: {hint}choose data, compatibility, or one of {', '.join(known)}")
    kind, section = result, result in sections
    if more or (name is not None and section):
        one = kind.removesuffix("s")
        fix = (
            f"show {one} {name}" if section and one in show_named.kinds() else f"give {'no' if section else 'one'} name"
        )
        raise ConfigError(f"show {kind} {name}{' ' + more[0] if more else ''}: {fix}")
    if name is None and not section:
        if as_json:
            return print_json({"kind": kind, "names": show_named.named_of(kind)})
        return typer.echo(show_named.listed(kind))
    if bibtex:
        return typer.echo(show_named.bibtex(kind, str(name)))
    page = show_named.section_page(kind) if section else show_named.page(kind, str(name))
    if as_json:
        cited = [{**paper._asdict(), "bibtex": paper.bibtex} for paper in show_named.papers(kind, page.name)]
        return print_json({"kind": "section" if section else kind, **page.as_dict(), "papers": cited})
    return wide().print(page)


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
