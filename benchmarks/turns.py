"""Ways to run a case, a round of each in turn, so that all are timed under the same load; ratios are taken within a turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

import torch

from benchmarks import command
from benchmarks.blocks import spread
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.peers.workload import Case


def taken(
    ways: Mapping[str, Iterator[float]], case: Case, turns: int, beside: str, of: Iterable[str]
) -> dict[str, Any]:
    """Return milliseconds a round of each way, medians, and of some over that of the one ``beside``.

    ``ways`` yield the seconds of their rounds; those of the case's warm-up do not count.
    """
    every = [{name: 1000 * next(rounds) for name, rounds in ways.items()} for _ in range(case.warmup + turns)]
    timed = every[case.warmup :]
    return {
        "ms": {name: median(t[name] for t in timed) for name in ways},
        "over": {name: spread([t[name] / t[beside] for t in timed]) for name in of},
    }


def processor(ways: Mapping[str, Callable[[], object]], turns: int) -> list[dict[str, float]]:
    """Return for each turn the milliseconds of processor time of each way, after one that does not count."""
    times: list[dict[str, float]] = []
    for _ in range(1 + turns):
        times.append({})
        for name, way in ways.items():
            started = time.thread_time()
            way()
            times[-1][name] = 1000 * (time.thread_time() - started)
    return times[1:]


def times(over: Mapping[str, float] | None) -> str:
    """Return a ratio with its range as text, nothing where there is none."""
    return f", {over['median']:.2f} times ({over['least']:.2f} to {over['most']:.2f})" if over else ""


def main(
    name: str,
    doc: str | None,
    turns: int,
    argv: list[str] | None,
    measure: Callable[[Case, int], dict[str, Any]],
    show: Callable[[str, dict[str, Any]], Iterable[str]],
) -> None:
    """Run a command that measures a case in turns, so many if nothing is said, and shows lines of what was found."""
    ask = command.parser(name, doc)
    ask.add_argument("--case", choices=CASES, default="mlp", help="(default %(default)s)")
    ask.add_argument("--turns", type=command.count, default=turns, help="of each (default %(default)d)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    say(f"{args.case}: {args.turns} turns")
    found = measure(CASES[args.case], args.turns)
    if args.json:
        print(json.dumps({"machine": command.machine(), **found}))
        return
    for line in show(args.case, found):
        print(line)
