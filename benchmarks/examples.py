"""Cost of example-level privacy: ``python -m benchmarks.examples``, beside Opacus.

Rounds of private clients run one at a time and many at once. They take turns with rounds without privacy, and with a
loop over clients that uses Opacus' gradients of single examples. All run in this process with one thread, and ratios
are taken within a turn. Batches are shuffled, so that all have the same work. Drawn batches have rows to spare, and
are measured as well.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from benchmarks import lists, turns, world
from benchmarks.peers import workload
from benchmarks.peers.workload import Case
from fedfleet.commands.rules import How
from fedfleet.middleware.privacy.gradients import Gradients, private_examples
from fedfleet.simulator.executors.local import LocalExecutor

NORM, MULTIPLIER = 1.0, 0.5
WAYS = {
    "hidden, one at a time": ("serial", False),
    "hidden": ("batched", False),
    "hidden, drawn": ("batched", True),
}


def opacus_loop(case: Case) -> Callable[[int], None]:
    """Return a function that runs round t of FedAvg with private clients by Opacus."""
    warnings.filterwarnings("ignore", "Full backward hook")  # inputs need no gradients
    x, y = workload.data(case)
    model = GradSampleModule(workload.net(case))
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, lr=case.lr)
    private = DPOptimizer(sgd, noise_multiplier=MULTIPLIER, max_grad_norm=NORM, expected_batch_size=case.batch)

    def round(t: int) -> None:
        start = [p.detach().clone() for p in parameters]
        total = lists.zeros(start)
        for client in workload.cohort(case, t):
            lists.copy(parameters, start)
            for _ in range(case.epochs):
                batches = zip(x[client].split(case.batch), y[client].split(case.batch), strict=True)
                for rows, labels in batches:
                    private.zero_grad()
                    F.cross_entropy(model(rows), labels).backward()
                    private.step()
            lists.add(total, parameters)
        lists.scale(total, 1 / case.cohort)
        lists.copy(parameters, total)

    return round


def _timed(run: Callable[[int], None], rounds: int) -> Iterator[float]:
    for t in range(rounds):
        started = time.perf_counter()
        run(t)
        yield time.perf_counter() - started


def measure(case: Case, number: int) -> dict[str, Any]:
    """Return milliseconds a round, medians of so many turns, and each way's over that of private clients many at once."""
    plain = world.build(case)
    how, rounds = world.rule(plain), case.warmup + number
    hidden = {
        name: (
            How(inner, how.block_size),
            private_examples(plain.algorithm, Gradients(NORM, MULTIPLIER, drawn=drawn, calls={})),
        )
        for name, (inner, drawn) in WAYS.items()
    }
    with ExitStack() as stack:

        def play(way: How, algorithm: Any) -> Iterator[float]:
            executor = stack.enter_context(closing(LocalExecutor(1)))
            return (r.seconds for r in world.play(replace(plain, algorithm=algorithm), executor, way, rounds))

        under_way = {"nothing hidden": play(how, plain.algorithm)} | {name: play(*way) for name, way in hidden.items()}
        under_way["Opacus, a loop"] = _timed(opacus_loop(case), rounds)
        found = turns.taken(under_way, case, number, "hidden", under_way)
    return {"inner": how.inner, **found}


def shown(case: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield what is read of it."""
    yield f"{case}, {found['inner']} where nothing is hidden, one process, one thread"
    for name, ms in found["ms"].items():
        yield f"{name:22} {ms:8.1f} ms a round, {found['over'][name]['median']:.2f} times hidden"


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    turns.main("benchmarks.examples", __doc__, 15, argv, lambda case, number: measure(case, number), shown)


if __name__ == "__main__":
    main()
