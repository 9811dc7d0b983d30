"""Growth of time and memory: ``python -m benchmarks.scaling population | cohort | actors``.

- population: 1e3 to 1e10 clients, of which 100 are invited.
- cohort: 1e2 to 1e5 invited clients, of a million.
- actors: a case with 1, 2, ... actors.

The first two train a logistic regression on 32 features of synthetic clients of 10 examples. Workers draw these as
they need them, so a round's time contains the drawing. Sizes take turns, each in a process of its own, and the table
has medians over the turns. With ``--together`` populations share a process, and take turns round by round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import command, engine, world
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.memory_use import Peak, own_bytes
from benchmarks.peers.workload import Case
from benchmarks.results import exponent
from benchmarks.world import How
from fedfleet.datasets import synthetic
from fedfleet.simulator.population import Population

SMALL = Case("synthetic", "logistic", (32,), clients=1_000_000, cohort=100, samples=10)
POPULATIONS = (10**3, 10**6, 10**9, 10**10)
COHORTS = (10**2, 10**3, 10**4, 10**5)


def generated(case: Case) -> Population:
    """Return clients whose data are a function of the seed and their number; any number of them costs the same."""
    law = synthetic.SyntheticOptions(features=case.shape[0], examples=case.samples, test_examples=1)
    return synthetic.load(law, case.clients, case.seed).population


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case once; return seconds a round and to start, and the driver's memory."""
    began = time.perf_counter()
    with Peak() as peak:
        clients = generated(case) if case.name == SMALL.name else None
        ready = world.build(case, clients)
        how = engine.choose(ready, args.inner, args.block_size)
        with closing(engine.executor(args.executor, args.actors, args.threads)) as executor:
            records = world.play(ready, executor, how, args.warmup + args.rounds)
            seconds = [next(records).seconds]
            start_s = time.perf_counter() - began - seconds[0]
            seconds += [r.seconds for r in records]
            after = own_bytes()
    found = measured(case, args, how, seconds[args.warmup :])
    return found | {"start_s": start_s, "driver_bytes": after, "driver_peak_bytes": peak.bytes}


def measured(case: Case, args: argparse.Namespace, how: How, seconds: Sequence[float]) -> dict[str, Any]:
    """Return what was run, and what a typical round of it took."""
    typical = median(seconds)
    return {
        "clients": case.clients,
        "cohort": case.cohort,
        "actors": args.actors if args.executor == "ray" else 0,
        "executor": engine.describe(args, how),
        "seconds_per_round": typical,
        "client_updates_per_s": case.cohort / typical,
    }


def alone(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own, so that memory and start-up are its own."""
    where = f"{args.actors} Ray actor(s)" if args.executor == "ray" else "one process"
    say(f"{case.name}: {case.clients:,} clients, cohort {case.cohort:,}, {where}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, case, args).result()


def by_turns(cases: Sequence[Case], sizes: Sequence[argparse.Namespace]) -> list[dict[str, Any]]:
    """Run each case with its arguments, in turns; return medians. ``ratio`` is to a round of the first, within a turn."""
    runs = []
    for _ in range(sizes[0].repeats):
        turn = [alone(case, args) for case, args in zip(cases, sizes, strict=True)]
        runs.append([r | {"ratio": r["seconds_per_round"] / turn[0]["seconds_per_round"]} for r in turn])
    return [{k: _typical([r[k] for r in same]) for k in same[0]} for same in zip(*runs, strict=True)]


def together(cases: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases in one process, with workers of their own that wait while others run: a round of each, then the next.

    ``ratio`` is the median of ratios to the round of the first in the same turn. Memory and start-up belong to all of them.
    """
    with ExitStack() as stack:
        running, hows = [], []
        for case in cases:
            say(f"{case.name}: {case.clients:,} clients, cohort {case.cohort:,}, beside the others")
            ready = world.build(case, generated(case))
            hows.append(engine.choose(ready, args.inner, args.block_size))
            executor = engine.executor(args.executor, args.actors, args.threads, args.actors * len(cases))
            stack.enter_context(closing(executor))
            running.append(world.play(ready, executor, hows[-1], args.warmup + args.rounds))
        turns = [[r.seconds for r in turn] for turn in zip(*running, strict=True)][args.warmup :]
    seconds = list(zip(*turns, strict=True))
    return [
        measured(case, args, how, mine) | {"ratio": median(a / b for a, b in zip(mine, seconds[0], strict=True))}
        for case, how, mine in zip(cases, hows, seconds, strict=True)
    ]


def _typical(values: list[Any]) -> Any:
    """Return the median of numbers that differ; what a run was told is the same in all."""
    return values[0] if len(set(values)) == 1 else median(values)


def population(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure growing populations; ``ratio`` is the time of a round over that of the first."""
    sizes = args.sizes or POPULATIONS
    cases = [replace(SMALL, clients=n, cohort=min(100, n)) for n in sizes]
    return together(cases, args) if args.together else by_turns(cases, [args] * len(sizes))


def cohort(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure growing cohorts; ``exponent`` is p where the time of a round grows like cohort^p up to that cohort."""
    sizes = args.sizes or COHORTS
    found = by_turns([replace(SMALL, cohort=n, clients=max(SMALL.clients, n)) for n in sizes], [args] * len(sizes))
    times = [r["seconds_per_round"] for r in found]
    return [r | {"exponent": exponent(sizes[: i + 1], times[: i + 1]) if i else "-"} for i, r in enumerate(found)]


def actors(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a case with more and more actors; ``speedup`` is the rate over that with the first number of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    case = command.cases(args.case, ["logistic"])[0]
    sizes = args.sizes or range(1, cores + 1)
    each = [argparse.Namespace(**{**vars(args), "actors": n, "executor": "ray"}) for n in sizes]
    return [r | {"speedup": 1 / r["ratio"]} for r in by_turns([case] * len(each), each)]


AXES = {
    "population": (population, "clients", "ratio"),
    "cohort": (cohort, "cohort", "exponent"),
    "actors": (actors, "actors", "speedup"),
}


def show(axis: str, key: str, derived: str, found: Sequence[dict[str, Any]]) -> None:
    """Print a table, times in seconds and memory in MB."""
    columns = [key, "s a round", derived, "client updates/s", "start-up, s", "driver, MB", "driver peak, MB"]
    mega = lambda b: "-" if b is None else b / 1e6  # noqa: E731
    rows = [
        [
            *(f"{r[key]:,}", r["seconds_per_round"], r[derived], r["client_updates_per_s"], r.get("start_s", "-")),
            *(mega(r.get("driver_bytes")), mega(r.get("driver_peak_bytes"))),
        ]
        for r in found
    ]
    command.show(f"{axis}: {found[-1]['executor']} (memory: unique set size)", columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.scaling", __doc__)
    ask.add_argument("axis", choices=list(AXES), help="what grows")
    ask.add_argument("--sizes", type=command.count, nargs="+", help="values of it, instead of the usual ones")
    command.add_case(ask, [name for name in CASES])
    ask.add_argument("--rounds", type=command.count, default=20, help="timed rounds (default %(default)d)")
    ask.add_argument("--warmup", type=command.count, default=3, help="rounds before them (default %(default)d)")
    ask.add_argument("--repeats", type=command.count, default=3, help="turns (default %(default)d)")
    ask.add_argument("--together", action="store_true", help="populations take turns round by round in one process")
    ask.add_argument("--json", action="store_true", help="print JSON")
    command.add_engine(ask)
    args = ask.parse_args(argv)
    if args.case and args.axis != "actors":
        ask.error("argument --case: it goes with actors only")
    if args.together and args.axis != "population":
        ask.error("argument --together: it goes with population only")
    measure, key, derived = AXES[args.axis]
    found = measure(args)
    if args.json:
        print(json.dumps({"axis": args.axis, "machine": command.machine(), "results": found}))
    else:
        show(args.axis, key, derived, found)


if __name__ == "__main__":
    main()
