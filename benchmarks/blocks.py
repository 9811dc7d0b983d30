"""Time of each way to run a block: ``python -m benchmarks.blocks --case mlp``.

One process runs a block of each phase of a case in turns: one client at a time, batched, factored, and replayed
(docs/explanation/capture.md) as the rule chooses. Ratios are taken within a turn. Each comes with its median and the
range that 80 % of them lie in. ``--operations`` lists what the replayed block's operations take, each timed by itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import command, world
from benchmarks.command import say
from benchmarks.peers.workload import Case
from fedfleet.simulator.block.block import Setup, run_block
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.work import Message

WAYS = ("serial", "batched", "factored")
ROUNDS = 4
"""Rounds that are run; blocks are of the last one, since the first is not like the others in CDMA."""
LISTED = 8  # operations that are shown by name
LEARNING = 4
"""Times that a block is run before the turns, which is enough to capture it and to check that."""


class Operations(TorchDispatchMode):
    """Count the tensor operations that are done under it, and time them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seen(self) -> int:
        """The number of them."""
        return self.calls.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and do it."""
        name, started = func._schema.name.removeprefix("aten::"), time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.calls[name] += 1
        self.seconds[name] += time.perf_counter() - started
        return result


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

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Any) -> Iterator[Any]:
        """Run the tasks, and keep the first."""
        tasks = list(tasks)
        assert self._setup is not None
        self.seen[tasks[0].phase] = Seen(self._setup, shared, tasks[0])
        return super().map(job, shared, tasks, **how)


def measure(case: Case, turns: int, compiles: bool = False) -> list[dict[str, Any]]:
    """Return a row for each phase of a case."""
    ready = world.build(case)
    how = world.rule(ready)
    with closing(Watching()) as executor:
        for _ in world.play(ready, executor, how, ROUNDS, capture=False):
            pass
        return [
            {"case": case.name, "phase": phase, "inner": how.inner, **_compare(seen, how.inner, turns, compiles)}
            for phase, seen in executor.seen.items()
        ]


def _compare(seen: Seen, inner: str, turns: int, compiles: bool) -> dict[str, Any]:
    setups = {way: replace(seen.setup, inner=way, captures=Captures(after=None)) for way in WAYS}
    with Operations() as operations:
        run_block(setups[inner], seen.shared, seen.task)
    for setup in setups.values():
        run_block(setup, seen.shared, seen.task)
    replayed = replace(seen.setup, inner=inner, captures=Captures(after=1))
    learning = [milliseconds(replayed, seen) for _ in range(LEARNING)]
    if replayed.captures.ready:
        setups["replayed"] = replayed
    compile_s = None
    if compiles and "replayed" in setups:
        made = replace(seen.setup, inner=inner, captures=Captures(after=1, compiles=True))
        compile_s = sum(milliseconds(made, seen) for _ in range(LEARNING)) / 1000
        setups["compiled"] = made
    times = [{way: milliseconds(setup, seen) for way, setup in setups.items()} for _ in range(turns)]
    return {
        "clients": len(seen.task.clients),
        "operations": operations.seen,
        "by_operation": _by_operation(setups.get("replayed", setups[inner]), seen, turns),
        "capture_blocks": sum(learning) / median(t[inner] for t in times) - LEARNING,
        "ms": {way: median(t[way] for t in times) for way in setups},
        "over_serial": {way: spread([t["serial"] / t[way] for t in times]) for way in setups if way != "serial"},
        "replay_gains": spread([t[inner] / t["replayed"] for t in times]) if "replayed" in setups else None,
        "compile_s": compile_s,
        "compile_gains": spread([t["replayed"] / t["compiled"] for t in times]) if compile_s else None,
    }


def _by_operation(setup: Setup, seen: Seen, turns: int) -> list[dict[str, Any]]:
    """Return what torch's operations in a block are and take, those first that take longest."""
    each = []
    for _ in range(turns):
        with Operations() as operations:
            run_block(setup, seen.shared, seen.task)
        each.append(operations)
    found = [
        {"operation": name, "calls": calls, "ms": 1000 * median(of.seconds[name] for of in each)}
        for name, calls in each[-1].calls.items()
    ]
    return sorted(found, key=lambda row: -row["ms"])


def spread(ratios: list[float]) -> dict[str, float]:
    """Return the median of ratios, and what 80 % of them lie between."""
    ratios, cut = sorted(ratios), len(ratios) // 10
    return {"median": median(ratios), "least": ratios[cut], "most": ratios[-1 - cut]}


def milliseconds(setup: Setup, seen: Seen) -> float:
    """Return what a block takes."""
    started = time.perf_counter()
    run_block(setup, seen.shared, seen.task)
    return 1000 * (time.perf_counter() - started)


def row(found: dict[str, Any], compiled: bool = False) -> list[object]:
    """Return a row of the table."""
    known = [found[k] for k in ("case", "phase", "clients", "operations")]
    ways = [_cell(found, way) for way in (*WAYS, "replayed")]
    gains = found["replay_gains"]
    gained = "-" if gains is None else told(gains)
    cells = [*known, *ways, gained, round(found["capture_blocks"])]
    if compiled:
        gains = found["compile_gains"]
        cells += [_cell(found, "compiled"), "-" if gains is None else told(gains), found["compile_s"] or "-"]
    return cells


def told(found: dict[str, float]) -> str:
    """Return a median and its spread in words."""
    return f"{found['median']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


def _cell(found: dict[str, Any], way: str) -> str:
    if way not in found["ms"]:
        return "not captured"
    times = f" ({found['over_serial'][way]['median']:.2f}x)" if way in found["over_serial"] else ""
    return f"{found['ms'][way]:.3g}{times}" + "*" * (way == found["inner"])


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.blocks", __doc__)
    command.add_case(ask)
    ask.add_argument("--turns", type=command.count, default=21, help="of each block (default %(default)d)")
    ask.add_argument("--compiled", action="store_true", help="compile blocks, too: half a minute each")
    ask.add_argument("--operations", action="store_true", help="also show which of torch's operations take the time")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args: argparse.Namespace = ask.parse_args(argv)
    torch.set_num_threads(1)
    found = []
    for case in command.cases(args.case):
        say(f"{case.name}: {args.turns} turns")
        found += measure(case, args.turns, args.compiled)
    if args.json:
        print(json.dumps({"machine": command.machine(), "blocks": found}))
        return
    columns = [
        "case",
        "phase",
        "clients",
        "operations",
        *(f"{way}, ms" for way in (*WAYS, "replayed")),
        "replayed over *",
        "capture costs, blocks",
        *(("compiled, ms", "compiled over replayed", "compiling, s") if args.compiled else ()),
    ]
    title = "One block in one process (times as fast as serial; * as the rule chooses)"
    command.show(title, columns, [row(r, args.compiled) for r in found])
    if args.operations:
        for r in found:
            most, rest = r["by_operation"][:LISTED], r["by_operation"][LISTED:]
            few = {"operation": f"{len(rest)} others", **{k: sum(o[k] for o in rest) for k in ("calls", "ms")}}
            rows = [[o[k] for k in ("operation", "calls", "ms")] for o in [*most, few]]
            command.show(f"Operations: {r['case']}, {r['phase']}", ["operation", "calls", "ms"], rows)


if __name__ == "__main__":
    main()
