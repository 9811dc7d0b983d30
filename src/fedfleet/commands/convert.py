"""The command that makes a folder of clients on disk of a table, or of another layout."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedfleet.commands.arguments import TERMINATED, there
from fedfleet.simulator.errors import ConfigError

LAYOUTS = "parquet, csv, leaf, tff, hf or image_folder"
NOTHING = "null"  # says that there are no labels


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", callback=there, help="A Parquet or CSV file, a folder of them, or another layout."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the clients.")],
    test: Annotated[Path | None, typer.Option(help="Test examples, in the same layout.")] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Without --test: share of clients held out for testing, 0.1 if not given."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Labels are below this; by default the largest + 1.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column that says the client, if not 'client'.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column of labels, if not 'y'; of texts null, where there are none."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN[,COLUMN]", help="In the place of labels: numbers to be foreseen."),
    ] = None,
    domain: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column that says the domain, if not 'domain'.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="In the place of features: texts, or lists of token numbers.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Of texts: bytes, characters, words (if not given), vocabulary:PATH or transformers:PATH."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Of texts: tokens at which one is cut off; without labels, tokens read at once."),
    ] = None,
    words: Annotated[
        int | None, typer.Option(min=2, help="Of texts: tokens at most of a vocabulary, 10,000 if not given.")
    ] = None,
    without: Annotated[
        str | None, typer.Option(metavar="COLUMN[,COLUMN]", help="Of a table: columns that are left out.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help=f"{LAYOUTS}; by the looks of IN if not given.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of another layout than a table, such as side=32.")
    ] = None,
) -> None:
    """Convert a table, a row an example, or another layout to a folder of clients for population.dataset=disk.

    Columns: client, y (labels from 0), and x (lists of numbers) or a column a feature; domain, if there are domains.
    """
    from fedfleet.config.reading import override
    from fedfleet.datasets.keep import keep
    from fedfleet.datasets.sources import SOURCES, source_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    started = time.monotonic()
    chosen = layout or source_of(source) or "parquet"
    more = dict(pair for text in option or [] for pair in override(text).items())
    if test is not None and hold_out is not None:
        raise ConfigError(
            f"--hold-out={hold_out}: there are test examples, --test={str(test)!r}: leave one of them out"
        )
    asked = {"hold_out": hold_out, "classes": classes, "client": client, "label": label, "domain": domain}
    asked |= {"text": text, "tokenizer": tokenizer, "length": length, "words": words}
    asked = {name: value for name, value in asked.items() if value is not None}
    if label == NOTHING:
        asked["label"] = None
    if without is not None:
        asked["without"] = tuple(without.split(","))
    if target is not None:
        asked["target"] = target.split(",") if "," in target else target
    if chosen in SOURCES and chosen != "torchvision":
        paths = {"path": str(source)} | ({} if test is None else {"test": str(test)})
        totals = keep(chosen, {**paths, **asked, **more}, out)
    elif chosen not in ("parquet", "csv"):
        raise ConfigError(f"--layout {chosen!r}: choose {LAYOUTS}")
    elif more:
        raise ConfigError(f"--option {next(iter(more))}: a table has none: leave it out")
    else:
        totals = _table(source, out, test, chosen, asked)
    typer.echo(
        f"{out}: {totals.clients:,} clients, {totals.examples:,} examples, {totals.test_examples:,} test examples "
        f"({totals.test_examples / max(1, totals.examples + totals.test_examples):.0%} of all), "
        f"{_kind(totals)}, {len(totals.domains)} domains, in "
        f"{time.monotonic() - started:.1f} s"
    )


def _kind(totals: Any) -> str:
    """Return what the examples are of."""
    tokens, classes = f"{totals.words:,} tokens", f"{totals.classes} classes" if totals.classes else "targets"
    return classes if not totals.words else tokens if totals.classes == totals.words else f"{tokens}, {classes}"


def _table(source: Path, out: Path, test: Path | None, layout: Any, asked: dict[str, Any]) -> Any:
    from fedfleet.datasets.convert import convert as convert_table
    from fedfleet.datasets.example_table import Columns
    from fedfleet.datasets.texts import Reading
    from fedfleet.datasets.user_data import check_aim

    check_aim(asked.get("label"), aim := asked.get("target"))
    called = {name: asked[name] for name in ("client", "label", "domain", "text", "without") if name in asked}
    called |= {} if aim is None else {"target": (aim,) if isinstance(aim, str) else tuple(aim)}
    how = {name: asked[name] for name in ("hold_out", "classes") if name in asked}
    with _rows_done() as tell:
        return convert_table(
            source,
            out,
            test=test,
            called=Columns(**called),
            how=Reading(*(asked.get(name) for name in Reading._fields)),
            layout=layout,
            tell=tell,
            say=lambda text: typer.echo(text, err=True),
            **how,
        )


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
