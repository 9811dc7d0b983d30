"""GT-HSGD: one step a round along the mean of the clients' recursive gradient estimates. An adaptation.

Xin, Khan & Kar, "A hybrid variance-reduced method for decentralized stochastic non-convex optimization", ICML 2021, minimises on a
graph; FedMM compares with it on a minimax problem, and so it is here: both parts alike, y by ascent. On a star, whose server hears
all, its gradient tracking and mixing come to a mean.

    paper        here
    b            b
    v_i, x_i     own, a client's state: its estimate, and the model it was last asked at

    v_i <- g_i(z; xi) + (1 - b) (v_i - g_i(z_i; xi)),   g_i(z; xi) the first time;   z <- z - eta mean v_i,   in direction space

One minibatch xi, two gradients on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field

from fedfleet.algorithms.fedprox_sgda import OneStepOptions
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import (
    Algorithm,
    At,
    Batch,
    Key,
    LocalWork,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
    Stage,
    T,
    Task,
    Tree,
    View,
)


class GtHsgdOptions(OneStepOptions):
    """Options of GT-HSGD."""

    b: float = Field(default=0.1, gt=0, le=1)
    """How much of an estimate is new; 1 is fedsgda."""


def nothing_yet(shared: Mapping[str, Any]) -> Tree:
    """Return the state of a client that has not been asked yet."""
    none = torch.zeros_like(T.leaves(shared["z"])[0]).sum()
    return {"z": shared["z"], "v": T.zeros_like(shared["z"]), "asked": none}


def gt_hsgd(options: GtHsgdOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build GT-HSGD; its state is z."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Tree:
        return own

    def step(ops: Ops, shared: Mapping[str, Any], own: Tree, batch: Batch, at: At, key: Key) -> Tree:
        here, _ = ops.grad("train", shared["z"], batch, key)
        there, _ = ops.grad("train", own["z"], batch, key)
        v = T.axpy(1.0 - options.b, T.sub(own["v"], there), here)
        return {**own, "v": T.where(own["asked"] > 0, v, here)}

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, new: Tree) -> tuple[Message, Tree]:
        asked = torch.ones_like(own["asked"])
        return Message(send={"v": new["v"]}), {"z": shared["z"], "v": new["v"], "asked": asked}

    work = LocalWork(begin=begin, stages=(Stage(step=step, batches=options.plan()),), finish=finish)
    estimate = Phase(name="estimate", work=work, reduce={"v": Mean()}, own=nothing_yet)

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        v = rnd.map_reduce(estimate, shared=Message(send={"z": z}), cohort=rnd.invite(cohort.invite))["v"]
        return task.objectives["train"].step(z, options.rates(rnd.index, task.parts), v), {}

    return Algorithm(init, round, (estimate,), {"global": View(lambda z: z)}, requires=("x", "y"))
