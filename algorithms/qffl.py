"""q-FFL: averaging that gives clients with large losses more weight.

Li, Sanjabi, Beirami & Smith, "Fair resource allocation in federated learning", ICLR 2020, Eq. (2) and Algorithm 2 (q-FedAvg):
minimise sum_k p_k / (q + 1) F_k^(q+1), p_k in proportion to a client's examples. q = 0 is FedAvg.

    paper          here
    F_k(w^t)       loss, of all examples of the client at the model that is sent
    L              1 / lr
    Delta w_k      (w^t - w_k) / lr
    Delta_k, h_k   delta, h

Cohorts are uniform and answers weighted by examples, where the paper draws devices by p_k and weighs them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.local import zero
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    BatchPlan,
    Key,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
)

LEAST = 1e-10  # a loss of 0 has no power below 0


class QfflOptions(LocalOptions):
    """Options of q-FFL."""

    q: float = Field(default=1.0, ge=0)
    """How much fairness: 0 is FedAvg, a large one the worst client alone."""
    loss_chunk: int = Field(default=500, ge=1)
    """Examples a client takes at once while it measures its loss; bounds memory, changes no result."""


class _Local(NamedTuple):
    """The loss at the start, and the point."""

    loss: Tensor
    z: Tree


def qffl(options: QfflOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build q-FedAvg; its state is z."""
    q = options.q

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Local:
        return _Local(zero(shared, key), shared["z"])

    def measure(ops: Ops, shared: Mapping[str, Any], local: _Local, batch: Batch, at: StepInfo, key: Key) -> _Local:
        share = batch.count() / at.num_examples
        return local._replace(loss=local.loss + share * ops.value("train", shared["z"], batch, key))

    def step(ops: Ops, shared: Mapping[str, Any], local: _Local, batch: Batch, at: StepInfo, key: Key) -> _Local:
        d = ops.grad("train", local.z, batch, key)[0]
        return local._replace(z=ops.step("train", local.z, shared["lr"], d))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: _Local
    ) -> tuple[Message, Tree]:
        loss, lipschitz = local.loss.clamp(min=LEAST), 1 / shared["lr"]["x"]
        moved = T.scale(lipschitz, T.sub(shared["z"], local.z))
        h = lipschitz * loss**q + (q * loss ** (q - 1) * T.dot(moved, moved) if q else 0.0)
        return Message({"delta": T.scale(loss**q, moved), "h": h}), client_state

    everything = BatchPlan(size=options.loss_chunk, epochs=1, shuffle=False)
    stages = (LocalLoop(step=step, batches=options.plan()), LocalLoop(step=measure, batches=everything))
    work = LocalWork(client_init=client_init, loops=stages, client_final=client_final, divisible=False)
    train = Phase(name="train", work=work, reduce={"delta": Mean(), "h": Mean()}, weight="num_examples")

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        shared = Message({"z": z}, {"lr": options.rates(rnd.index, task.parts)})
        heard = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        return T.axpy(-1.0 / float(heard["h"]), heard["delta"], z), {}

    return Algorithm(init, round, (train,), {"global": View(lambda z: z)}, minimises=True)
