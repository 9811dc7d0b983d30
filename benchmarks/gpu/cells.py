"""The cases on a device: each cell of the table is a mode, a case, an inner executor and a cohort, in one process.

Clients beyond the case's own share their data. A cell that would exceed its time or the device's memory says so, and the rest goes
on. ``ratio`` is to the rate of serial in the same mode: at the largest cohort it was measured at, since one client after the
other costs the same however many there are. ``share`` is the arithmetic of FedAvg's updates over that of large products.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks import command, limit, world
from benchmarks.command import say
from benchmarks.gpu.device import MODES, emptied, peak_bytes, why
from benchmarks.peers.workload import Case
from benchmarks.world import How, World
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.local import LocalExecutor

NAMES = ("logistic", "mlp", "cnn", "cdma")
INNERS = ("serial", "batched", "factored")
MUST_RATIO = {1000: 30.0}
"""Times as fast as serial, at least, by cohort, of the fastest way of the cases below."""
MUST_CASES = ("logistic", "mlp", "cdma")


@dataclass(frozen=True)
class Scale:
    """How much is done where nothing is said; clients, examples and batches are those of the case where None.

    The small one keeps to float32, and ends before blocks are captured.
    """

    cohorts: tuple[int, ...] = (10, 100, 1000, 10_000)
    rounds: int = 10
    warmup: int = 2
    modes: tuple[str, ...] = tuple(MODES)
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


def timed(ready: World, how: How, mode: str, args: argparse.Namespace) -> tuple[list[float], int]:
    """Return the seconds of rounds after the warm-up, fewer than asked for, at least one, where the budget ends; and how often a
    block ran in halves, since the memory did not hold it.
    """
    found, halved = list[float](), 0
    began = time.perf_counter()
    with closing(LocalExecutor(args.threads)) as executor, fresh_settings():
        rounds = args.warmup + args.rounds
        records = world.play(ready, executor, how, rounds, args.device, not args.no_capture, MODES[mode])
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
    emptied(args.device)
    note, seconds, halved = "", [], 0
    try:
        ready = world.build(case, world.enlarged(world.population(base), case.clients))
        how = How(inner, args.block_size or world.rule(ready, args.device).block_size)
        about["block_size"] = how.block_size
        seconds, halved = timed(ready, how, mode, args)
    except (RuntimeError, FedfleetError) as e:
        note = why(e)
    if note:
        return about | {"note": note}
    typical = median(seconds)
    rate = case.cohort / typical
    speed = {"client_updates_per_s": rate, "client_steps_per_s": rate * case.steps, "seconds_per_round": typical}
    note = f"{halved} blocks ran in halves" if halved else ""
    return about | speed | {"rounds": len(seconds), "peak_bytes": peak_bytes(args.device), "note": note}


def _about(case: Case, inner: str, mode: str) -> dict[str, Any]:
    return {"mode": mode, "case": case.name, "inner": inner, "cohort": case.cohort, "steps": case.steps}


def measured(args: argparse.Namespace, limits: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Measure all cells, small cohorts first; one that would take longer than the budget, going by the one before, is left out.

    ``limits`` has what large products reach by mode.
    """
    for mode, named in itertools.product(args.mode, command.cases(args.case, NAMES)):
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
                if rate and base.algorithm == "fedavg":
                    found["share"] = rate * limit.of_update(base) / limits[mode]
                said = found["note"] or f"{rate:,.0f} client updates/s"
                say(f"{mode}, {case.name}, {inner}, cohort {size:,}: {said}")
                yield found
                if rate is None:
                    break


def show(found: list[dict[str, Any]], title: str) -> None:
    """Print the table, and which of the ratios that must be are."""
    columns = [
        "case",
        "mode",
        "inner",
        "cohort",
        "block",
        "s a round",
        "client updates/s",
        "share",
        "times serial",
    ]
    rows = [
        [
            *(r["case"], r["mode"], r["inner"], f"{r['cohort']:,}", str(r.get("block_size", "-"))),
            *(r.get("seconds_per_round", "-"), r.get("client_updates_per_s", "-")),
            *(f"{r['share']:.1%}" if "share" in r else "-", r.get("ratio", "-")),
            *(r["peak_bytes"] / 1e6 if "peak_bytes" in r else "-", r["note"]),
        ]
        for r in found
    ]
    command.show(title, [*columns, "peak, MB", "note"], rows)
    for line in musts(found):
        print(line)


def musts(found: list[dict[str, Any]]) -> list[str]:
    """Say of each case at a cohort that has a target how many times as fast as serial its fastest way is."""
    lines = []
    for cohort, must in MUST_RATIO.items():
        for case in MUST_CASES:
            mine = [r for r in found if r["case"] == case and r["cohort"] == cohort and "ratio" in r]
            if mine:
                best = max(mine, key=lambda r: r["ratio"])
                met = "met" if best["ratio"] >= must else "missed"
                lines.append(
                    f"{case}, cohort {cohort:,}: {best['ratio']:.1f} times serial, {best['inner']} in "
                    f"{best['mode']} (must be {must:.0f}: {met})"
                )
    return lines
