"""Local training with control variates: the client work of SCAFFOLD and of methods built on it.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, Algorithm 1, option II.

    paper          here
    x, y_i         shared z, local.z
    c, c_i         shared c, client_state (a client's state), in direction space: of ascent with the sign turned
    eta_l          shared lr

Option II's (x - y_i) / (K eta_l) is the mean of the directions taken, and is computed as that: a difference of points loses
its digits as steps become small beside the model, and its quotient overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.local import Direction, Local, Training, gradient
from fedfleet.simulator.author import (
    Batch,
    BatchPlan,
    Key,
    LocalLoop,
    Message,
    Ops,
    Optimizer,
    Problem,
    StepInfo,
    T,
    Tree,
    sgd,
)


class Drift(NamedTuple):
    """What a client carries besides its point: the correction c - c_i, the sum of directions taken, the steps it has done."""

    correction: Tree
    taken: Tree
    steps: Any


def no_control(shared: Mapping[str, Any]) -> Tree:
    """Return the control variate of a client that has none yet: zeros."""
    return T.zeros_like(shared["z"])


def share(clients: Tensor, problem: Problem, weight: str) -> float:
    """Return what these clients weigh of all: |S| / N where all count alike."""
    if weight == "uniform" or problem.num_examples is None:
        return len(clients) / problem.clients
    return float(problem.num_examples(clients).sum()) / (problem.clients * problem.mean_examples)


def controlled(
    plan: BatchPlan,
    direction: Direction = gradient,
    parts: tuple[str, ...] | None = None,
    optimizer: Optimizer | None = None,
) -> Training:
    """Step along ``direction`` + c - c_i, in the given ``parts`` of the model if not in all; send the changes of z and c_i.

    What ``optimizer`` makes of the direction takes its place; it does not see the correction.
    """
    rule = optimizer or sgd()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        none_yet = torch.zeros((), dtype=T.leaves(client_state)[0].dtype, device=key.device)
        start = Drift(T.sub(shared["c"], client_state), T.zeros_like(client_state), none_yet)
        return Local(shared["z"], rule.init(shared["z"]), start)

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        correction, taken, steps = local.client_state
        d, state = rule.update(local.optimizer, direction(ops, shared, local, batch, at, key), local.z)
        d = {p: T.add(d[p], correction[p]) if parts is None or p in parts else d[p] for p in d}  # l. 10
        moved = ops.step("train", local.z, shared["lr"], d)
        return Local(moved, state, Drift(correction, T.add(taken, d), steps + 1))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        # l. 12, option II: c_i+ = c_i - c + (x - y_i) / (K eta_l), with the steps this client really did
        correction, taken, steps = local.client_state
        control = T.sub(T.scale(1.0 / steps, taken), correction)
        return Message(send={"dz": T.sub(local.z, shared["z"]), "dc": T.sub(control, client_state)}), control  # l. 13

    return Training(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)
