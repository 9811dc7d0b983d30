"""A tiny made-up federation, on which one phase can be run without an algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.reduction import CollectUploads
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup, run_block
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.block.task import BlockResult, BlockTask
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import BatchPlan, LocalLoop, LocalWork, Message, Objective, Phase


def make_population(sizes: tuple[int, ...], features: int = 3, seed: int = 0) -> InMemoryPopulation:
    """Clients of the given sizes, their rows scattered over the data; ``data["id"]`` numbers the examples."""
    total = sum(sizes)
    x = rng.normal(rng.key(seed), (total, features))
    y = (x.sum(1) > 0).to(torch.int64)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    order = rng.permutation(rng.key(seed + 1), total)
    data = {"x": x, "y": y, "id": torch.arange(total)}
    return InMemoryPopulation(data, order, offsets, torch.arange(len(sizes)) % 2)


def squares(z: Tree, batch: Any, ctx: Any, key: Any) -> tuple[Any, dict[str, Any]]:
    """Half the mean squared error of a linear model without intercept."""
    error = batch.x @ z["x"]["w"] - batch.y
    return 0.5 * batch.mean(error**2), {}


@dataclass(frozen=True)
class Federation:
    """Runs one phase of gradient steps for a block of clients."""

    population: InMemoryPopulation
    objective: Objective
    plan: BatchPlan

    def with_(self, **changes: Any) -> "Federation":
        """Return a federation with some fields replaced."""
        return replace(self, **changes)

    def run(
        self,
        inner: str,
        clients: list[int],
        *,
        step: Callable[..., Tree] | None = None,
        client_final: Callable[..., tuple[Message, Tree]] | None = None,
        reduce: Mapping[str, Any] | None = None,
        weight: str = "uniform",
        client_state: Tree = None,
        faults: Faults | None = None,
        captures: Captures | None = None,
        buckets: tuple[int, ...] = (),
    ) -> BlockResult:
        """Run the phase "train"; by default it takes the plan's steps with rate 0.1 and stores every final point.

        ``client_state`` holds the states of the clients (C, ...).
        """

        def sgd_step(ops: Any, shared: Any, z: Tree, batch: Any, at: Any, key: Any) -> Tree:
            return ops.step("train", z, 0.1, ops.grad("train", z, batch, key)[0])

        def send_point(shared: Any, client_state: Tree, client_input: Tree, z: Tree) -> tuple[Message, Tree]:
            return Message(send={"z": z}), client_state

        work = LocalWork(
            client_init=lambda shared, client_state, client_input, key: shared["z"],
            loops=(LocalLoop(step=step or sgd_step, batches=self.plan),),
            client_final=client_final or send_point,
        )
        phase = Phase(
            name="train", work=work, reduce={"z": CollectUploads()} if reduce is None else reduce, weight=weight
        )
        setup = Setup(
            population=self.population,
            phases={"train": phase},
            objectives={"train": self.objective},
            functions={},
            evaluation={},
            inner=inner,
            captures=captures or Captures(after=None),
        )
        ids = torch.tensor(clients)
        z = {"x": {"w": torch.zeros(self.population.data["x"].shape[1])}}
        task = BlockTask(
            "train", ids, torch.zeros_like(ids), rng.key(7), client_state=client_state, feedback=True, buckets=buckets
        )
        return run_block(setup, Message(send={"z": z}), task._replace(faults=faults or Faults()))


@pytest.fixture(scope="session")
def federation() -> Federation:
    """Six clients of unequal sizes with three features."""
    return Federation(
        make_population((5, 2, 9, 1, 4, 7)), Objective(loss=squares, sign={"x": 1}), BatchPlan(size=2, steps=3)
    )


@pytest.fixture(scope="session", params=["serial", "batched", "factored"])
def inner(request: pytest.FixtureRequest) -> str:
    """Each inner executor."""
    return request.param
