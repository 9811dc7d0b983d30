"""Local training and full local gradients: the client work that most algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.author import (
    BUFFERS,
    At,
    Batch,
    BatchPlan,
    Key,
    LocalWork,
    Message,
    Ops,
    Optimizer,
    Stage,
    T,
    Tree,
    sgd,
)


class Local(NamedTuple):
    """A client in the middle of its local steps: the point, the optimiser's state, what the client brought along."""

    z: Tree
    optimizer: Any
    own: Tree


Direction = Callable[[Ops, Mapping[str, Any], Local, Any, At, Key], Tree]
"""``(ops, shared, local, batch, at, key) -> direction`` of one local step; a tuple of batches where the plan has several a step."""
Finish = Callable[[Mapping[str, Any], Tree, Tree, Local], tuple[Message, Tree]]


def gradient(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Tree:
    """Return the minibatch gradient at the current point: plain local SGD. Arguments as of ``Direction``."""
    return ops.grad("train", local.z, batch, key)[0]


def send_model(shared: Mapping[str, Any], own: Tree, inbox: Tree, local: Local) -> tuple[Message, Tree]:
    """Upload the final local point."""
    return Message(send={"z": local.z}), own


def send_change(shared: Mapping[str, Any], own: Tree, inbox: Tree, local: Local) -> tuple[Message, Tree]:
    """Upload how far the model has moved."""
    return Message(send={"dz": T.sub(local.z, shared["z"])}), own


def local_training(
    plan: BatchPlan, direction: Direction = gradient, optimizer: Optimizer | None = None, finish: Finish = send_model
) -> LocalWork:
    """Start at ``shared["z"]`` and step ``z - shared["lr"] * direction`` along the plan."""
    rule = optimizer or sgd()

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Local:
        return Local(shared["z"], rule.init(shared["z"]), own)

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Local:
        d, state = rule.update(local.optimizer, direction(ops, shared, local, batch, at, key), local.z)
        return Local(ops.step("train", local.z, shared["lr"], d), state, local.own)

    return LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish)


def carried(z: Tree, mean: Tree) -> Tree:
    """Return the model ``z`` with the buffers, if there are any, of the clients' mean, which no server step is about."""
    return {**z, BUFFERS: mean[BUFFERS]} if BUFFERS in mean else z


def zero(shared: Mapping[str, Any], key: Key) -> Tensor:
    """Return 0 in the type of the model that was sent, where the client is: what sums begin with."""
    return torch.zeros((), dtype=T.leaves(shared["z"])[0].dtype, device=key.device)


Evaluate = Callable[[Ops, Mapping[str, Any], Batch, Key], Tree]


def full_local(evaluate: Evaluate, slot: str, chunk: int) -> LocalWork:
    """Average ``evaluate(ops, shared, batch, key)`` exactly over all local examples, ``chunk`` at a time, and upload it.

    Where labelled and unlabelled examples have means of their own, it is exact as far as each chunk has its share of both.
    """

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Tree:
        return T.zeros_like(shared["z"])

    def step(ops: Ops, shared: Mapping[str, Any], total: Tree, batch: Batch, at: At, key: Key) -> Tree:
        share = (batch.count().double() / at.num_examples).to(T.leaves(total)[0].dtype)
        return T.axpy(share, evaluate(ops, shared, batch, key), total)

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, total: Tree) -> tuple[Message, Tree]:
        return Message(send={slot: total}), own

    everything = BatchPlan(size=chunk, epochs=1, shuffle=False, stratified="spread")
    return LocalWork(begin=begin, stages=(Stage(step=step, batches=everything),), finish=finish, divisible=False)


def gradient_at_z(ops: Ops, shared: Mapping[str, Any], batch: Batch, key: Key) -> Tree:
    """Return the gradient direction at the point that was sent."""
    return ops.grad("train", shared["z"], batch, key)[0]


def proximal(direction: Tree, z: Tree, anchor: Mapping[str, Tree], weight: float | Mapping[str, float]) -> Tree:
    """Return the direction with that of (weight/2) |z - anchor|^2 added: in the parts that the anchor has, whoever plays them."""
    of = weight if isinstance(weight, Mapping) else dict.fromkeys(direction, weight)
    pulled = anchor.keys() - {BUFFERS}
    return {p: T.axpy(of[p], T.sub(z[p], anchor[p]), d) if p in pulled else d for p, d in direction.items()}


def held(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Tree:
    """Return the minibatch gradient with a proximal term to the point that was sent, of weight ``shared["mu"]``.

    Arguments as of ``Direction``.
    """
    return proximal(gradient(ops, shared, local, batch, at, key), local.z, shared["z"], shared["mu"])
