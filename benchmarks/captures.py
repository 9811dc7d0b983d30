"""What capturing a block gains: ``python -m benchmarks.captures --case mlp``.

Blocks of each phase of a case are run in one process in the ordinary way and replayed, in turns. Ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from benchmarks import command, world
from benchmarks.command import say
from benchmarks.peers.workload import Case
from fedfleet.simulator.block import Setup, run_block
from fedfleet.simulator.capture import Captures
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.work import Message

ROUNDS = 4
"""Rounds that are run; blocks are of the last one, since the first is not like the others in CDMA."""
LEARNING = 4
"""Times that a block is run before the turns, which is enough to capture it and to check that."""


class Seen(NamedTuple):
    """A block that came by, and what it was run with."""

    setup: Setup
    shared: Message
    task: Any


class Watching(LocalExecutor):
    """An executor that keeps the first block of each phase's last round."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Seen] = {}

    def map(
        self,
        job: Job,
        shared: Message,
        tasks: Iterable[Any],
        *,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Run the tasks, and keep the first."""
        tasks = list(tasks)
        assert self._setup is not None
        self.seen[tasks[0].phase] = Seen(self._setup, shared, tasks[0])
        return super().map(job, shared, tasks, background=background, timeout_s=timeout_s)


def measure(case: Case, turns: int) -> list[dict[str, Any]]:
    """Return a row for each phase of a case."""
    ready = world.build(case)
    how = world.rule(ready)
    with closing(Watching()) as executor:
        for _ in world.play(ready, executor, how, ROUNDS, capture=False):
            pass
        return [{"case": case.name, "phase": phase, **_compare(seen, turns)} for phase, seen in executor.seen.items()]


def _compare(seen: Seen, turns: int) -> dict[str, Any]:
    ordinary, replayed = (replace(seen.setup, captures=Captures(after=after)) for after in (None, 1))
    for _ in range(LEARNING):
        run_block(replayed, seen.shared, seen.task)
    if not replayed.captures.ready:
        alone = [_milliseconds(ordinary, seen) for _ in range(turns)]
        return {"clients": len(seen.task.clients), "ordinary_ms": median(alone), "replayed_ms": None}
    times = [[_milliseconds(setup, seen) for setup in (ordinary, replayed)] for _ in range(turns)]
    ratios = sorted(a / b for a, b in times)
    return {
        "clients": len(seen.task.clients),
        "ordinary_ms": median(a for a, _ in times),
        "replayed_ms": median(b for _, b in times),
        "ratio": median(ratios),
        "least": ratios[len(ratios) // 10],
        "most": ratios[-1 - len(ratios) // 10],
    }


def _milliseconds(setup: Setup, seen: Seen) -> float:
    started = time.perf_counter()
    run_block(setup, seen.shared, seen.task)
    return 1000 * (time.perf_counter() - started)


def row(found: dict[str, Any]) -> list[object]:
    """Return a row of the table."""
    known = [found[k] for k in ("case", "phase", "clients", "ordinary_ms")]
    if found["replayed_ms"] is None:
        return [*known, "not captured", "-"]
    return [*known, found["replayed_ms"], f"{found['ratio']:.2f} ({found['least']:.2f} to {found['most']:.2f})"]


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.captures", __doc__)
    command.add_case(ask)
    ask.add_argument("--turns", type=command.count, default=35, help="of each block (default %(default)d)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args: argparse.Namespace = ask.parse_args(argv)
    found = []
    for case in command.cases(args.case):
        say(f"{case.name}: {args.turns} turns")
        found += measure(case, args.turns)
    if args.json:
        print(json.dumps({"machine": command.machine(), "blocks": found}))
        return
    columns = ["case", "phase", "clients", "ordinary, ms", "replayed, ms", "times as fast (80 % of the turns)"]
    command.show("Captured blocks, in one process", columns, [row(r) for r in found])


if __name__ == "__main__":
    main()
