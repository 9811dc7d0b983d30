"""What clipping and noise cost: rounds with and without, in turns: ``python -m benchmarks.privacy``.

Both run in this process with one thread, by the product's own rule for the case; ratios are taken within a turn.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks import command, world
from benchmarks.blocks import spread
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.peers.workload import Case
from fedfleet.simulator.driver.privacy import Adaptive, Mechanism, private
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.transforms.clip import NORM, WITHIN, Hidden

FOLLOWS = Adaptive(quantile=0.5, lr=0.2, count_noise=5.0, sent=NORM, told=WITHIN)


def mechanism(**given: Any) -> Mechanism:
    """Return clipping to 1 and a little noise of the server's."""
    clip = Hidden(norm=1.0, tells="follows" in given)
    return Mechanism(clip=clip, norm=1.0, multiplier=0.001, divide_by=None, **given)


WAYS = {
    "clipped, noise": {},
    "norm follows": {"follows": FOLLOWS},
    "noise of 8 bands": {"mixing": (1.0,) + (-0.1,) * 7},
}


def measure(case: Case, turns: int) -> dict[str, Any]:
    """Return milliseconds a round, medians, and each way's over that without."""
    plain = world.build(case)
    how, rounds = world.rule(plain), case.warmup + turns
    made = {"nothing hidden": plain.algorithm} | {
        name: private(plain.algorithm, mechanism(**given), rounds) for name, given in WAYS.items()
    }
    with ExitStack() as stack:
        under_way = {
            name: world.play(replace(plain, algorithm=a), stack.enter_context(closing(LocalExecutor(1))), how, rounds)
            for name, a in made.items()
        }
        taken = [{name: 1000 * next(rounds).seconds for name, rounds in under_way.items()} for _ in range(rounds)]
    taken = taken[case.warmup :]
    return {
        "inner": how.inner,
        "ms": {name: median(t[name] for t in taken) for name in made},
        "over": {name: spread([t[name] / t["nothing hidden"] for t in taken]) for name in WAYS},
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.privacy", __doc__)
    ask.add_argument("--case", choices=CASES, default="mlp", help="(default %(default)s)")
    ask.add_argument("--turns", type=command.count, default=30, help="of each (default %(default)d)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    say(f"{args.case}: {args.turns} turns")
    found = measure(CASES[args.case], args.turns)
    if args.json:
        print(json.dumps({"machine": command.machine(), **found}))
        return
    print(f"{args.case}, {found['inner']}, one process, one thread")
    for name, ms in found["ms"].items():
        over = found["over"].get(name)
        print(f"{name:18} {ms:8.1f} ms a round" + (f", {over['median']:.2f} times" if over else ""))


if __name__ == "__main__":
    main()
