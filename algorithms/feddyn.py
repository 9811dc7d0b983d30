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

The fixed point is the optimum, whoever is heard: there theta_i = x and g_i = grad f_i(x), of which h is the mean, 0.
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
    At,
    Batch,
    Key,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
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


class State(NamedTuple):
    """The model that clients are sent, and h."""

    z: Tree
    h: Tree


def _regularised(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Tree:
    """Return grad f_i - g_i + alpha (theta - x)."""
    d = T.sub(ops.grad("train", local.z, batch, key)[0], local.own)
    return proximal(d, local.z, shared["z"], shared["alpha"])


def feddyn(options: FedDynOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedDyn."""

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, local: Local) -> tuple[Message, Tree]:
        moved = T.sub(local.z, shared["z"])
        return Message(send={"dz": moved}), T.axpy(-options.alpha, moved, own)

    work = local_training(options.plan(), _regularised, sgd(clip_norm=options.clip_norm), finish)
    train = Phase(name="train", work=work, reduce={"dz": Mean()}, weight=options.weight, own=no_control)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        config = {"lr": options.rates(rnd.index, task.parts), "alpha": options.alpha}
        shared = Message(send={"z": state.z}, config=config)
        found = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.invite))
        part = share(found.received, rnd.problem, options.weight)
        h = T.axpy(-options.alpha * part, found["dz"], state.h)
        return State(T.axpy(-1 / options.alpha, h, T.add(state.z, found["dz"])), h), {}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)})
