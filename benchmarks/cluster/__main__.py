"""Rounds on nodes of this machine, each with an address of its own: ``python -m benchmarks.cluster``. Linux, as root.

The same actors on 1, 2 and 4 nodes: what a round takes, by part, with a model of 0.8 and of 45 MB. A model of the cost is fitted
to that, checked on 3 nodes, which it has not seen, and says what a round would take on many GPUs: a projection, no measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import command
from benchmarks.cluster.model import Rates, Setting, fit, parts, ratio
from benchmarks.cluster.nodes import missing, nodes

ROOT = Path(__file__).resolve().parents[2]
ACTORS = 12  # of 1, 2, 3 and 4 nodes alike
SIZES = (4e3, 8e5, 4.5e7)
BLOCKS = (12, 48, 96)
LAST_S = (0.0, 0.4)
MANY = 4096  # clients in the blocks of the smallest model
STORE_BYTES = 3 << 30
GPUS, CLIENTS = (8, 16, 32, 64, 128, 256, 512), (10**3, 10**4, 10**5, 10**6)
A_NODE = 8  # GPUs


def settings(size: int) -> list[Setting]:
    """Return what is measured on so many nodes."""
    found = [Setting(size, ACTORS, b, 2 * b, bytes, s) for bytes, b, s in product(SIZES, BLOCKS, LAST_S)]
    return [*found, Setting(size, ACTORS, BLOCKS[0], MANY, SIZES[0], 0.0)]


def measured(size: int) -> list[dict[str, Any]]:
    """Measure on so many nodes."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    asked = settings(size)
    with nodes(size, cpus=ACTORS / size, store=STORE_BYTES // size, PYTHONPATH=os.pathsep.join(paths)) as there:
        done = there.head.popen(
            [sys.executable, "-m", "benchmarks.cluster.rounds", there.address, ACTORS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = done.communicate(json.dumps(asked))[0]
    if done.returncode:
        sys.exit(f"benchmarks.cluster: on {size} nodes the rounds failed with {done.returncode}; see above")
    return [{**s._asdict(), **found} for s, found in zip(asked, json.loads(said), strict=True)]


def setting(row: dict[str, Any]) -> Setting:
    """Return what was measured in a row."""
    return Setting(*(row[name] for name in Setting._fields))


def show(rows: Sequence[dict[str, Any]], held_out: int) -> Rates:
    """Print what was measured, the fit and how far it is off; return the rates."""
    columns = [
        "nodes, MB, blocks, seconds of each",
        "round, s",
        "put",
        "broadcast alone",
        "driver waits",
        "merge",
        "work an actor",
    ]
    body = [
        [
            f"{r['nodes']}, {r['size'] / 1e6:g}, {r['blocks']}, {r['block_s']:g}",
            *(r[k] for k in ("round_s", "put_s", "broadcast_s", "wait_s", "merge_s")),
            r["compute_s"] / r["actors"],
        ]
        for r in rows
    ]
    command.show(f"Rounds of {ACTORS} actors; medians, seconds", columns, body)
    fitted = [(setting(r), r["round_s"]) for r in rows if r["nodes"] != held_out]
    checked = [(setting(r), r["round_s"]) for r in rows if r["nodes"] == held_out]
    rates = fit(fitted)
    command.show("Rates", ["seconds of", *rates._fields], [["fitted", *rates]])
    spread = []
    for name, some in ((f"{len(fitted)} fitted", fitted), (f"{len(checked)} on {held_out} nodes, not fitted", checked)):
        off = sorted(ratio(rates, *pair) for pair in some)
        spread += [[name, median(off), off[0], off[-1]]] if off else []
    command.show("Model over measured", ["rounds", "median", "least", "most"], spread)
    return rates


def project(rates: Rates, args: argparse.Namespace) -> None:
    """Print what rounds would take on many GPUs."""
    over = rates.over(args.gigabits)
    rows = []
    for clients in CLIENTS:
        row = [f"{clients:,}"]
        for gpus in GPUS:
            blocks = -(-clients // args.block_size)
            of = Setting(max(1, gpus // A_NODE), gpus, blocks, clients, args.size, args.block_size * args.client_s)
            found = parts(over, of)
            row.append(f"{command.number(found.round)} {found.limit}")
        rows.append(row)
    title = (
        f"PROJECTION, not measured: seconds a round, and what takes longest; {args.size / 1e6:g} MB, blocks of {args.block_size}, "
        f"{args.client_s:g} s a client, {A_NODE} GPUs a node, links of {args.gigabits:g} Gbit/s"
    )
    command.show(title, ["clients a round", *(f"{n} GPUs" for n in GPUS)], rows)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.cluster", __doc__)
    ask.add_argument("--nodes", type=command.count, nargs="+", default=[1, 2, 4], help="to fit to (default 1 2 4)")
    ask.add_argument("--check", type=command.count, default=3, help="nodes to check on (default 3)")
    ask.add_argument(
        "--file", type=command.writable, default=Path("cluster.json"), help="rows go there, or come from there"
    )
    ask.add_argument("--again", action="store_true", help="measure nothing: take the rows of --file")
    ask.add_argument("--size", type=float, default=4.5e7, help="bytes of the model projected (default %(default)g)")
    ask.add_argument(
        "--client-s", type=command.seconds, default=0.02, help="seconds of a GPU a client (default %(default)g)"
    )
    ask.add_argument("--block-size", type=command.count, default=32, help="clients a block (default %(default)d)")
    ask.add_argument(
        "--gigabits", type=command.seconds, default=10.0, help="of a link between nodes (default %(default)g)"
    )
    args = ask.parse_args(argv)
    if args.again:
        rows = json.loads(args.file.read_text())["rows"]
    else:
        if (why := missing()) is not None:
            ask.error(why)
        rows = [row for size in sorted({*args.nodes, args.check}) for row in measured(size)]
        command.write(args.file, {"machine": command.machine(), "rows": rows})
    project(show(rows, args.check), args)


if __name__ == "__main__":
    main()
