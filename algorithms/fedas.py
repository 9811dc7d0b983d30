"""FedAS: a client turns the body it is sent towards its own old one before it trains; those that learn much count for more.

Yang, Huang & Ye, "FedAS: bridging inconsistency in personalized federated learning", CVPR 2024, Algorithm 1. A round of a client
with a model of its own, of which the head never travels:

    a    c_y, the mean features of its classes under its old body
    b    align_epochs of steps of the body it is sent, towards sum over the classes y in a batch of mean (f - c_y)^2
    c    local training of that body and its head, which together are its model from now on
    d    F_u, the sum over its batches of |grad NLL|^2, by which its body counts in the mean

    paper        here
    F_u          the weight of the phase "train"
    eta of b     align_lr

The public code aligns the server's body in place, so that one client's goes on to the next; here a copy is. A client that has
not been asked before has no old body, and leaves out a and b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.keeping import averaged, cut
from fedfleet.algorithms.local import EVERYTHING, Training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.algorithms.prototypes import Moments, target
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
    StepInfo,
    T,
    Task,
    Tree,
)

LEAST = 1e-12  # weight of a client whose gradients all vanish


class FedAsOptions(LocalOptions):
    """Options of FedAS."""

    client_optimizer: LocalOptimizer = LocalOptimizer()
    align_lr: float = Field(default=0.01, ge=0)
    """Rate of the steps that turn the body that is sent."""
    align_epochs: int = Field(default=1, ge=1)
    """Passes over the local data for that."""


class _Kept(NamedTuple):
    """What a client keeps: its model, and 1 once it has been asked."""

    z: Tree
    asked: Tensor


class _As(NamedTuple):
    """A client in the middle: its model, the optimiser's state, its features under its old body, the sum of F_u, what it kept."""

    z: Tree
    optimizer: Any
    old: Moments
    information: Tensor
    client_state: _Kept


def fedas(options: FedAsOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAS."""
    at = cut(task, "head", "fedas", needs="aligned")
    rule = options.client_optimizer.build()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _As:
        z = at.whole(shared["z"], at.stays(client_state.z))
        return _As(z, rule.init(z), Moments.none(at, z), torch.zeros_like(client_state.asked), client_state)

    def look(ops: Ops, shared: Mapping[str, Any], local: _As, batch: Batch, where: StepInfo, key: Key) -> _As:
        return local._replace(old=local.old.plus(ops, local.client_state.z, batch))

    def align(ops: Ops, shared: Mapping[str, Any], local: _As, batch: Batch, where: StepInfo, key: Key) -> _As:
        d = ops.grad("aligned", local.z, batch, key, ctx=target(local.old.means(), local.old.known))[0]
        turned = ops.step("train", local.z, shared["align_lr"], at.still(d, kept=True))
        # Of a new client not even statistics move, as they would at a rate of 0.
        return local._replace(z=T.where(local.client_state.asked > 0, turned, local.z))

    def train(ops: Ops, shared: Mapping[str, Any], local: _As, batch: Batch, where: StepInfo, key: Key) -> _As:
        d, after = rule.update(local.optimizer, ops.grad("train", local.z, batch, key)[0], local.z)
        return local._replace(z=ops.step("train", local.z, shared["lr"], d), optimizer=after)

    def inform(ops: Ops, shared: Mapping[str, Any], local: _As, batch: Batch, where: StepInfo, key: Key) -> _As:
        g = {"x": ops.grad("train", local.z, batch, key)[0]["x"]}
        return local._replace(information=local.information + T.dot(g, g))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: _As
    ) -> tuple[Message, Tree]:
        weight = {"information": local.information.clamp(min=LEAST)}
        return Message({"z": at.travels(local.z)}, weight), _Kept(local.z, torch.ones_like(client_state.asked))

    def mine(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: _As) -> tuple[Message, Tree]:
        return Message({"z": local.z}), client_state

    def fresh(shared: Mapping[str, Any]) -> Tree:
        z = at.whole(shared["z"], shared["initial"])
        return _Kept(z, torch.zeros((), dtype=T.leaves(z)[0].dtype, device=T.leaves(z)[0].device))

    once = replace(options.plan(), steps=None, epochs=1)
    before = (
        LocalLoop(step=look, batches=EVERYTHING),
        LocalLoop(step=align, batches=replace(once, epochs=options.align_epochs)),
    )
    stages = (*before, LocalLoop(step=train, batches=options.plan()), LocalLoop(step=inform, batches=once))
    work = Training(client_init=client_init, loops=stages, client_final=client_final, divisible=False)
    phase = Phase(name="train", work=work, reduce={"z": Mean()}, weight="information", client_state=fresh, model="z")

    own_model = LocalWork(client_init=client_init, loops=before, client_final=mine)
    return averaged(options, task, cohort, at, phase, own_model, {"align_lr": options.align_lr})
