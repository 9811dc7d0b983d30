"""``python -m tests.chaos --minutes 5``: soak runs of one algorithm after the other until the time is over.

``python -m tests.chaos --nodes 3 --faults 30``: on several nodes of this machine, until so many faults were put in. With
``--hidden 14000`` models are large, so that nodes add their own results before the driver does.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

from benchmarks.cluster.nodes import missing
from tests.chaos import on_nodes
from tests.chaos.soak import CASES, FAULTS, Report, say, soak, table


def main() -> int:
    """Run the soak; the exit status is 1 where anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no further run after so many minutes")
    parser.add_argument("--nodes", type=int, help="nodes with an address of their own, the driver's among them")
    parser.add_argument("--faults", type=int, default=30, help="with --nodes: how many to put in")
    parser.add_argument("--hidden", type=int, help="with --nodes: width of the nets, of cases that have one to widen")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="ALGORITHM")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of a run")
    parser.add_argument(
        "--every", type=float, nargs=2, default=(1.0, 3.0), metavar=("LEAST", "MOST"), help="seconds between faults"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.hidden is not None:
        if args.nodes is None:
            parser.error("--hidden is for several nodes: give --nodes")
        fixed = [name for name in args.cases if CASES[name]["task"]["model"] != "mlp"]
        if fixed and len(args.cases) < len(CASES):
            parser.error(f"--hidden: the net of {fixed[0]} is no mlp: leave it out of --cases")
        args.cases = [name for name in args.cases if name not in fixed]
    if args.nodes is None:
        return int(table(_alone(args), FAULTS) > 0)
    if (why := missing()) is not None:
        parser.error(why)
    large = {} if args.hidden is None else {"task.hidden": [args.hidden], "executor.block_size": 1}
    how = {"rounds": args.rounds, "every_s": tuple(args.every), "more": large}
    reports = on_nodes.soak_all(args.nodes, args.faults, args.seed, args.cases, **how)
    return int(table(reports, on_nodes.FAULTS) > 0)


def _alone(args: argparse.Namespace) -> list[Report]:
    """Soak runs of one process and its own Ray."""
    draw, started, reports = random.Random(args.seed), time.monotonic(), list[Report]()
    faults = [*FAULTS, *FAULTS, *draw.sample([*FAULTS], 2)]
    for case in cycle(args.cases):
        with tempfile.TemporaryDirectory() as folder:
            found = soak(case, Path(folder), draw, rounds=args.rounds, faults=faults, every_s=tuple(args.every))
        reports.append(found)
        say(found)
        if time.monotonic() - started > 60 * args.minutes:
            break
    return reports


if __name__ == "__main__":
    sys.exit(main())
