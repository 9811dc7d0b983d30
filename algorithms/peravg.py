"""Per-FedAvg: a model from which every client is a step away from a good one of its own.

Fallah, Mokhtari & Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning
approach", NeurIPS 2020, Algorithm 1 with the first-order gradient (FO):

    w~ = w - alpha grad f(w; D),    w <- w - beta grad f(w~; D')

    paper          here
    alpha, beta    alpha (lr if not given), lr
    D, D'          two minibatches of a step, batch_size examples each
    tau            steps or epochs; an epoch goes through the local data once, two minibatches a step

The term with the Hessian is left out, as in the paper's FO, and D'' with it. In the code of FedOMG's experiments the local routine
runs twice a round: give twice the steps or epochs for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from fedfleet.algorithms.fedavg import FedAvgOptions, averaging
from fedfleet.algorithms.local import Local, local_training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import Algorithm, Key, Message, Ops, Personal, StepInfo, Task, Tree, rng


class PerAvgOptions(FedAvgOptions):
    """Options of Per-FedAvg."""

    alpha: float | None = Field(default=None, gt=0)
    """Rate of the step that every client takes from the model, alpha; that of the round if not given."""
    own_steps: int = Field(default=1, ge=1)
    """Steps of that rate on a minibatch each, from the global model to a client's own, which is evaluated."""

    @property
    def rates_by_epoch(self) -> bool:
        """Return false: alpha is a rate of the round."""
        return False


def peravg(options: PerAvgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Per-FedAvg."""

    def alpha(t: int) -> float:
        return options.alpha or options.lr * options.lr_schedule.at(t)

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batches: Any, at: StepInfo, key: Key) -> Tree:
        first, second = batches
        near = ops.step("train", local.z, shared["alpha"], ops.grad("train", local.z, first, key)[0])
        return ops.grad("train", near, second, rng.fold(key, "second"))[0]

    made = averaging(options, task, cohort, direction, lambda t: {"alpha": alpha(t)}, per_step=2)
    assert made.personal is not None
    towards = local_training(replace(options.plan(), steps=options.own_steps, epochs=None))

    model = made.personal.message

    def message(state: Any, t: int) -> Message:
        return Message(model(state, t).send, {"lr": dict.fromkeys(task.parts, alpha(t))})

    return made._replace(personal=Personal(message, towards))
