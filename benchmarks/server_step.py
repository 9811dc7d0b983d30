"""Cost of FedOMG's server step: ``python -m benchmarks.server_step``.

A hundred clients train an MLP of 11 million floats, as many as ResNet-18 has, and the server matches their updates.
Uploads lie in a file, as in a run of this size, or in memory. The result has the seconds of the Gram matrix, of the
search and of the combination, and their share of a round. It also has the driver's peak memory above what it held
before the first round, in models.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks import command, engine, world
from benchmarks.command import say
from benchmarks.memory_use import Peak, give_back, own_bytes, resident_bytes
from benchmarks.peers.workload import Case
from benchmarks.world import How, World
from fedfleet.algorithms import omg
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.datasets.synthetic import SyntheticOptions, load
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.spill import SPILLED_BYTES
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.executors.base import Executor
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions

FEATURES, CLASSES, BATCH, FLOAT_BYTES = 3072, 10, 16, 4  # CIFAR-10's pixels; the paper's batches
PARTS = {"gram": (UploadMatrix, "gram"), "search": (omg, "mixture"), "combine": (UploadMatrix, "combine")}
STEP = (omg, "matched")  # all of these, and what little lies between them
WAYS = {"in a file": SPILLED_BYTES, "in memory": sys.maxsize}
TARGET = 0.05  # of a round


def width(floats: int) -> int:
    """Return how wide the two hidden layers of a net of about so many floats are."""
    both = FEATURES + 2 + CLASSES  # w^2 + both w + CLASSES of them
    return max(1, round((math.sqrt(both**2 + 4 * floats) - both) / 2))


def build(clients: int, floats: int, steps: int) -> World:
    """Return FedOMG on synthetic clients, each of which takes so many local steps a round."""
    case = Case("omg", "mlp", (FEATURES,), clients, clients, steps * BATCH, BATCH, lr=0.01, algorithm="omg")
    task = Classification(ModelOptions(model="mlp", hidden=(width(floats),) * 2), DataShape((FEATURES,), CLASSES))
    entry = ALGORITHMS["omg"]
    of = {"name": "fedavg", "steps": steps, "batch_size": BATCH, "lr": case.lr}
    options = entry.options.model_validate({"of": of})
    data = SyntheticOptions(features=FEATURES, classes=CLASSES, examples=case.samples, test_examples=1)
    algorithm = entry.build(options, task, CohortOptions(size=clients))
    return World(case, task, algorithm, load(data, clients, 0).population)


@contextmanager
def clocked() -> Iterator[dict[str, list[float]]]:
    """Give the seconds of each call of the parts of the server step."""
    took: dict[str, list[float]] = defaultdict(list)

    def on_the_clock(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            started = time.perf_counter()
            found = fn(*given)
            took[name].append(time.perf_counter() - started)
            return found

        return call

    places = {**PARTS, "step": STEP}
    patches = [patch.object(where, at, on_the_clock(name, getattr(where, at))) for name, (where, at) in places.items()]
    for p in patches:
        p.start()
    try:
        yield took
    finally:
        for p in patches:
            p.stop()


def measure(ready: World, how: How, executor: Executor, spilled_bytes: int, rounds: int) -> dict[str, Any]:
    """Play rounds; return seconds, medians over them, and the driver's memory. The executor has been started."""
    conditions = replace(world.conditions(ready, how), spilled_bytes=spilled_bytes)
    give_back()
    before, resident = own_bytes(), resident_bytes()
    with clocked() as took, Peak() as own, Peak(look=resident_bytes) as all_of_it:
        z = ready.task.init(0)
        model = T.num_bytes(z)
        records = simulate(ready.algorithm, z, world.problem(ready), conditions, executor, rounds)
        del z
        seconds = [r.seconds for r in records]
    return {
        "round_s": median(seconds),
        **{f"{name}_s": median(took[name]) for name in (*PARTS, "step")},
        "share": median(s / r for s, r in zip(took["step"], seconds, strict=True)),
        "peak_models": _models(own.bytes, before, model),
        "peak_resident_models": _models(all_of_it.bytes, resident, model),
        "floats": model // FLOAT_BYTES,
    }


def _models(peak: int | None, before: int | None, model: int) -> float | None:
    return None if peak is None or before is None else (peak - before) / model


def steps_for(found: dict[str, Any], steps: int, share: float) -> float:
    """Return with how many local steps the server step would be such a share of a round, the rest growing with them."""
    work = found["round_s"] - found["step_s"]
    return steps * found["step_s"] * (1 / share - 1) / work


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways on the same workers."""
    small = build(4, 1, 1)
    ready = build(args.clients, args.floats, args.steps)
    how = engine.choose(ready, "auto", args.block_size)
    found = {}
    with closing(engine.executor(args.executor, args.actors)) as executor:
        executor.start(world.setup(small, "serial"))
        measure(small, How("serial", 1), executor, 0, 2)  # what comes up once: workers, libraries
        executor.start(world.setup(ready, how.inner, capture=False))
        for way in args.way or WAYS:
            say(f"{args.clients} clients, {args.steps} local steps, uploads {way}")
            found[way] = measure(ready, how, executor, WAYS[way], args.rounds)
            found[way]["steps_for_target"] = steps_for(found[way], args.steps, TARGET)
    return {"clients": args.clients, "steps": args.steps, "how": engine.describe(args, how), "ways": found}


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.server_step", __doc__)
    ask.add_argument("--clients", type=command.count, default=100)
    ask.add_argument("--floats", type=command.count, default=11_000_000, help="of the net, about (default %(default)d)")
    ask.add_argument(
        "--steps", type=command.count, default=50, help="local steps a client, of 16 examples (default %(default)d)"
    )
    ask.add_argument("--rounds", type=command.count, default=1, help="of each way (default %(default)d)")
    ask.add_argument("--way", action="append", choices=list(WAYS), help="one way alone; default: both")
    ask.add_argument("--block-size", type=command.count, help="clients a block; default: the product's own choice")
    ask.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_workers(ask)
    args = ask.parse_args(argv)
    found = compare(args)
    if args.json:
        print(json.dumps({"machine": command.machine(), **found}))
        return
    floats = next(iter(found["ways"].values()))["floats"]
    title = f"{args.clients} clients, {floats:,} floats, {args.steps} local steps of {BATCH} examples; {found['how']}"
    keys = ("round_s", "gram_s", "search_s", "combine_s", "step_s", "share", "steps_for_target")
    memory = ("peak_models", "peak_resident_models")
    columns = ["uploads", "round, s", "Gram, s", "search, s", "combine, s", "server step, s", "share of the round"]
    columns += [f"local steps for {TARGET:.0%}", "driver, models", "resident, models"]
    rows = [
        [way, *(r[k] for k in keys), *("-" if r[k] is None else r[k] for k in memory)]
        for way, r in found["ways"].items()
    ]
    command.show(title, columns, rows)


if __name__ == "__main__":
    main()
