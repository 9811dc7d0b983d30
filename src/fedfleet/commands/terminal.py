"""Terminal output of commands: progress, tables, and how to go on after an interruption."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
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
    """A run was interrupted; the arguments are that it was, and how to go on, and the exit status."""


def wide() -> Console:
    """Return a console for tables."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts as they are."""
    result = Table(show_lines=False)
    for column in head:
        result.add_column(Text(column), overflow="fold")
    for row in rows:
        result.add_row(*map(Text, row))
    return result


def apart(as_json: bool) -> Any:
    """Return a context in which stdout is kept for one JSON object: what is said meanwhile goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object; NaN and infinities become null."""
    print(json.dumps(_plain(result), indent=2, ensure_ascii=False))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, paths as texts."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def progress() -> Any:
    """Return what shows how a run stands, on standard error; results go to standard output."""
    from fedfleet.experiments.progress import Progress

    return Progress()


@contextmanager
def interruptible(fix: str, folder: Path | None = None) -> Iterator[None]:
    """Let SIGTERM end what is under way as Ctrl-C does, and say how to go on: anew where nothing is in ``folder`` yet."""
    signal.signal(signal.SIGTERM, after_imports(lambda *_: sys.exit(TERMINATED)))
    try:
        yield
    except KeyboardInterrupt as e:
        raise Interrupted(_told(e, _mend(fix, folder)), INTERRUPTED) from None
    except SystemExit as e:  # raised by our handler of SIGTERM, or by Ray's, which replaces it
        raise Interrupted(_told(e, _mend(fix, folder)), TERMINATED) from None


def _told(e: BaseException, fix: str) -> str:
    """Return a line: how much was done, as the notes of the exception have it, of a run first; and how to go on."""
    done = ", in the next ".join(reversed(getattr(e, "__notes__", ())))
    return f"interrupted{done and f' {done}'}: {fix}"


def _mend(fix: str, folder: Path | None) -> str:
    begun = folder is None or (folder.is_dir() and any(folder.iterdir()))
    return fix if begun else AGAIN
