"""Measure the engine on a case: ``python -m benchmarks.engine --case logistic``.

Rounds are timed where the engine itself times them: from the invitation to the merged result, without evaluation. A client
update is one client's local training; in "cdma" phase 1 is part of the time and adds nothing to the count.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from typing import Any

from benchmarks import command, overhead, world
from benchmarks.command import say
from benchmarks.peers.workload import Case
from benchmarks.results import emit, result
from benchmarks.world import How, World
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.local import LocalExecutor


def executor(kind: str, actors: int = 2, threads: int = 1, cpus: int | None = None) -> Executor:
    """Return an executor, "ray" or "local", not yet started; a Ray of its own has ``cpus`` to give, by default one an actor."""
    if kind == "local":
        return LocalExecutor(threads)
    from fedfleet.simulator.executors.ray import RayExecutor  # importing Ray takes a second

    return RayExecutor(actors, threads=threads, cpus=cpus or actors)


def describe(args: argparse.Namespace, how: How) -> str:
    """Return in one line how the rounds were run."""
    where = "this process" if args.executor == "local" else f"ray, {args.actors} actor{'s' * (args.actors > 1)}"
    several = f" of {args.threads} threads" if args.threads > 1 else ""
    return f"{where}{several}, {how.inner}, blocks of {how.block_size}"


def choose(ready: World, inner: str, block_size: int | None) -> How:
    """Return how blocks are run: what is given, and the product's own choice for the rest."""
    auto = world.rule(ready)
    return How(auto.inner if inner == "auto" else inner, block_size or auto.block_size)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case and return the result as plain data."""
    ready = world.build(case, falling=args.falling)
    how = choose(ready, args.inner, args.block_size)
    with closing(executor(args.executor, args.actors, args.threads)) as running:
        records = list(world.play(ready, running, how, case.warmup + case.rounds, capture=not args.no_capture))
        extra = overhead.measure(ready, running, how) if args.overhead else {}
    return result(case, [r.seconds for r in records[case.warmup :]], describe(args, how)) | extra


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.engine", __doc__)
    command.add_case(ask)
    command.add_rounds(ask)
    command.add_engine(ask)
    ask.add_argument("--cohort", type=command.count, help="clients a round, instead of the case's")
    ask.add_argument("--no-capture", action="store_true", help="never replay blocks (docs/explanation/capture.md)")
    ask.add_argument("--falling", action="store_true", help="learning rates fall each round")
    ask.add_argument("--overhead", action="store_true", help="also time phases in which clients do nothing")
    args = ask.parse_args(argv)
    chosen = [
        replace(c, cohort=args.cohort or c.cohort)
        for c in command.cases(args.case, rounds=args.rounds, warmup=args.warmup)
    ]
    for c in chosen:
        if c.cohort > c.clients:
            ask.error(f"argument --cohort: case {c.name} has only {c.clients} clients")
    found = []
    for c in chosen:
        say(f"{c.name}: cohort {c.cohort}, {c.steps} local steps, {c.warmup} + {c.rounds} rounds")
        found.append(measure(c, args))
    emit(found, "fedfleet", args.json)
    if args.overhead and not args.json:
        keys = ("case", "blocks", "phase_ms", "draws_ms", "driver_ms", "map_ms", "map_model_ms")
        columns = ["case", "blocks", "empty phase, ms", "draws, ms", "driver computes, ms"]
        columns += ["empty map, ms", "map of the model, ms"]
        command.show("A phase without client work", columns, [[r[k] for k in keys] for r in found])


if __name__ == "__main__":
    main()
