"""Speed of Parquet to clients on disk, and of reading cohorts: ``python -m benchmarks.disk [--clients 1000000]``.

Clients have 10 examples of 32 features. They are written to Parquet, each client's rows together or shuffled, and
converted. Then random cohorts are read, in the blocks that a round would be cut into, and in one piece.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import command
from benchmarks.command import say
from fedfleet.datasets.convert import convert
from fedfleet.datasets.disk import DiskPopulation
from fedfleet.simulator.arithmetic import rng

EXAMPLES, FEATURES, BLOCK = 10, 32, 64
PART = 1 << 18  # rows made at a time


def write(path: Path, clients: int, *, shuffled: bool) -> None:
    """Write the clients' examples as one Parquet file."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(clients), EXAMPLES)
    if shuffled:
        draw.shuffle(owners)
    kinds = {"client": pa.int64(), "x": pa.list_(pa.float32(), FEATURES), "y": pa.int64()}
    with pq.ParquetWriter(path, pa.schema(kinds), use_dictionary=False) as writer:
        for start in range(0, len(owners), PART):
            part = owners[start : start + PART]
            x = pa.FixedSizeListArray.from_arrays(
                draw.standard_normal(len(part) * FEATURES, dtype=np.float32), FEATURES
            )
            writer.write_table(pa.table([part, x, draw.integers(0, 10, len(part))], schema=pa.schema(kinds)))


def read_s(population: DiskPopulation, cohort: int, block: int, turn: int) -> float:
    """Return the seconds to read a random cohort, in blocks of so many clients."""
    ids = rng.sample(rng.fold(rng.key(turn), "cohort"), population.size, cohort)
    began = time.perf_counter()
    for clients in ids.split(block):
        population.local_data(clients)
    return time.perf_counter() - began


def measure(folder: Path, args: argparse.Namespace, *, shuffled: bool) -> dict[str, Any]:
    """Write, convert and read."""
    source, out = folder / f"{shuffled}.parquet", folder / f"{shuffled}"
    order = "shuffled" if shuffled else "together"
    say(f"writing {args.clients:,} clients, rows {order}")
    write(source, args.clients, shuffled=shuffled)
    say("converting")
    began = time.perf_counter()
    convert(source, out)
    convert_s = time.perf_counter() - began
    say("reading")
    population = DiskPopulation(out)
    cohort = min(args.cohort, population.size)
    population.examples["x"].sum()  # now its pages are in memory
    return {
        "rows": order,
        "clients": args.clients,
        "convert_s": convert_s,
        "clients_per_s": args.clients / convert_s,
        "cohort": cohort,
        "read_blocks_ms": 1e3 * median(read_s(population, cohort, BLOCK, i) for i in range(args.rounds)),
        "read_whole_ms": 1e3 * median(read_s(population, cohort, cohort, i) for i in range(args.rounds)),
    }


def show(found: list[dict[str, Any]]) -> None:
    """Print a table."""
    columns = ["rows of a client", "convert, s", "clients/s", f"read in blocks of {BLOCK}, ms", "read whole, ms"]
    keys = ("rows", "convert_s", "clients_per_s", "read_blocks_ms", "read_whole_ms")
    rows = [[r[key] for key in keys] for r in found]
    title = f"{found[0]['clients']:,} clients of {EXAMPLES} x {FEATURES} floats; random cohorts of {found[0]['cohort']:,}, warm"
    command.show(title, columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.disk", __doc__)
    ask.add_argument("--clients", type=command.count, default=1_000_000, help="clients (default 1000000)")
    ask.add_argument("--cohort", type=command.count, default=1000, help="clients of a cohort (default 1000)")
    ask.add_argument("--rounds", type=command.count, default=20, help="cohorts read (default 20)")
    ask.add_argument("--folder", type=Path, help="where to work; default: the system's folder for temporary files")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = [measure(Path(folder), args, shuffled=shuffled) for shuffled in (False, True)]
    if args.json:
        print(json.dumps({"machine": command.machine(), "results": found}))
    else:
        show(found)


if __name__ == "__main__":
    main()
