"""Measure a CUDA device, unattended: ``python -m benchmarks.gpu --json gpu.json``.

Parts: ``cells``, cases by cohort, mode and inner executor (``cells.py``); ``jobs``, jobs with published times, and
pfl-research beside fedfleet (``jobs.py``); ``actors``, several that share the device (``actors.py``). ``--scale
small`` runs all of it in seconds, with few clients that have little data. Its speeds mean nothing, but what runs
there also runs at full scale.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.gpu import actors, cells, jobs
from benchmarks.gpu.device import MODES, leave_without, name, reached
from benchmarks.peers.environments import default_folder

PARTS = ("jobs", "cells", "actors")


def arguments() -> argparse.ArgumentParser:
    """Return what the command takes."""
    ask = command.parser("benchmarks.gpu", __doc__)
    ask.add_argument("--part", action="append", choices=PARTS, help="one, or several by repeating; default: all")
    command.add_case(ask, cells.NAMES)
    ask.add_argument("--inner", action="append", choices=cells.INNERS, help="of cells; one, or several by repeating")
    ask.add_argument("--cohort", action="append", type=command.count, help="of cells, repeated; default: 10 to 10,000")
    ask.add_argument("--scale", choices=cells.SCALES, default="full", help="small: to try the command out, in seconds")
    ask.add_argument("--block-size", type=command.count, help="clients a block; default: the product's own choice")
    ask.add_argument("--rounds", type=command.count, help="timed rounds of a cell at most (default 10)")
    ask.add_argument("--warmup", type=command.count, help="rounds before them (default 2)")
    ask.add_argument("--budget", type=command.seconds, default=60, help="seconds a cell or job may take (default 60)")
    ask.add_argument("--threads", type=command.count, default=1, help="torch threads (default 1)")
    ask.add_argument(
        "--mode",
        action="append",
        choices=MODES,
        help="tf32: in products and convolutions; any: with algorithms besides that give other bits each time; default: all",
    )
    ask.add_argument("--no-capture", action="store_true", help="never replay blocks (docs/explanation/capture.md)")
    ask.add_argument("--actors", action="append", type=command.count, help="that share it, repeated; default 1, 2, 4")
    ask.add_argument("--skip-pfl", action="store_true", help="leave out pfl-research, which is installed on first use")
    ask.add_argument("--envs", type=Path, default=default_folder(), help="where it is (default %(default)s)")
    ask.add_argument("--limit", type=command.seconds, default=600, help="seconds it may take (default 600)")
    ask.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the command out")
    ask.add_argument("--json", type=command.writable, metavar="FILE", help="write everything measured, as it comes")
    return ask


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = arguments().parse_args(argv)
    leave_without(args.device)
    scale = cells.SCALES[args.scale]
    args.cohort = sorted(args.cohort or scale.cohorts)
    args.rounds, args.warmup = args.rounds or scale.rounds, args.warmup or scale.warmup
    args.mode, args.block_size = args.mode or list(scale.modes), args.block_size or scale.block_size
    args.actors = args.actors or [1, 2, 4]
    limits = {mode: reached(mode, args.device) for mode in args.mode}
    found: dict[str, Any] = {"machine": command.machine(), "flop_per_s": limits}
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "jobs": lambda: jobs.measured(args, limits),
        "cells": lambda: cells.measured(args, limits),
        "actors": lambda: actors.measured(args),
    }
    for part in args.part or PARTS:
        found[part] = []
        for result in parts[part]():
            found[part].append(result)
            if args.json:
                command.write(args.json, found)
        if part == "jobs" and not args.skip_pfl:
            found["peer"] = jobs.pfl(args)
            if args.json:
                command.write(args.json, found)
    says = ", ".join(f"{mode} {flop / 1e12:.3g}" for mode, flop in limits.items())
    print(f"{name(args.device)}: large products reach, in TFLOP/s, {says}")
    if "jobs" in found:
        jobs.show(found["jobs"], found.get("peer"))
    if "cells" in found:
        cells.show(found["cells"], "Cases")
    if "actors" in found:
        actors.show(found["actors"])


if __name__ == "__main__":
    main()
