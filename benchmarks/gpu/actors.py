"""Several actors that share a device, against one: rounds of a case on Ray, in turns of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import command, world
from benchmarks.command import say
from benchmarks.gpu.cells import SCALES
from benchmarks.gpu.device import why
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import Executor

NAMES = ("logistic_1000", "mlp", "cnn")


def on_ray(actors: int, args: argparse.Namespace) -> Executor:
    """Return an executor whose actors have an equal part of the device each."""
    from fedfleet.simulator.executors.ray import RayExecutor  # importing Ray takes a second

    gpus = 1 / actors if args.device == "cuda" else 0.0
    return RayExecutor(actors, gpus_per_actor=gpus, threads=args.threads, cpus=actors)


def measured(
    args: argparse.Namespace, executor: Callable[[int, argparse.Namespace], Executor] = on_ray
) -> Iterator[dict[str, Any]]:
    """Measure each case with so many actors, in float32; ``ratio`` is to the rate of the first number of them."""
    for named in command.cases(None, NAMES):
        case = SCALES[args.scale].of(named)
        case = replace(case, cohort=min(case.cohort, case.clients))
        ready = world.build(case)
        how = world.rule(ready, args.device)
        first = None
        for actors in args.actors:
            about = {"case": case.name, "cohort": case.cohort, "actors": actors, "inner": how.inner}
            try:
                with closing(executor(actors, args)) as running, fresh_settings():
                    records = list(
                        world.play(ready, running, how, args.warmup + args.rounds, args.device, not args.no_capture)
                    )
            except (RuntimeError, FedfleetError) as e:
                yield about | {"note": why(e)}
                continue
            rate = case.cohort / median(r.seconds for r in records[args.warmup :])
            first = first or rate
            say(f"{case.name}, {actors} actors: {rate:,.0f} client updates/s")
            yield about | {
                "block_size": how.block_size,
                "client_updates_per_s": rate,
                "ratio": rate / first,
                "note": "",
            }


def show(found: list[dict[str, Any]]) -> None:
    """Print the table."""
    keys = ("client_updates_per_s", "ratio")
    rows = [
        [r["case"], str(r["cohort"]), str(r["actors"]), r["inner"], *(r.get(k, "-") for k in keys), r["note"]]
        for r in found
    ]
    columns = ["case", "cohort", "actors", "inner", "client updates/s", "times the first", "note"]
    command.show("Actors that share the device", columns, rows)
