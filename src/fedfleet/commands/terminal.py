"""Terminal output of commands: progress, tables, and how to go on after an interruption."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedfleet.commands.arguments import TERMINATED
from fedfleet.simulator.signals import after_imports

INTERRUPTED = 130
AGAIN = "nothing was written; the same command begins again"
PLAIN_WIDTH = 140  # of tables that do not go to a terminal
BORDER, EDGES = 1, 3
"""Columns of a terminal that a table takes besides, and those that each of its columns does."""
PART = re.compile(r"([/.])(?=[^\W\d])")  # where the name of a column may be broken


class Interrupted(Exception):
    """A run was interrupted; the arguments are that it was, and how to go on, and the exit status."""


def wide(columns: int = PLAIN_WIDTH) -> Console:
    """Return a console for tables, of so many columns where standard output is no terminal and COLUMNS does not say."""
    told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=None if told else columns)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], whole: int = 0) -> Table:
    """Return a table of texts as they are, for ``wide``: lines are broken between words, if they fit so.

    Cells of the first columns, ``whole`` of them, are then not broken.
    """
    rows, result = list(rows), Table(show_lines=False)
    for column, width in zip(head, widths([head, *rows], whole) or [None] * len(head), strict=True):
        result.add_column(Text(column), overflow="fold", width=width)
    for row in rows:
        result.add_row(*map(Text, row))
    return result


def results(head: Sequence[str], rows: Sequence[Sequence[str]], whole: int = 0) -> RenderableType:
    """Return a table whose words and numbers are whole, however narrow the terminal.

    Where it does not fit, names of columns are broken at their dots; then what is the same in all rows is told below; and then each
    row is a list. Cells of the first columns, ``whole`` of them, are not broken.
    """
    short = [PART.sub("\\1\n", name) for name in head]
    for names in (head, short):
        if widths([names, *rows], whole) is not None:
            return table(names, rows, whole)
    columns = [*enumerate(zip(*rows, strict=True))]
    alike = [i for i, column in columns if i >= whole and len(rows) > 1 and len(set(column)) == 1]
    left = [i for i in range(len(head)) if i not in alike]
    some, few = [short[i] for i in left], [[row[i] for i in left] for row in rows]
    if left and widths([some, *few], whole) is not None:
        told = ", ".join(f"{head[i]} {rows[0][i]}" for i in alike)
        return Group(table(some, few, whole), Text(f"in all {len(rows)} rows: {told}"))
    width = max(map(cell_len, head))
    return Text(
        "\n\n".join("\n".join(f"{name:{width}}  {cell}" for name, cell in zip(head, row, strict=True)) for row in rows)
    )


def widths(rows: Sequence[Sequence[str]], whole: int = 0) -> list[int] | None:
    """Return the widths of a table's columns, edges not counted, in which words are whole; None where these do not fit."""
    columns = list(zip(*rows, strict=True))
    most = wide().width - BORDER - EDGES * len(columns)
    least = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    result = [max(cell_len(part) for cell in column for part in cell.split("\n")) for column in columns]
    least[:whole] = result[:whole]
    if sum(least) > most:
        return None
    while sum(result) > most:
        widest = max(range(len(columns)), key=lambda i: (result[i] > least[i], result[i]))
        result[widest] -= 1
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
