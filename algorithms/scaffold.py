"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, Algorithm 1.

    paper          here
    x, y_i         shared z, local.z
    c, c_i         shared c, own (a client's state)
    K, eta_l       steps (or epochs), lr
    eta_g          global_lr
    option II      how c_i is renewed (option I, which takes an extra pass over the data, is not offered)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import Field

from fedfleet.algorithms.local import Local, gradient
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.simulator import tree as T
from fedfleet.simulator.algorithm import Algorithm, Problem, Round, Task, View
from fedfleet.simulator.reduction import Mean
from fedfleet.simulator.rng import Key
from fedfleet.simulator.tree import Tree
from fedfleet.simulator.work import At, Batch, LocalWork, Message, Ops, Phase, Stage


class ScaffoldOptions(LocalOptions):
    """Options of SCAFFOLD."""

    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta_g."""


class State(NamedTuple):
    """The model x and the server control variate c."""

    z: Tree
    c: Tree


class Drift(NamedTuple):
    """What a client carries besides its point: its control variate, the correction c - c_i, the steps it has done."""

    control: Tree
    correction: Tree
    steps: Any


def scaffold(options: ScaffoldOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build SCAFFOLD with option II, whose control variates cost no extra gradient."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Local:
        return Local(shared["z"], None, Drift(own, T.sub(shared["c"], own), torch.zeros((), device=key.device)))

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Local:
        d = T.add(gradient(ops, shared, local, batch, at, key), local.own.correction)  # l. 10
        moved = ops.step("train", local.z, shared["lr"], d)
        return Local(moved, None, local.own._replace(steps=local.own.steps + 1))

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, local: Local) -> tuple[Message, Tree]:
        # l. 12, option II: c_i+ = c_i - c + (x - y_i) / (K eta_l), with the steps this client really did
        inverse = {p: 1.0 / (rate * local.own.steps) for p, rate in shared["lr"].items()}
        control = T.sub(T.scale(inverse, T.sub(shared["z"], local.z)), local.own.correction)
        return Message(send={"dz": T.sub(local.z, shared["z"]), "dc": T.sub(control, own)}), control  # l. 13

    train = Phase(
        name="train",
        work=LocalWork(begin=begin, stages=(Stage(step=step, batches=options.plan()),), finish=finish),
        reduce={"dz": Mean(), "dc": Mean()},
        own=lambda shared: T.zeros_like(shared["z"]),
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message(send={"z": state.z, "c": state.c}, config={"lr": options.rates(rnd.index, task.parts)})
        heard = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.invite))
        share = len(heard.received) / rnd.problem.clients  # |S| / N
        return State(
            T.axpy(options.global_lr, heard["dz"], state.z), T.axpy(share, heard["dc"], state.c)
        ), {}  # l. 16-17

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)})
