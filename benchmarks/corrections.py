"""The cost of a correction for dropout, by the round: ``python -m benchmarks.corrections --case mlp``.

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
from benchmarks.world import World
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.availability import Bernoulli

CORRECTIONS = ("none", "known_p", "fedau", "mifa", "fedvarp")
RATE = 0.5


def corrected(of: World, correction: str) -> World:
    """Return a case whose mean is corrected."""
    entry, case = ALGORITHMS["fedavg"], of.case
    given = {"steps": case.steps, "batch_size": case.batch, "lr": case.lr, "correction": correction}
    return replace(of, algorithm=entry.build(entry.options(**given), of.task, CohortOptions(size=case.cohort)))


def measure(case: Case, number: int) -> dict[str, Any]:
    """Return milliseconds a round, medians, and that with each correction over that without."""
    of = world.build(case)
    how = world.rule(of)
    rounds = case.warmup + number
    with ExitStack() as stack:
        ways = {}
        for name in CORRECTIONS:
            executor = stack.enter_context(closing(LocalExecutor(1)))
            played = world.play(corrected(of, name), executor, how, rounds, online=Bernoulli(RATE))
            ways[name] = (record.seconds for record in played)
        return turns.taken(ways, case, number, CORRECTIONS[0], CORRECTIONS[1:])


def shown(case: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield what is read of it."""
    yield f"{case}, one process, one thread, {RATE:.0%} online"
    for name, ms in found["ms"].items():
        over = found["over"].get(name)
        yield f"{name:8} {ms:8.3f} ms a round{turns.times(over)}"


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    turns.main("benchmarks.corrections", __doc__, 60, argv, measure, shown)


if __name__ == "__main__":
    main()
