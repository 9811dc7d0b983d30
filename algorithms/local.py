"""Local training and full local gradients: the client work that most algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.author import (
    BUFFERS,
    Batch,
    BatchPlan,
    Key,
    LocalLoop,
    LocalWork,
    Message,
    Ops,
    Optimizer,
    StepInfo,
    T,
    Tree,
    sgd,
)


class Local(NamedTuple):
    """A client in the middle of its local steps: the point, the optimiser's state, what the client brought along."""

    z: Tree
    optimizer: Any
    client_state: Tree


@dataclass(frozen=True, kw_only=True)
class Training(LocalWork):
    """Local work whose carry has the state of the client's optimiser, as ``optimizer``, or as that of a ``local`` in it.

    An optimiser of each loop, or of each part, is an entry of a tuple there.
    """


def replaced(states: tuple[Any, ...], place: int, state: Any) -> tuple[Any, ...]:
    """Return the states of several optimisers with that at a place replaced."""
    return (*states[:place], state, *states[place + 1 :])


Direction = Callable[[Ops, Mapping[str, Any], Local, Any, StepInfo, Key], Tree]
"""``(ops, shared, local, batch, at, key) -> direction`` of one local step; a tuple of batches where the plan has several a step."""
ClientFinal = Callable[[Mapping[str, Any], Tree, Tree, Local], tuple[Message, Tree]]


def gradient(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the minibatch gradient at the current point: plain local SGD. Arguments as of ``Direction``."""
    return ops.grad("train", local.z, batch, key)[0]


def send_model(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local) -> tuple[Message, Tree]:
    """Upload the final local point."""
    return Message(send={"z": local.z}), client_state


def send_change(
    shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
) -> tuple[Message, Tree]:
    """Upload how far the model has moved."""
    return Message(send={"dz": T.sub(local.z, shared["z"])}), client_state


def local_training(
    plan: BatchPlan,
    direction: Direction = gradient,
    optimizer: Optimizer | None = None,
    client_final: ClientFinal = send_model,
) -> Training:
    """Start at ``shared["z"]`` and step ``z - shared["lr"] * direction`` along the plan."""
    rule = optimizer or sgd()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        return Local(shared["z"], rule.init(shared["z"]), client_state)

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        d, state = rule.update(local.optimizer, direction(ops, shared, local, batch, at, key), local.z)
        return Local(ops.step("train", local.z, shared["lr"], d), state, local.client_state)

    return Training(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)


def carried(z: Tree, mean: Tree) -> Tree:
    """Return ``z`` with the buffers of ``mean``, if it has any: of the clients' mean, which no server step is about."""
    return {**z, BUFFERS: mean[BUFFERS]} if BUFFERS in mean else z


def zero(shared: Mapping[str, Any], key: Key) -> Tensor:
    """Return 0 in the type of the model that was sent, where the client is: what sums begin with."""
    return torch.zeros((), dtype=T.leaves(shared["z"])[0].dtype, device=key.device)


def stepped(
    ops: Ops, objective: str, z: Tree, parts: Sequence[str], lr: Any, d: Tree, rule: Optimizer, state: Any
) -> tuple[Tree, Any]:
    """Return some parts of ``z`` after a step that ``rule`` makes of the direction ``d``, and the rule's state.

    Args:
        ops: of the client's step.
        objective: whose steps they are.
        z: the model, with these parts and others.
        parts: their names.
        lr: the learning rate.
        d: directions of these parts; with the running statistics of the last gradient, if the model has any.
        rule: the optimiser of these parts.
        state: that of the optimiser.

    """
    mine = {p: z[p] for p in parts}
    steps, state = rule.update(state, {p: d[p] for p in parts}, mine)
    return ops.step(objective, carried(mine, z), lr, carried(steps, d)), state


CHUNK = 512  # examples looked at together
EVERYTHING = BatchPlan(size=CHUNK, epochs=1, shuffle=False)


def over_all(
    begin: Callable[[Mapping[str, Any], Key], Any],
    add: Callable[[Ops, Mapping[str, Any], Any, Batch, StepInfo, Key], Any],
    tell: Callable[[Any], Mapping[str, Tree]],
    plan: BatchPlan | None = None,
) -> LocalWork:
    """Look at all of a client's examples at a model that stays: ``begin(shared, key) -> total``, to which each batch adds.

    Args:
        begin: what there is before the first batch.
        add: ``(ops, shared, total, batch, at, key) -> total``.
        tell: of the total, what is sent by slot.
        plan: one pass over the examples; ``EVERYTHING`` if not given.

    """

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Any:
        return begin(shared, key)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, total: Any
    ) -> tuple[Message, Tree]:
        return Message(send=tell(total)), client_state

    loops = (LocalLoop(step=add, batches=plan or EVERYTHING),)
    return LocalWork(client_init=client_init, loops=loops, client_final=client_final, divisible=False)


Evaluate = Callable[[Ops, Mapping[str, Any], Batch, Key], Tree]


def full_local(evaluate: Evaluate, slot: str, chunk: int) -> LocalWork:
    """Average ``evaluate(ops, shared, batch, key)`` exactly over all local examples, ``chunk`` at a time, and upload it.

    Where labelled and unlabelled examples have means of their own, it is exact as far as each chunk has its share of both.
    """

    def add(ops: Ops, shared: Mapping[str, Any], total: Tree, batch: Batch, at: StepInfo, key: Key) -> Tree:
        share = (batch.count().double() / at.num_examples).to(T.leaves(total)[0].dtype)
        return T.axpy(share, evaluate(ops, shared, batch, key), total)

    everything = BatchPlan(size=chunk, epochs=1, shuffle=False, stratified="spread")
    return over_all(lambda shared, key: T.zeros_like(shared["z"]), add, lambda total: {slot: total}, everything)


def gradient_at_z(ops: Ops, shared: Mapping[str, Any], batch: Batch, key: Key) -> Tree:
    """Return the gradient direction at the point that was sent."""
    return ops.grad("train", shared["z"], batch, key)[0]


def proximal(direction: Tree, z: Tree, anchor: Mapping[str, Tree], weight: float | Mapping[str, float]) -> Tree:
    """Return the direction with that of (weight/2) |z - anchor|^2 added: in the parts that the anchor has, whoever plays them."""
    of = weight if isinstance(weight, Mapping) else dict.fromkeys(direction, weight)
    pulled = anchor.keys() - {BUFFERS}
    return {p: T.axpy(of[p], T.sub(z[p], anchor[p]), d) if p in pulled else d for p, d in direction.items()}


def held(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the minibatch gradient with a proximal term to the point that was sent, of weight ``shared["mu"]``.

    Arguments as of ``Direction``.
    """
    return proximal(gradient(ops, shared, local, batch, at, key), local.z, shared["z"], shared["mu"])
