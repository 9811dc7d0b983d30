"""Local SGDA+: local SGDA whose dual gradients are taken at a snapshot of the primal part.

Deng & Mahdavi, "Local stochastic gradient descent ascent: convergence analysis and communication efficiency", AISTATS 2021,
Algorithm 2, with a sampled cohort. Averages are unweighted.

    paper          here
    x, y, x~       z["x"], z["y"], snapshot
    eta_x, eta_y   lr, dual_lr
    S              snapshot_refresh, in rounds

    x <- x - eta_x grad_x F_i(x, y; b),    y <- y + eta_y grad_y F_i(x~, y; b)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.local import Local, gradient, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.algorithms.participation import Correction, correcting
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
    Task,
    Tree,
    View,
)


class SgdaPlusOptions(LocalOptions):
    """Options of local SGDA+."""

    snapshot_refresh: Literal["every_step"] | Annotated[int, Field(ge=1)] = 1
    """Rounds after which the snapshot becomes the current x; "every_step" is local SGDA, and what CDMA's released code does."""
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others."""


class State(NamedTuple):
    """The model and the snapshot of its primal part."""

    z: Tree
    snapshot: Tree


def at_snapshot(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the primal gradient at (x, y) and the dual one at (x~, y), on the same minibatch."""
    here, _ = ops.grad("train", local.z, batch, key, wrt=("x",))
    snapshot = shared["snapshot"] if "snapshot" in shared else shared["z"]["x"]
    there, _ = ops.grad("train", {**local.z, "x": snapshot}, batch, key, wrt=("y",))
    return {"x": here["x"], "y": there["y"]}


def local_sgda_plus(options: SgdaPlusOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build local SGDA+."""
    period = options.snapshot_refresh
    work = local_training(options.plan(), gradient if period == "every_step" else at_snapshot)
    train = Phase(name="train", work=work, reduce={"z": Mean()}, model="z")

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z["x"])

    def refreshes(rnd: Round) -> bool:
        return period == "every_step" or rnd.index % period == 0

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        fresh = refreshes(rnd)
        snapshot = state.z["x"] if fresh else state.snapshot
        # A fresh snapshot is the x that is sent anyway.
        send = {"z": state.z} if fresh else {"z": state.z, "snapshot": snapshot}
        shared = Message(send, {"lr": options.rates(rnd.index, task.parts)})
        return State(rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))["z"], snapshot), {}

    def skipped(state: State, rnd: Round) -> State:
        return state._replace(snapshot=state.z["x"]) if refreshes(rnd) else state

    view = View(lambda state: state.z)
    made = Algorithm(init, round, (train,), {"global": view}, requires=("x", "y"), skipped=skipped)
    return correcting(options.correction, made, "train", "z", model=True, rates=True)
