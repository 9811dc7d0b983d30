"""Time to resolve a cohort, for every availability and kind of devices: ``python -m benchmarks.invitations``.

It times the driver before any client works: who is invited, to what work, who is online, how long each takes, who
fails, and who completes.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import command
from benchmarks.command import say
from fedfleet.config import schema as config
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.batches import work
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.responses import Outcome, respond

AVAILABILITY: dict[str, dict[str, Any]] = {
    "always": {},
    "bernoulli": {"rate": 0.7},
    "random_rate": {},
    "markov": {"mean_on_s": 600, "mean_off_s": 300},
    "diurnal": {},
    "size_correlated": {"rate": 0.7},
    "trace": {},
}
DEVICES = ("homogeneous", "lognormal")
TRACED, INTERVALS = 100_000, 20  # devices of the trace, and intervals of each


def write_trace(path: Path) -> None:
    """Write a trace in which every device is online half of the time."""
    client = torch.arange(TRACED).repeat_interleave(INTERVALS)
    start = torch.arange(INTERVALS).repeat(TRACED) * 3600.0
    table = {"client": client.numpy(), "start_s": start.numpy(), "end_s": (start + 1800.0).numpy()}
    pq.write_table(pa.table(table), path)


def measure(availability: str, devices: str, trace: Path, clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Resolve cohorts of one kind and return the median time as plain data."""
    options = {"path": str(trace)} if availability == "trace" else AVAILABILITY[availability]
    x = Experiment(
        config.load(
            {
                "population": {"dataset": "synthetic", "clients": clients},
                "algorithm": {"name": "fedavg", "epochs": 1},
                "cohort": {"size": cohort, "wait_for": "siwer", "deadline_s": 3600, "partial_work": True},
                "availability": {"kind": availability, **options},
                "devices": {"kind": devices, "failures_per_hour": 1},
                "executor": {"kind": "local", "inner": "batched", "block_size": 100},
            }
        )
    )
    conditions, (phase,) = x.conditions(), x.algorithm.phases
    assert x.problem.num_examples is not None
    found, heard = [], []
    for i in range(rounds + 1):
        key = rng.fold(rng.key(1), i)
        began = time.perf_counter()
        ids, _ = conditions.selection.invite(None, key, cohort, x.problem, replace=False)
        load = Load(*work(phase, x.problem.num_examples(ids)), 1e6, 1e6, 1e6)
        result = respond(conditions.federation, ids, torch.zeros_like(ids), load, 1000.0 * i, key, key)
        found.append(time.perf_counter() - began)
        heard.append(float((result.outcome == Outcome.COMPLETED).double().mean()))
    return {
        "availability": availability,
        "devices": devices,
        "invited": cohort,
        "ms": 1e3 * median(found[1:]),
        "completed_share": median(heard),
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.invitations", __doc__)
    ask.add_argument("--cohort", type=command.count, default=100_000, help="clients invited (default 100000)")
    ask.add_argument("--clients", type=command.count, default=1_000_000, help="clients in all (default 1000000)")
    ask.add_argument("--rounds", type=command.count, default=9, help="cohorts of each kind (default 9)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    if args.cohort > args.clients:
        ask.error(f"argument --cohort: there are only {args.clients} clients")
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.parquet"
        write_trace(trace)
        for availability in AVAILABILITY:
            for devices in DEVICES:
                say(f"{availability}, {devices}")
                found.append(measure(availability, devices, trace, args.clients, args.cohort, args.rounds))
    if args.json:
        print(json.dumps({"machine": command.machine(), "results": found}))
        return
    keys = ("availability", "devices", "ms", "completed_share")
    rows = [[r[k] for k in keys] for r in found]
    command.show(
        f"Resolving {args.cohort:,} of {args.clients:,} clients", ["availability", "devices", "ms", "completed"], rows
    )


if __name__ == "__main__":
    main()
