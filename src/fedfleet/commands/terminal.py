"""What commands say on the terminal: progress, tables, and how to go on after an interruption."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedfleet.commands.arguments import TERMINATED
from fedfleet.simulator.signals import after_imports

INTERRUPTED = 130
AGAIN = "nothing was written; the same command begins again"
PLAIN_WIDTH = 140  # of tables that do not go to a terminal


class Interrupted(Exception):
    """A run was interrupted; the arguments are how to go on, and the exit status."""


def wide() -> Console:
    """Return a console for tables."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts as they are."""
    found = Table(show_lines=False)
    for column in head:
        found.add_column(Text(column), overflow="fold")
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def progress(*, stderr: bool = False) -> Any:
    """Return what shows how a run stands."""
    from fedfleet.experiments.progress import Progress

    return Progress(Console(stderr=stderr))


@contextmanager
def interruptible(mend: str, folder: Path | None = None) -> Iterator[None]:
    """Let SIGTERM end what is under way as Ctrl-C does, and say how to go on: anew where nothing is in ``folder`` yet."""
    signal.signal(signal.SIGTERM, after_imports(lambda *_: sys.exit(TERMINATED)))
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(_mend(mend, folder), INTERRUPTED) from None
    except SystemExit:  # raised by our handler of SIGTERM, or by Ray's, which replaces it
        raise Interrupted(_mend(mend, folder), TERMINATED) from None


def _mend(mend: str, folder: Path | None) -> str:
    begun = folder is None or (folder.is_dir() and any(folder.iterdir()))
    return mend if begun else AGAIN
