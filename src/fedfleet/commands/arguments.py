"""Arguments that several commands take: a configuration, overrides, and files that have to be there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedfleet.files.documents import is_there
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.signals import put_off

TERMINATED = 143
PAPER = "paper"
"""Folder of the files for a paper, in that of the report."""


def there(path: Path) -> Path:
    """Refuse a file that is not there, before what would read it is imported, which takes seconds."""
    from fedfleet.config.shipped import locate

    if not is_there(path := locate(path)):
        raise ConfigError(f"{path}: there is no such file: give the path of one")
    return path


ConfigArg = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A YAML file, or a name that `fedfleet configs` lists, such as quickstart."),
]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as rounds=20.")
]
TrustArg = Annotated[
    bool, typer.Option("--trust", help="Call code that a run folder names also where you did not run it here yourself.")
]
PaperArg = Annotated[
    bool,
    typer.Option(
        "--paper", help="Write figures (PDF, SVG), tables (LaTeX, CSV), methods and BibTeX to the folder paper, too."
    ),
]
WidthArg = Annotated[
    float | None, typer.Option(min=1, max=20, help="Of the figures of --paper, in inches; 3.3, a column, if not given.")
]
TunedArg = Annotated[
    Path | None,
    typer.Option(metavar="SEARCH", help="Folder of the search that chose the rates, for the methods of --paper."),
]
JsonArg = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and everything else on stderr.")
]


def check_paper(paper: bool, width: float | None, tuned: Path | None) -> None:
    """Refuse options of ``--paper`` without it, and a search that is none, before any work. Raises ConfigError."""
    for name, value in (("--width", width), ("--tuned", tuned)):
        if value is not None and not paper:
            raise ConfigError(f"{name}={value}: it is for the files of --paper: add --paper, or leave it out")
    if tuned is not None:
        from fedfleet.commands.tuned import read

        read(tuned)


def tell_of_paper(out: Path) -> None:
    """Say that the files of a paper in a folder are older than the results that were just written beside them."""
    if (out / PAPER).is_dir():
        typer.echo(f"{out / PAPER}: written by an earlier command: add --paper to write it anew")


def check_seeds(seeds: int | None, overrides: list[str] | None) -> None:
    """Refuse ``--seeds`` beside an override of ``seeds``. Raises ConfigError."""
    for text in overrides or () if seeds is not None else ():
        if text.partition("=")[0].strip() == "seeds":
            raise ConfigError(f"--seeds={seeds}: {text} is given, too: leave one out")


def loaded(config: Path, overrides: list[str] | None, *, trust: bool = False) -> Any:
    """Load a configuration. What cannot be read at all is said before PyTorch is imported, which takes seconds."""
    from fedfleet.config.reading import override, read
    from fedfleet.config.shipped import locate

    read(locate(config))
    for text in overrides or []:
        override(text)
    with put_off(insist=True):  # an import of PyTorch that is torn apart leaves Python to end as if it had crashed
        from fedfleet.config.schema import load

    return load(config, overrides, trust=trust)
