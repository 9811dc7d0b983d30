"""Shared parts of all commands: one-line errors, progress on standard error, results on standard output."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, USUAL
from benchmarks.peers.workload import Case

INNERS = ("auto", "serial", "batched", "factored")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser(module: str, about: str | None) -> Parser:
    """Return a parser for ``python -m module``, described by the first line of ``about``."""
    return Parser(prog=f"python -m {module}", description=(about or "").partition("\n")[0], allow_abbrev=False)


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def writable(text: str) -> Path:
    """Read the path of a file to write; its folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder")
    return path


def add_case(to: argparse.ArgumentParser, names: Sequence[str] = tuple(CASES)) -> None:
    """Add ``--case``; several may be given."""
    to.add_argument(
        "--case",
        action="append",
        choices=list(names),
        help="one case, or several by repeating; default: all but those by cohort",
    )


def add_rounds(to: argparse.ArgumentParser) -> None:
    """Add ``--rounds``, ``--warmup`` and ``--json``."""
    to.add_argument("--rounds", type=count, help="timed rounds; some seconds of them if not given")
    to.add_argument("--warmup", type=count, help="rounds before them; about a third as many if not given")
    to.add_argument("--json", action="store_true", help="print JSON: an object, or a list of them for several cases")


def add_workers(to: argparse.ArgumentParser) -> None:
    """Add where the work runs."""
    to.add_argument("--executor", choices=["ray", "local"], default="ray")
    to.add_argument("--actors", type=count, default=2, help="Ray actors (default 2)")
    to.add_argument("--threads", type=count, default=1, help="torch threads a worker (default 1)")


def add_engine(to: argparse.ArgumentParser) -> None:
    """Add what decides how the engine runs."""
    add_workers(to)
    to.add_argument("--inner", choices=INNERS, default="auto", help="auto: the product's own choice")
    to.add_argument("--block-size", type=count, help="clients a block; default: the product's own choice")


def cases(
    names: Sequence[str] | None,
    among: Sequence[str] = USUAL,
    rounds: int | None = None,
    warmup: int | None = None,
) -> list[Case]:
    """Return the cases asked for, with so many rounds."""
    chosen = [CASES[name] for name in names or among]
    return [replace(c, rounds=rounds or c.rounds, warmup=c.warmup if warmup is None else warmup) for c in chosen]


def say(text: str) -> None:
    """Show progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*(number(cell) if isinstance(cell, int | float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def number(value: float) -> str:
    """Write a number with three or more significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def write(path: Path, result: Any) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.platform(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        **{package: installed(package) for package in ("fedfleet", "torch", "ray", "numpy")},
    }


def installed(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
