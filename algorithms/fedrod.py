"""FedRoD: one body with two heads, a common one that every class counts alike for, and one of each client for what it is biased to.

Chen & Chao, "On bridging generic and personalized federated learning for image classification", ICLR 2022, Algorithm 1, with
balanced softmax and linear personal heads.

    paper                  here
    theta (f, h^G)         z: the body and the net's own head, averaged
    h^P_m                  a client's state, which begins as the net's head
    n_m,c                  counted by the client: a look at its labels

    a local step    z <- z - eta grad CE(h^G(f(x)) + ln n_c, y)
                    h^P <- h^P - eta grad CE(stopgrad h^G(f(x)) + h^P(stopgrad f(x)), y), with z as it was before the step

The common model predicts by h^G, a client's own by h^G + h^P. The hyper-network that could make personal heads is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.keeping import cut, initial, matrix
from fedfleet.algorithms.local import Training
from fedfleet.algorithms.options import CohortOptions
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
    Personal,
    Phase,
    Problem,
    Round,
    StepInfo,
    Task,
    Tree,
    View,
)

LABELS = 4096  # looked at together


class State(NamedTuple):
    """The common model, and the head it had in the beginning, which clients' own begin as."""

    z: Tree
    initial: Tree


class Rod(NamedTuple):
    """A client in the middle: the common model, its own head, the optimisers' states, its numbers of examples (classes,)."""

    z: Tree
    head: Tree
    optimizer: tuple[Any, Any]
    labels: Tensor


def fedrod(options: AveragingOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedRoD."""
    at_head = cut(task, "head", "fedrod", needs="balanced")
    rule = options.client_optimizer.build()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Rod:
        z, head = shared["z"], {"p": client_state["x"]}
        return Rod(z, head, (rule.init(z), rule.init(head)), torch.zeros_like(matrix(client_state)[:, 0]))

    def count(ops: Ops, shared: Mapping[str, Any], rod: Rod, batch: Batch, at: StepInfo, key: Key) -> Rod:
        of = (batch.y[:, None] == torch.arange(len(rod.labels), device=batch.y.device)).to(rod.labels.dtype)
        return rod._replace(labels=rod.labels + (of * batch.weight[:, None]).sum(0))

    def step(ops: Ops, shared: Mapping[str, Any], rod: Rod, batch: Batch, at: StepInfo, key: Key) -> Rod:
        lr, (of_z, of_head) = shared["lr"]["x"], rod.optimizer
        common = ops.grad("balanced", rod.z, batch, key, ctx=rod.labels)[0]
        personal = ops.grad("residual", {**rod.z, **rod.head}, batch, key)[0]
        d, of_z = rule.update(of_z, common, rod.z)
        e, of_head = rule.update(of_head, {"p": personal["p"]}, rod.head)
        return Rod(
            ops.step("balanced", rod.z, lr, d), ops.step("residual", rod.head, lr, e), (of_z, of_head), rod.labels
        )

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, rod: Rod
    ) -> tuple[Message, Tree]:
        return Message({"z": rod.z}), {"x": rod.head["p"]}

    def mine(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, rod: Rod) -> tuple[Message, Tree]:
        return Message({"z": {**rod.z, **rod.head}}), client_state

    look = LocalLoop(step=count, batches=BatchPlan(size=LABELS, epochs=1, shuffle=False, free=True))
    work = Training(
        client_init=client_init, loops=(look, LocalLoop(step=step, batches=options.plan())), client_final=client_final
    )
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, client_state=initial, model="z")

    def message(state: State, t: int) -> Message:
        return Message({"z": state.z}, {"lr": options.rates(t, task.parts)}, {"initial": state.initial})

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, at_head.stays(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        result = rnd.map_reduce(train, shared=message(state, rnd.index), cohort=rnd.invite(cohort.size))
        return state._replace(z=result["z"]), {}

    own_model = Personal(
        message, LocalWork(client_init=client_init, loops=(), client_final=mine), initial, "with_residual"
    )
    return Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda state: state.z)},
        minimises=True,
        buffers=True,
        personal=own_model,
    )
