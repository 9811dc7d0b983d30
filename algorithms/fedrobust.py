"""FedRobust: every client trains against an affine shift of its own inputs that makes its loss large.

Reisizadeh, Farnia, Pedarsani & Jadbabaie, "Robust federated learning: the case of affine distribution shifts", NeurIPS 2020,
Algorithm 1 (FLRA), with a sampled cohort. Averages are unweighted.

    paper              here
    w                  z, all that the task learns
    Lambda_i, delta_i  own, a client's state: {"scale", "offset"}, from 1 and 0; Lambda is diagonal, or one number a channel
    lambda             penalty: - penalty (|Lambda_i - I|^2 + |delta_i|^2)
    eta_1, eta_2       lr, shift_lr
    tau                steps

Clients take simultaneous steps of both, and the server averages w alone. ``adversary: shared`` is how FedMM's paper reads it: no
shift, but local descent-ascent on the task's own two players, which are both averaged; that is local_sgda.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from fedfleet.algorithms.local import local_training, proximal
from fedfleet.algorithms.local_sgda import averaged
from fedfleet.algorithms.options import CohortOptions, LocalOptions, refuse_others
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    BatchPlan,
    ConfigError,
    Key,
    LocalLoop,
    LocalWork,
    Message,
    Ops,
    StepInfo,
    T,
    Task,
    Tree,
)


class FedRobustOptions(LocalOptions):
    """Options of FedRobust."""

    adversary: Literal["affine", "shared"] = "affine"
    """affine: a private shift of each client's inputs; shared: the task's own second player."""
    shift: Literal["channel", "diagonal"] = "channel"
    """One scale and one offset a channel of images, or for each number of an input (affine only)."""
    penalty: float = Field(default=1.0, ge=0)
    """lambda, what keeps shifts small (affine only)."""
    shift_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the shifts; the same as ``lr`` if not given (affine only)."""

    @model_validator(mode="after")
    def _of_shifts(self) -> FedRobustOptions:
        if self.adversary == "shared":
            refuse_others(self, "adversary=shared", set(), {"shift", "penalty", "shift_lr"})
        return self

    def rates(self, t: int, parts: tuple[str, ...]) -> dict[str, float]:
        """Return the learning rates of round t, one a part of what clients step."""
        result = super().rates(t, parts)
        if self.adversary == "affine":
            result["shift"] = (self.lr if self.shift_lr is None else self.shift_lr) * self.lr_schedule.at(t)
        return result


def affine(plan: BatchPlan, penalty: float) -> LocalWork:
    """Step the model and the shift at once; send the model alone."""

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tree:
        return {**shared["z"], **client_state}

    def step(ops: Ops, shared: Mapping[str, Any], z: Tree, batch: Batch, at: StepInfo, key: Key) -> Tree:
        d, _ = ops.grad("shifted", z, batch, key)
        none = {"scale": torch.ones_like(z["shift"]["scale"]), "offset": torch.zeros_like(z["shift"]["offset"])}
        return ops.step("shifted", z, shared["lr"], proximal(d, z, {"shift": none}, 2 * penalty))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, z: Tree
    ) -> tuple[Message, Tree]:
        return Message(send={"z": {p: z[p] for p in shared["z"]}}), {"shift": z["shift"]}

    return LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)


def fedrobust(options: FedRobustOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedRobust; its state is z. Raises ConfigError for a task whose inputs cannot be shifted."""
    if options.adversary == "shared":
        return averaged(options, task, cohort, local_training(options.plan()))
    no_shift = getattr(task, "no_shift", None)
    if no_shift is None:
        raise ConfigError(
            f"algorithm.adversary='affine': {type(task).__name__} has no objective of shifted inputs: choose "
            f"task.name=classification or domain_adaptation, or adversary=shared"
        )

    def client_state(shared: Mapping[str, Any]) -> Tree:
        like = T.leaves(shared["z"])[0]
        return T.map(lambda v: v.to(like), no_shift(options.shift))

    built = averaged(options, task, cohort, affine(options.plan(), options.penalty), client_state=client_state)
    return built._replace(requires=("x",))
