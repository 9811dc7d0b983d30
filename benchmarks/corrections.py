"""What a correction for dropout costs a round: ``python -m benchmarks.corrections --case mlp``.

FedAvg on a case whose clients are online half of the time, without a correction and with each. All run in this process with one
thread, by the product's own rule for the case, round by round in turn, after the case's warm-up. Clients that remember keep a
model more, and send it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from benchmarks import turns, world
from benchmarks.peers.workload import Case
from benchmarks.world import How, World
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.responses import Federation

CORRECTIONS = ("none", "known_p", "fedau", "mifa", "fedvarp")
RATE = 0.5


def corrected(of: World, correction: str) -> World:
    """Return a case whose mean is corrected."""
    entry, case = ALGORITHMS["fedavg"], of.case
    given = {"steps": case.steps, "batch_size": case.batch, "lr": case.lr, "correction": correction}
    return replace(of, algorithm=entry.build(entry.options(**given), of.task, CohortOptions(invite=case.cohort)))


def _rounds(of: World, how: How, executor: LocalExecutor, rounds: int) -> Iterator[float]:
    """Yield the seconds that each round takes."""
    executor.start(world.setup(of, how.inner))
    conditions = replace(world.conditions(of, how), federation=Federation(availability=Bernoulli(RATE)))
    z = of.task.init(of.case.seed)
    for record in simulate(of.algorithm, z, world.problem(of), conditions, executor, rounds):
        yield record.seconds


def measure(case: Case, number: int) -> dict[str, Any]:
    """Return milliseconds a round, medians, and that with each correction over that without."""
    of = world.build(case)
    how = world.rule(of)
    with ExitStack() as stack:
        ways = {
            name: _rounds(
                corrected(of, name), how, stack.enter_context(closing(LocalExecutor(1))), case.warmup + number
            )
            for name in CORRECTIONS
        }
        return turns.taken(ways, case, number, CORRECTIONS[0], CORRECTIONS[1:])


def shown(case: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield what is read of it."""
    yield f"{case}, one process, one thread, {RATE:.0%} online"
    for name, ms in found["ms"].items():
        over = found["over"].get(name)
        times = f", {over['median']:.2f} times ({over['least']:.2f} to {over['most']:.2f})" if over else ""
        yield f"{name:8} {ms:8.3f} ms a round{times}"


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    turns.main("benchmarks.corrections", __doc__, 60, argv, measure, shown)


if __name__ == "__main__":
    main()
