"""The engine on a CUDA device: ``python -m benchmarks.gpu --json gpu.json``, unattended.

One process, no Ray. Each cell of the table is a precision, a case, an inner executor and a cohort; clients beyond the case's own
share their data. A cell that would exceed its time or the device's memory says so, and the rest goes on. ``ratio`` is to the
rate of serial at the same precision: at the largest cohort it was measured at, since one client after the other costs the same
however many there are. ``--scale small`` goes through all of it with few clients that have little data, in seconds: what it says of
speed means nothing, but what runs there runs at full scale.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks import command, limit, world
from benchmarks.command import say
from benchmarks.peers.workload import Case
from benchmarks.world import How, World
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation

NAMES = ("logistic", "mlp", "cnn", "cdma")
INNERS = ("serial", "batched", "factored")
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Scale:
    """How much is done where nothing is said; clients, examples and batches are those of the case where None.

    The small one keeps to float32, for a CPU may have no convolutions in bfloat16, and ends before blocks are captured.
    """

    cohorts: tuple[int, ...] = (10, 100, 1000, 10_000)
    rounds: int = 10
    warmup: int = 2
    precisions: tuple[str, ...] = PRECISIONS
    block_size: int | None = None
    clients: int | None = None
    samples: int | None = None
    batch: int | None = None

    def of(self, case: Case) -> Case:
        """Return a case at this scale."""
        wanted = {"clients": self.clients, "samples": self.samples, "batch": self.batch}
        return replace(case, **{k: v for k, v in wanted.items() if v is not None})


SMALL = Scale((2,), 1, 1, ("float32",), block_size=2, clients=2, samples=4, batch=2)
SCALES = {"full": Scale(), "small": SMALL}


def enlarged(population: InMemoryPopulation, clients: int) -> InMemoryPopulation:
    """Return so many clients of equal size; client i holds the data of client i modulo the given ones."""
    rows = population.indices.reshape(population.size, -1)
    owner = torch.arange(clients) % population.size
    offsets = torch.arange(0, clients * rows.shape[1] + 1, rows.shape[1])
    return InMemoryPopulation(population.data, rows[owner].flatten(), offsets, population.domain[owner])


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """Allow TF32 or not, or have products and convolutions in bfloat16, for as long as this lasts."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False) if name == "bf16" else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def timed(ready: World, how: How, mode: str, args: argparse.Namespace) -> tuple[list[float], int]:
    """Return the seconds of rounds after the warm-up, fewer than asked for, at least one, where the budget ends; and how often a
    block ran in halves, since the memory did not hold it.
    """
    found, halved = list[float](), 0
    began = time.perf_counter()
    with closing(LocalExecutor(args.threads)) as executor, precision(mode, args.device):
        records = world.play(ready, executor, how, args.warmup + args.rounds, args.device)
        while True:
            limit.synchronise(args.device)
            started = time.perf_counter()
            record = next(records, None)
            if record is None:
                break
            limit.synchronise(args.device)
            found.append(time.perf_counter() - started)
            halved += sum(event.get("splits", 0) for p in record.phases for event in p.events)
            if len(found) > args.warmup and time.perf_counter() - began > args.budget:
                break
    return found[args.warmup :], halved


def cell(base: Case, case: Case, inner: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell, a case with the data of another; "note" says why there is no time in it, or that blocks ran in halves."""
    about = _about(case, inner, mode)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    note, seconds, halved = "", [], 0
    try:
        ready = world.build(case, enlarged(world.population(base), case.clients))
        how = How(inner, args.block_size or world.rule(ready, args.device).block_size)
        about["block_size"] = how.block_size
        seconds, halved = timed(ready, how, mode, args)
    except (RuntimeError, FedfleetError) as e:
        note = "out of memory" if out_of_memory(e) else " ".join(str(e).split())[:120]
    gc.collect()
    torch.cuda.empty_cache()
    if note:
        return about | {"note": note}
    typical = median(seconds)
    rate = case.cohort / typical
    speed = {"client_updates_per_s": rate, "client_steps_per_s": rate * case.steps, "seconds_per_round": typical}
    note = f"{halved} blocks ran in halves" if halved else ""
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    return about | speed | {"rounds": len(seconds), "peak_bytes": peak, "note": note}


def _about(case: Case, inner: str, mode: str) -> dict[str, Any]:
    return {"precision": mode, "case": case.name, "inner": inner, "cohort": case.cohort, "steps": case.steps}


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is the device's memory having run out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all cells, small cohorts first; one that would take longer than the budget, going by the one before, is left out."""
    chosen = itertools.product(args.precision, command.cases(args.case, NAMES))
    for mode, named in chosen:
        base = SCALES[args.scale].of(named)
        serial = None  # its rate
        for inner in args.inner or INNERS:
            found: dict[str, Any] = {}
            forecast_s = 0.0  # of one client
            for size in args.cohort:
                case = replace(base, cohort=size, clients=max(base.clients, size))
                if forecast_s * size * (args.warmup + 1) > args.budget:
                    found = _about(case, inner, mode) | {"note": f"left out: about {forecast_s * size:.0f} s a round"}
                else:
                    found = cell(base, case, inner, mode, args)
                    forecast_s = found.get("seconds_per_round", 0.0) / size
                rate = found.get("client_updates_per_s")
                serial = rate if inner == "serial" and rate else serial
                if rate and serial and inner != "serial":
                    found["ratio"] = rate / serial
                said = found["note"] or f"{rate:,.0f} client updates/s"
                say(f"{mode}, {case.name}, {inner}, cohort {size:,}: {said}")
                yield found
                if rate is None:
                    break


def show(found: list[dict[str, Any]], device: str) -> None:
    """Print the table."""
    columns = ["case", "precision", "inner", "cohort", "block", "s a round", "client updates/s", "times serial"]
    keys = ("seconds_per_round", "client_updates_per_s", "ratio")
    rows = [
        [
            *(r["case"], r["precision"], r["inner"], f"{r['cohort']:,}", str(r.get("block_size", "-"))),
            *(r.get(k, "-") for k in keys),
            *(r["peak_bytes"] / 1e6 if "peak_bytes" in r else "-", r["note"]),
        ]
        for r in found
    ]
    command.show(torch.cuda.get_device_name() if device == "cuda" else device, [*columns, "peak, MB", "note"], rows)


def leave_without(device: str) -> None:
    """End the program, saying so, where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none on this machine, so nothing was measured")
        sys.exit(0)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.gpu", __doc__)
    command.add_case(ask, NAMES)
    ask.add_argument("--inner", action="append", choices=INNERS, help="one, or several by repeating; default: all")
    ask.add_argument(
        "--cohort", action="append", type=command.count, help="one, or several by repeating; default: 10 to 10,000"
    )
    ask.add_argument("--scale", choices=SCALES, default="full", help="small: to try the command out, in seconds")
    ask.add_argument("--block-size", type=command.count, help="clients a block; default: the product's own choice")
    ask.add_argument("--rounds", type=command.count, help="timed rounds at most (default 10)")
    ask.add_argument("--warmup", type=command.count, help="rounds before them (default 2)")
    ask.add_argument("--budget", type=command.seconds, default=60, help="seconds a cell may take (default 60)")
    ask.add_argument("--threads", type=command.count, default=1, help="torch threads (default 1)")
    ask.add_argument(
        "--precision",
        action="append",
        choices=PRECISIONS,
        help="tf32: in products and convolutions; bf16: autocast; one, or several by repeating; default: all",
    )
    ask.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the command out")
    ask.add_argument(
        "--json", type=command.writable, metavar="FILE", help="write everything measured, after every cell"
    )
    args = ask.parse_args(argv)
    leave_without(args.device)
    scale = SCALES[args.scale]
    args.cohort = sorted(args.cohort or scale.cohorts)
    args.rounds, args.warmup = args.rounds or scale.rounds, args.warmup or scale.warmup
    args.precision, args.block_size = args.precision or scale.precisions, args.block_size or scale.block_size
    found = []
    for result in cells(args):
        found.append(result)
        if args.json:
            command.write(args.json, {"machine": command.machine(), "cells": found})
    show(found, args.device)


if __name__ == "__main__":
    main()
