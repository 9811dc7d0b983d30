"""Cost of client dropout: ``python -m benchmarks.dropout --case logistic``.

Of 100 invited clients about 70 answer, others in each round. Beside it 70 are invited, and all answer. The sizes of
clients are log-uniform, from 10 to 1,000 examples, and clients take the case's local steps. The figure compared is
the time per client that answers, from the 200th round on, with blocks captured as in any run. Both run in this
process with one thread, by the engine's own rule for the case, and take turns round by round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from benchmarks import turns, world
from benchmarks.peers.workload import CLASSES, Case
from benchmarks.world import World
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.availability import Always, Availability, Bernoulli
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.population import InMemoryPopulation

WARMUP = 200
RATE, INVITED, CLIENTS, FEWEST, MOST = 0.7, 100, 300, 10, 1000


def population(case: Case) -> InMemoryPopulation:
    """Return clients of very different sizes."""
    key = rng.fold(rng.key(case.seed), "dropout")
    sizes = (FEWEST * (MOST / FEWEST) ** rng.uniform(rng.fold(key, "sizes"), (CLIENTS,), torch.float64)).long()
    total = int(sizes.sum())
    x = rng.normal(rng.fold(key, "x"), (total, *case.shape))
    y = rng.bits(rng.fold(key, "y"), (total,)) % CLASSES
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    domain = torch.zeros(CLIENTS, dtype=torch.int64)
    return InMemoryPopulation({"x": x, "y": y}, torch.arange(total), offsets, domain)


def _rounds(of: World, executor: LocalExecutor, online: Availability, rounds: int) -> Iterator[float]:
    """Yield the seconds that each round takes a client that is heard."""
    how = world.rule(of)
    executor.start(replace(world.setup(of, how.inner), captures=Captures()))
    conditions = Conditions(seed=of.case.seed, block_size=how.block_size, federation=Federation(availability=online))
    z = of.task.init(of.case.seed)
    for record in simulate(of.algorithm, z, world.problem(of), conditions, executor, rounds):
        yield record.seconds / record.phases[0].counts["completed"]


def measure(case: Case, number: int) -> dict[str, Any]:
    """Return milliseconds a client that is heard, medians, and that with dropout over that without."""
    case = replace(case, warmup=WARMUP)
    clients, rounds = population(case), case.warmup + number
    ways = {"all answer": (round(RATE * INVITED), Always()), f"{RATE:.0%} answer": (INVITED, Bernoulli(RATE))}
    with ExitStack() as stack:
        under_way = {
            name: _rounds(
                world.build(replace(case, clients=CLIENTS, cohort=cohort), clients),
                stack.enter_context(closing(LocalExecutor(1))),
                online,
                rounds,
            )
            for name, (cohort, online) in ways.items()
        }
        first, second = ways
        return turns.taken(under_way, case, number, first, [second])


def shown(case: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield what is read of it."""
    yield f"{case}, one process, one thread"
    for name, ms in found["ms"].items():
        over = found["over"].get(name)
        yield f"{name:12} {ms:8.4f} ms a client{turns.times(over)}"


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    turns.main("benchmarks.dropout", __doc__, 100, argv, lambda case, number: measure(case, number), shown)


if __name__ == "__main__":
    main()
