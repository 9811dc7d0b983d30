"""GT-HSGD: one step a round along the mean of the clients' recursive gradient estimates. An adaptation.

Xin, Khan & Kar, "A hybrid variance-reduced method for decentralized stochastic non-convex optimization", ICML 2021, minimises on a
graph; FedMM compares with it on a minimax problem, and so it is here: both parts alike, y by ascent. On a star, whose server hears
all, its gradient tracking and mixing come to a mean.

    paper        here
    b            b
    v_i, x_i     own, a client's state: its estimate, and the model it was last asked at

    v_i <- g_i(z; xi) + (1 - b) (v_i - g_i(z_i; xi)),   g_i(z; xi) the first time;   z <- z - eta mean v_i,   in direction space

One minibatch xi, two gradients on it. What layers keep count of at z goes up beside v, and the server takes its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from fedfleet.algorithms.fedprox_sgda import OneStepOptions
from fedfleet.algorithms.local import carried
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import (
    BUFFERS,
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
    Tree,
    View,
    trainable,
)


class GtHsgdOptions(OneStepOptions):
    """Options of GT-HSGD."""

    b: float = Field(default=0.1, gt=0, le=1)
    """How much of an estimate is new; 1 is fedsgda."""


def nothing_yet(shared: Mapping[str, Any]) -> Tree:
    """Return the state of a client that has not been asked yet."""
    none = torch.zeros_like(T.leaves(shared["z"])[0]).sum()
    return {"z": shared["z"], "v": T.zeros_like(trainable(shared["z"])), "asked": none}


def gt_hsgd(options: GtHsgdOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build GT-HSGD; its state is z."""

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tree:
        return carried(client_state, shared["z"])

    def step(ops: Ops, shared: Mapping[str, Any], mine: Tree, batch: Batch, at: StepInfo, key: Key) -> Tree:
        here, counted = ops.grad("train", shared["z"], batch, key)
        there, _ = ops.grad("train", mine["z"], batch, key)
        here, there = trainable(here), trainable(there)
        v = T.axpy(1.0 - options.b, T.sub(mine["v"], there), here)
        new = {**mine, "v": T.where(mine["asked"] > 0, v, here)}
        return carried(new, counted) if BUFFERS in mine else new

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, new: Tree
    ) -> tuple[Message, Tree]:
        asked = torch.ones_like(client_state["asked"])
        return Message(send={"v": carried(new["v"], new)}), {"z": shared["z"], "v": new["v"], "asked": asked}

    work = LocalWork(
        client_init=client_init, loops=(LocalLoop(step=step, batches=options.plan()),), client_final=client_final
    )
    estimate = Phase(name="estimate", work=work, reduce={"v": Mean()}, client_state=nothing_yet)

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        v = rnd.map_reduce(estimate, shared=Message(send={"z": z}), cohort=rnd.invite(cohort.size))["v"]
        return carried(task.objectives["train"].step(z, options.rates(rnd.index, task.parts), v), v), {}

    return Algorithm(init, round, (estimate,), {"global": View(lambda z: z)}, requires=("x", "y"), buffers=True)
