"""Ditto: beside its share in the global model each client trains one of its own, held near the global one.

Li, Hu, Beirami & Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021, Algorithm 1 with FedAvg
for the global model: v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)). With lambda = 0 a client's own model is what it
learns alone.

    paper          here
    w^t, v_k       z, a client's state
    lambda         pull
    s, eta         own_steps or own_epochs, lr
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.local import Local, Training, gradient, proximal, replaced
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


class DittoOptions(AveragingOptions):
    """Options of Ditto."""

    pull: float = Field(default=0.1, ge=0)
    """Weight of the proximal term that holds a client's own model near the global one, lambda."""
    own_steps: int | None = Field(default=None, ge=1)
    """Local steps of a client's own model; with neither this nor ``own_epochs``, as many as of the global one."""
    own_epochs: int | None = Field(default=None, ge=1)
    """Passes over the local data for a client's own model."""

    @model_validator(mode="after")
    def _one_own_length(self) -> DittoOptions:
        if self.own_steps is not None and self.own_epochs is not None:
            raise ValueError("give own_steps or own_epochs, not both")
        return self

    def own_plan(self) -> BatchPlan:
        """Return the batch plan of a client's own model."""
        if self.own_steps is None and self.own_epochs is None:
            return self.plan()
        return replace(self.plan(), steps=self.own_steps, epochs=self.own_epochs)


class State(NamedTuple):
    """The global model, and the initial one, which is every client's own in the beginning."""

    z: Tree
    initial: Tree


def ditto(options: DittoOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Ditto."""
    rule = options.client_optimizer.build()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        return Local(shared["z"], (rule.init(shared["z"]), rule.init(client_state)), client_state)

    def fit(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        d, after = rule.update(local.optimizer[0], gradient(ops, shared, local, batch, at, key), local.z)
        moved = ops.step("train", local.z, shared["lr"], d)
        return local._replace(z=moved, optimizer=replaced(local.optimizer, 0, after))

    def fit_own(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        d = proximal(
            ops.grad("train", local.client_state, batch, key)[0], local.client_state, shared["z"], shared["pull"]
        )
        d, after = rule.update(local.optimizer[1], d, local.client_state)
        moved = ops.step("train", local.client_state, shared["lr"], d)
        return local._replace(optimizer=replaced(local.optimizer, 1, after), client_state=moved)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        return Message({"z": local.z}), local.client_state

    def mine(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local) -> tuple[Message, Tree]:
        return Message({"z": local.client_state}), client_state

    def initial(shared: Mapping[str, Any]) -> Tree:
        return shared["initial"]

    stages = (LocalLoop(step=fit, batches=options.plan()), LocalLoop(step=fit_own, batches=options.own_plan()))
    work = Training(client_init=client_init, loops=stages, client_final=client_final)
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, client_state=initial, model="z")

    def message(state: State, t: int) -> Message:
        config = {"lr": options.rates(t, task.parts), "pull": options.pull}
        return Message({"z": state.z}, config, {"initial": state.initial})

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        result = rnd.map_reduce(train, shared=message(state, rnd.index), cohort=rnd.invite(cohort.size))
        return state._replace(z=result["z"]), {}

    return Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda state: state.z)},
        minimises=True,
        buffers=True,
        personal=Personal(message, LocalWork(client_init=client_init, loops=(), client_final=mine), initial),
    )
