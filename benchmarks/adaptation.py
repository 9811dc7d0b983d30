"""A client update of FedMM beside two of FedAvg with the same net, and beside a bare loop: ``python -m benchmarks.adaptation``.

All take turns in one process with one thread; ratios are taken within a turn. FedAvg trains extractor and head alone, FedMM an
adversary with them, so the two players of one client are compared with two clients of one player.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks import blocks, command, fedmm_loop, world
from benchmarks.blocks import WAYS, Watching
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.peers.workload import Case
from fedfleet.simulator.block.capture import Captures

FEW_TO_LEARN = 4  # blocks before the turns


def watched(case: Case) -> blocks.Seen:
    """Return the block of all clients of a round of a case."""
    ready = world.build(case)
    how = world.rule(ready)._replace(block_size=case.cohort)
    with closing(Watching()) as executor:
        for _ in world.play(ready, executor, how, 2, capture=False):
            pass
        (seen,) = executor.seen.values()
        return seen


def measure(fedmm: Case, fedavg: Case, turns: int) -> dict[str, Any]:
    """Return milliseconds a client update, medians, and ratios; of FedMM the ways, of FedAvg the same ways."""
    setups = {
        (case.algorithm, way): (replace(seen.setup, inner=way, captures=Captures(after=1)), seen)
        for case in (fedmm, fedavg)
        for seen in [watched(case)]
        for way in WAYS
    }
    loop, _ = fedmm_loop.fedmm(fedmm)
    for _ in range(FEW_TO_LEARN):
        for setup, seen in setups.values():
            blocks.milliseconds(setup, seen)
    loop(0)
    taken = []
    for t in range(turns):
        times = {who: blocks.milliseconds(setup, seen) / fedmm.cohort for who, (setup, seen) in setups.items()}
        started = time.perf_counter()
        loop(1 + t)
        taken.append(times | {("loop", ""): 1000 * (time.perf_counter() - started) / fedmm.cohort})
    return {
        "ms": {" ".join(who).strip(): median(t[who] for t in taken) for who in taken[0]},
        "over_two_fedavg": {
            way: blocks.spread([t["fedmm", way] / (2 * t["fedavg", way]) for t in taken]) for way in WAYS
        },
        "times_as_fast_as_loop": {way: blocks.spread([t["loop", ""] / t["fedmm", way] for t in taken]) for way in WAYS},
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.adaptation", __doc__)
    ask.add_argument("--turns", type=command.count, default=11, help="of each (default %(default)d)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    say(f"fedmm: {args.turns} turns")
    found = measure(CASES["fedmm"], CASES["fedmm_source"], args.turns)
    if args.json:
        print(json.dumps({"machine": command.machine(), **found}))
        return
    rows = [
        [
            way,
            f"{found['ms'][f'fedmm {way}']:.3g}",
            f"{found['ms'][f'fedavg {way}']:.3g}",
            blocks.told(found["over_two_fedavg"][way]),
            blocks.told(found["times_as_fast_as_loop"][way]),
        ]
        for way in WAYS
    ]
    command.show(
        f"A client update, ms (bare loop of FedMM: {found['ms']['loop']:.3g})",
        ["way", "FedMM", "FedAvg", "FedMM over two of FedAvg", "times as fast as the loop"],
        rows,
    )


if __name__ == "__main__":
    main()
