"""Growth of memory over 3,000 rounds, of the driver and of each Ray actor: ``python -m benchmarks.memory``.

Every few rounds each process reports its unique set size. A straight line is fitted to each third of the rounds: what grows as
pools fill and libraries load shows in the first, what grows for good in all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from benchmarks import command, engine, world
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.memory_use import own_bytes
from benchmarks.results import slope
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.work import Message

PARTS = 3


def own(setup: Setup, shared: Message, task: int) -> tuple[int, int | None]:
    """Return the process and its memory; a job for an executor."""
    return os.getpid(), own_bytes()


def look(executor: Executor, actors: int) -> dict[str, int]:
    """Return the memory of the driver and of every actor; two jobs for each, so that each gets one."""
    found = dict(executor.map(own, Message(), range(2 * actors)))
    found[os.getpid()] = own_bytes()
    return {name(pid): memory for pid, memory in sorted(found.items()) if memory is not None}


def name(pid: int) -> str:
    """Say which process this is."""
    return "driver" if pid == os.getpid() else f"actor {pid}"


def watch(case_name: str, rounds: int, every: int, actors: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Run a case on Ray and yield (rounds done, memory by process) every few rounds."""
    ready = world.build(replace(CASES[case_name], clients=100, cohort=20))
    with closing(engine.executor("ray", actors)) as executor:
        for record in world.play(ready, executor, world.rule(ready), rounds):
            if (record.index + 1) % every == 0:
                yield record.index + 1, look(executor, actors)


def trends(samples: list[tuple[int, dict[str, int]]], rounds: int) -> list[dict[str, Any]]:
    """Return for every process and third of the rounds its memory at the start and the end, and the fitted growth."""
    found = []
    for process in samples[-1][1]:
        for part in range(PARTS):
            points = [
                (done, memory[process])
                for done, memory in samples
                if process in memory and part * rounds < PARTS * done <= (part + 1) * rounds
            ]
            done, memory = zip(*points, strict=True)
            found.append(
                {
                    "process": process,
                    "from_round": done[0],
                    "to_round": done[-1],
                    "first_bytes": memory[0],
                    "last_bytes": memory[-1],
                    "bytes_per_round": slope(done, memory),
                }
            )
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.memory", __doc__)
    ask.add_argument("--case", choices=list(CASES), default="logistic", help="a case, with 20 of 100 clients a round")
    ask.add_argument("--rounds", type=command.count, default=3000)
    ask.add_argument("--every", type=command.count, default=20, help="rounds between two looks (default 20)")
    ask.add_argument("--actors", type=command.count, default=2)
    ask.add_argument("--json", action="store_true", help="print one JSON object")
    args = ask.parse_args(argv)
    least = 2 * PARTS * args.every
    if args.rounds < least:
        ask.error(f"argument --rounds: {args.rounds} is too few to see a trend: take at least {least}")
    if own_bytes() is None:
        ask.error("this system does not tell the memory of a process: install psutil")
    samples = []
    for done, memory in watch(args.case, args.rounds, args.every, args.actors):
        samples.append((done, memory))
        if len(samples) % 10 == 0:
            say(f"round {done}: " + ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in memory.items()))
    found = trends(samples, args.rounds)
    if args.json:
        print(json.dumps({"case": args.case, "machine": command.machine(), "samples": samples, "trends": found}))
        return
    rows = [
        [
            t["process"],
            f"{t['from_round']} to {t['to_round']}",
            *(f"{t[k] / 1e6:.2f}" for k in ("first_bytes", "last_bytes")),
            t["bytes_per_round"],
        ]
        for t in found
    ]
    columns = ["process", "rounds", "first, MB", "last, MB", "growth, bytes a round"]
    command.show("Memory (unique set size)", columns, rows)


if __name__ == "__main__":
    main()
