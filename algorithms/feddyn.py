"""FedDyn: a linear term of each client moves its own optimum to the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough & Saligrama, "Federated learning based on dynamic regularization", ICLR 2021,
Algorithm 1.

    paper            here
    theta, theta_i   shared z, local.z
    grad L_k         own, g_i (zeros at first)
    h                state.h, the mean of all g_i with its sign turned: here of the same sign, h = mean g_i
    alpha            alpha

    clients descend f_i(theta) - <g_i, theta> + (alpha/2) |theta - x|^2;   g_i <- g_i - alpha (theta_i - x)
    h <- h - (alpha/N) sum_H (theta_i - x);   x <- mean_H theta_i - h / alpha

The fixed point is the optimum, whoever is heard: there theta_i = x and g_i = grad f_i(x), of which h is the mean, 0. The authors'
code evaluates x, and mean_H theta_i, which the server has before it moves by h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.control import no_control, share
from fedfleet.algorithms.local import Local, local_training, proximal
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    Key,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
    sgd,
)


class FedDynOptions(LocalOptions):
    """Options of FedDyn."""

    alpha: float = Field(default=0.1, gt=0)
    """Weight of the regulariser."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest Euclidean norm of a local direction; 10 in the authors' code."""
    weight: Literal["num_examples", "uniform"] = "uniform"
    """How much a client counts in the mean and in h; the paper's is uniform."""
    evaluate: Literal["sent", "completed"] = "sent"
    """sent: the model that clients are sent; completed: the mean of the models of those heard, not moved by the linear term."""


class State(NamedTuple):
    """The model that clients are sent, h, and the mean of the models of those heard, where it is evaluated."""

    z: Tree
    h: Tree
    mean: Tree = None


def _regularised(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return grad f_i - g_i + alpha (theta - x)."""
    d = T.sub(ops.grad("train", local.z, batch, key)[0], local.client_state)
    return proximal(d, local.z, shared["z"], shared["alpha"])


def feddyn(options: FedDynOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedDyn."""

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        moved = T.sub(local.z, shared["z"])
        return Message(send={"dz": moved}), T.axpy(-options.alpha, moved, client_state)

    work = local_training(options.plan(), _regularised, sgd(clip_norm=options.clip_norm), client_final)
    train = Phase(name="train", work=work, reduce={"dz": Mean()}, weight=options.weight, client_state=no_control)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(z), z if options.evaluate == "completed" else None)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        config = {"lr": options.rates(rnd.index, task.parts), "alpha": options.alpha}
        shared = Message(send={"z": state.z}, config=config)
        result = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        part = share(result.received, rnd.problem, options.weight)
        h = T.axpy(-options.alpha * part, result["dz"], state.h)
        mean = T.add(state.z, result["dz"])
        return State(T.axpy(-1 / options.alpha, h, mean), h, mean if options.evaluate == "completed" else None), {}

    view = View(lambda state: state.z if options.evaluate == "sent" else state.mean)
    return Algorithm(init, round, (train,), {"global": view})
