"""Local training with control variates: the client work of SCAFFOLD and of methods built on it.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, Algorithm 1, option II.

    paper          here
    x, y_i         shared z, local.z
    c, c_i         shared c, own (a client's state), in direction space: of ascent with the sign turned
    eta_l          shared lr
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fedfleet.algorithms.local import Direction, Local, gradient
from fedfleet.simulator.author import At, Batch, BatchPlan, Key, LocalWork, Message, Ops, Stage, T, Tree


class Drift(NamedTuple):
    """What a client carries besides its point: the correction c - c_i, the steps it has done."""

    correction: Tree
    steps: Any


def no_control(shared: Mapping[str, Any]) -> Tree:
    """Return the control variate of a client that has none yet: zeros."""
    return T.zeros_like(shared["z"])


def controlled(plan: BatchPlan, direction: Direction = gradient, parts: tuple[str, ...] | None = None) -> LocalWork:
    """Step along ``direction`` + c - c_i, in the given ``parts`` of the model if not in all; send the changes of z and c_i."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Local:
        none_yet = torch.zeros((), dtype=T.leaves(own)[0].dtype, device=key.device)
        return Local(shared["z"], None, Drift(T.sub(shared["c"], own), none_yet))

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Local:
        d, correction = direction(ops, shared, local, batch, at, key), local.own.correction
        d = {p: T.add(d[p], correction[p]) if parts is None or p in parts else d[p] for p in d}  # l. 10
        moved = ops.step("train", local.z, shared["lr"], d)
        return Local(moved, None, local.own._replace(steps=local.own.steps + 1))

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, local: Local) -> tuple[Message, Tree]:
        # l. 12, option II: c_i+ = c_i - c + (x - y_i) / (K eta_l), with the steps this client really did
        inverse = {p: 1.0 / (rate * local.own.steps) for p, rate in shared["lr"].items()}
        control = T.sub(T.scale(inverse, T.sub(shared["z"], local.z)), local.own.correction)
        return Message(send={"dz": T.sub(local.z, shared["z"]), "dc": T.sub(control, own)}), control  # l. 13

    return LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish)
