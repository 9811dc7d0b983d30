"""``python -m benchmarks.cluster.rounds ADDRESS ACTORS``: rounds on a cluster, timed; settings come as JSON, results go so.

Clients send back what they were sent, which takes no time; a block then lasts as long as it is told to, as if a GPU worked. So
nodes can be many on few cores, and what is measured is what fedfleet and Ray add.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.cluster.model import Setting
from benchmarks.command import say
from benchmarks.overhead import nothing
from fedfleet.simulator.algorithm import Algorithm, Problem, Round, View
from fedfleet.simulator.arithmetic.reduction import Mean
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.executors.base import Executor, Job
from fedfleet.simulator.executors.ray import RayExecutor
from fedfleet.simulator.executors.timed import TimedExecutor
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import BatchPlan, LocalLoop, LocalWork, Message, Phase

WARMUP, ROUNDS, MAPS = 2, 7, 7
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Lasting:
    """A job that takes so many seconds a block, or more."""

    job: Job
    seconds: float

    def __call__(self, setup: Setup, shared: Message, task: Any) -> Any:
        """Run the job, and wait."""
        until = time.monotonic() + self.seconds * (len(task.blocks) if isinstance(task, BlockTask) else 1)
        found = self.job(setup, shared, task)
        time.sleep(max(0.0, until - time.monotonic()))
        return found


class Around(TimedExecutor):
    """Another executor, timed, with something of one's own around each job."""

    def __init__(self, executor: Executor, around: Callable[[Job], Job]):
        super().__init__(executor)
        self._around = around

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Any) -> Iterator[Any]:
        """Map jobs with that around them."""
        return super().map(self._around(job), shared, tasks, **how)


def begun(executor: Executor, clients: int) -> tuple[Algorithm, Problem]:
    """Start an executor for clients of one example each that send back what they were sent; return what is run."""
    whose, algorithm = torch.arange(clients + 1), echo(clients)
    data = InMemoryPopulation({"x": torch.zeros(clients, 1)}, whose[:-1], whose, torch.zeros_like(whose[:-1]))
    phases = {p.name: p for p in algorithm.phases}
    executor.start(Setup(population=data, phases=phases, objectives={}, functions={}, evaluation={}, inner="batched"))
    return algorithm, Problem(clients, 1.0, data.num_examples)


def echo(clients: int) -> Algorithm:
    """Return an algorithm whose clients look at an example and send back the model, of which the server takes the mean."""
    look = LocalLoop(step=lambda ops, shared, carry, batch, at, key: carry, batches=BatchPlan(size=1, steps=1))
    work = LocalWork(
        client_init=lambda shared, client_state, client_input, key: None,
        loops=(look,),
        client_final=lambda shared, client_state, client_input, carry: (Message(send={"z": shared["z"]}), None),
    )
    phase = Phase(name="echo", work=work, reduce={"z": Mean()}, model="z")

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        return rnd.map_reduce(phase, shared=Message({"z": z}), cohort=rnd.invite(clients))["z"], {}

    return Algorithm(lambda z, key, problem: z, round, (phase,), {"global": View(lambda z: z)})


def measure(executor: Executor, of: Setting) -> dict[str, Any]:
    """Return medians of rounds: seconds of all, of the driver's parts, of the workers' together, and of a broadcast alone."""
    z: Tree = {"x": {"w": torch.ones(max(1, int(of.size) // FLOAT_BYTES))}}
    timed = Around(executor, lambda job: Lasting(job, of.block_s))
    algorithm, problem = begun(timed, of.clients)
    conditions = Conditions(seed=0, block_size=-(-of.clients // of.blocks))
    rounds, tallies = [], []
    for record in simulate(algorithm, z, problem, conditions, timed, WARMUP + ROUNDS):
        rounds.append(record.seconds)
        tallies.append(vars(timed.phases["echo"]))
        timed.reset()
    empty, full = (
        _seconds(lambda m=m: list(executor.map(nothing, m, range(of.actors)))) for m in (Message(), Message({"z": z}))
    )
    assert tallies[-1]["clients"] == of.clients
    parts = {
        k: median(t[k] for t in tallies[WARMUP:]) for k in ("put_s", "dispatch_s", "wait_s", "merge_s", "compute_s")
    }
    return {"round_s": median(rounds[WARMUP:]), **parts, "broadcast_s": max(0.0, full - empty)}


def _seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(MAPS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def main() -> None:
    """Run what standard input says, a list of settings."""
    address, actors = sys.argv[1], int(sys.argv[2])
    settings = [Setting(*given) for given in json.load(sys.stdin)]
    found = []
    with closing(RayExecutor(actors, address=address)) as executor:
        for i, of in enumerate(settings):
            say(
                f"{of.nodes} nodes, {i + 1} of {len(settings)}: {of.size / 1e6:g} MB, {of.blocks} blocks of {of.block_s:g} s"
            )
            found.append(measure(executor, of))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
