"""FedIIR: clients whose classifiers would be moved alike, so that what is learnt holds wherever the data come from.

Guo, Guo, Cao, Wu & Chang, "Out-of-distribution generalization of federated learning via implicit invariant relationships", ICML
2023, Algorithm 1, with two exchanges a round:

    1    grad_cls F_u(theta; b) at the model that is sent, summed over a client's batches b; the server's running mean of them is
         g <- ema g + (1 - ema) mean over all batches of all clients
    2    local steps on CE + gamma |grad_cls CE - g|^2, of the batch's classifier gradient

    paper            here
    gamma, ema       penalty, ema
    classifier       the net's last layer, whose gradient has a closed form: no second derivatives are taken

Means of models are unweighted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.keeping import cut
from fedfleet.algorithms.local import Local, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
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
    Total,
    Tree,
    View,
)


class FedIirOptions(LocalOptions):
    """Options of FedIIR."""

    client_optimizer: LocalOptimizer = LocalOptimizer()
    penalty: float = Field(default=1e-3, ge=0)
    """Weight of how far a batch's gradient of the classifier is from the mean one, gamma; 1e-4 in FedOMG's Table 4. 0 is FedAvg."""
    ema: float = Field(default=0.95, ge=0, lt=1)
    """How much of the mean gradient is that of earlier rounds."""


class State(NamedTuple):
    """The model, and the running mean of the classifier's gradient."""

    z: Tree
    mean: Tree


class _Sum(NamedTuple):
    """The sum of a client's gradients, and their number."""

    gradient: Tree
    batches: Tensor


def fediir(options: FedIirOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedIIR."""
    head = cut(task, "head", "fediir", needs="invariant")

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Sum:
        at_head = head.stays(shared["z"])["x"]
        return _Sum(T.zeros_like(at_head), torch.zeros((), device=key.device))

    def look(ops: Ops, shared: Mapping[str, Any], result: _Sum, batch: Batch, at: StepInfo, key: Key) -> _Sum:
        d = ops.grad("train", shared["z"], batch, key)[0]
        return _Sum(T.add(result.gradient, head.stays(d)["x"]), result.batches + 1)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, result: _Sum
    ) -> tuple[Message, Tree]:
        return Message({"gradient": result.gradient, "batches": result.batches}), client_state

    plan = replace(options.plan(), steps=None, epochs=1)
    looking = LocalWork(
        client_init=client_init, loops=(LocalLoop(step=look, batches=plan),), client_final=client_final, divisible=False
    )
    collect = Phase(name="collect", work=looking, reduce={"gradient": Total(), "batches": Total()})

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        ctx = {"mean": shared["mean"], "penalty": shared["penalty"]}
        return ops.grad("invariant", local.z, batch, key, ctx=ctx)[0]

    work = local_training(options.plan(), direction, options.client_optimizer.build())
    train = Phase(name="train", work=work, reduce={"z": Mean()}, model="z", dated=True)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(head.stays(z)["x"]))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        invited = rnd.invite(cohort.size)
        result = rnd.map_reduce(collect, shared=Message({"z": state.z}), cohort=invited)
        now = T.scale(1 / float(result["batches"]), result["gradient"])
        mean = T.axpy(1 - options.ema, now, T.scale(options.ema, state.mean))
        config = {"lr": options.rates(rnd.index, task.parts), "penalty": options.penalty}
        shared = Message({"z": state.z, "mean": mean}, config)
        return State(rnd.map_reduce(train, shared=shared, cohort=invited)["z"], mean), {}

    return Algorithm(
        init,
        round,
        (collect, train),
        {"global": View(lambda state: state.z)},
        minimises=True,
        same_cohort=True,
        buffers=True,
    )
