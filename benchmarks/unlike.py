"""Workers of unlike speed: ``python -m benchmarks.unlike``: how long they are idle, and a round beside the best there is.

Blocks do next to nothing and last as long as they are told to, by whose they are, as if GPUs of several kinds worked: what is
measured is which worker is given which block.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import command
from benchmarks.cluster.rounds import Around, begun
from benchmarks.command import say
from benchmarks.engine import executor as made
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.work import Message

FLEETS = {
    "all alike": (1.0, 1.0, 1.0, 1.0),
    "one at a third": (1.0, 1.0, 1.0, 1 / 3),
    "two at a half": (1.0, 1.0, 0.5, 0.5),
    "one at a tenth": (1.0, 1.0, 1.0, 0.1),
    "four kinds": (1.0, 0.7, 0.4, 0.2),
}
"""How fast each worker is."""


@dataclass(frozen=True)
class Paced:
    """A job that lasts as long as its worker takes for it, and writes down when that was."""

    job: Job
    folder: Path
    speeds: tuple[float, ...]
    block_s: float

    def __call__(self, setup: Setup, shared: Message, task: Any) -> Any:
        """Run the job, and wait."""
        begun = time.monotonic()
        place = _place(self.folder, len(self.speeds))
        found = self.job(setup, shared, task)
        time.sleep(max(0.0, begun + self.block_s / self.speeds[place] - time.monotonic()))
        with (self.folder / "blocks").open("a", encoding="utf-8") as file:
            file.write(f"{begun} {time.monotonic()}\n")
        return found


def _place(folder: Path, count: int) -> int:
    """Return which of the workers this is; the first that asks is the first."""
    mine = folder / str(os.getpid())
    for place in () if mine.exists() else range(count):
        with suppress(FileExistsError):
            (folder / f"place-{place}").touch(exist_ok=False)
            mine.write_text(str(place), encoding="utf-8")
            break
    return int(mine.read_text(encoding="utf-8"))


def best(speeds: Sequence[float], blocks: int, block_s: float) -> float:
    """Return the seconds of the shortest round there is: whoever ends a block first is given it."""
    free = [0.0] * len(speeds)
    for _ in range(blocks):
        ends = [at + block_s / speed for at, speed in zip(free, speeds, strict=True)]
        first = min(range(len(speeds)), key=ends.__getitem__)
        free[first] = ends[first]
    return max(free)


def measure(speeds: tuple[float, ...], blocks: int, block_s: float, rounds: int, warmup: int) -> dict[str, float]:
    """Return medians over rounds: the share of workers' time in which they are idle, and the round beside the best."""
    idle, slower, conditions = [], [], Conditions(seed=0, block_size=1)
    with tempfile.TemporaryDirectory() as folder, closing(made("ray", len(speeds))) as running:
        paced = Around(running, lambda job: Paced(job, Path(folder), speeds, block_s))
        algorithm, problem = begun(paced, blocks)
        for record in simulate(algorithm, {"x": {"w": torch.ones(1)}}, problem, conditions, paced, warmup + rounds):
            file = Path(folder) / "blocks"
            spans = [tuple(map(float, line.split())) for line in file.read_text(encoding="utf-8").splitlines()]
            os.truncate(file, 0)
            assert len(spans) == blocks
            took = max(end for _, end in spans) - min(begin for begin, _ in spans)
            if record.index >= warmup:
                idle.append(1 - sum(end - begin for begin, end in spans) / (len(speeds) * took))
                slower.append(took / best(speeds, blocks, block_s))
    return {"idle": median(idle), "over_best": median(slower)}


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.unlike", __doc__)
    ask.add_argument("--blocks", type=command.count, nargs="+", default=[8, 16, 32, 64], help="a round")
    ask.add_argument("--block-s", type=command.seconds, default=0.1, help="of the fastest (default 0.1)")
    ask.add_argument("--rounds", type=command.count, default=12)
    ask.add_argument("--warmup", type=command.count, default=4, help="rounds in which speeds are learnt")
    ask.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    args = ask.parse_args(argv)
    found = []
    for name, speeds in FLEETS.items():
        for blocks in args.blocks:
            say(f"{name}: {blocks} blocks")
            row = measure(speeds, blocks, args.block_s, args.rounds, args.warmup)
            found.append({"workers": name, "blocks": blocks, **row})
    if args.json:
        print(json.dumps(found))
        return
    title = f"Four workers, blocks of {args.block_s:g} s on the fastest: idle share of a round / round over the best there is"
    rows = [
        [name, *(f"{r['idle']:.1%} / {r['over_best']:.2f}" for r in found if r["workers"] == name)] for name in FLEETS
    ]
    command.show(title, ["workers", *(f"{n} blocks" for n in args.blocks)], rows)


if __name__ == "__main__":
    main()
