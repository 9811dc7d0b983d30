"""CODA+ and CODASCA: stages of local descent-ascent around an anchor, with ever smaller steps.

Yuan, Guo, Xu, Ying & Yang, "Federated deep AUC maximization for heterogeneous data with a constant communication complexity",
ICML 2021, with a sampled cohort. Averages are unweighted. CODASCA adds control variates, so its clients have state.

    paper              here
    v = (w, a, b)      z["x"]
    alpha              z["y"]
    eta_0 / 3^s        lr / stage_factor^s, of both parts
    v_0 of a stage     anchor
    1 / gamma          theta
    T_0                stage_iterations, in local steps: a stage has floor(T_0 / K) rounds
    c, c_i, eta_g      c, a client's state, global_lr (CODASCA)

Neither sets the control variates back when a stage begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.control import controlled, no_control
from fedfleet.algorithms.local import Local, gradient, local_training, proximal
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
    T,
    Task,
    Tree,
    View,
)


class StageOptions(LocalOptions):
    """Options of local descent-ascent in stages."""

    theta: float = Field(default=0.0, ge=0)
    """Weight of the proximal term (theta/2) |x - anchor|^2, of the primal part alone."""
    stage_iterations: int = Field(default=4000, ge=1)
    """Local steps a stage, T_0; a stage has at least one round."""
    stage_factor: float = Field(default=3.0, ge=1)
    """What the steps are divided by at every new stage."""
    anchor: Literal["last", "stage_average"] = "last"
    """Where a stage is anchored: at the last model of the one before, or at the mean of that stage's models."""


class CodaOptions(StageOptions):
    """Options of CODA+."""

    correction: Correction = Correction()
    """Correction for clients that are heard less often than others."""


class CodascaOptions(StageOptions):
    """Options of CODASCA."""

    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta_g."""
    dual_control: bool = True
    """Correct the steps of y too; false is CDMA's released code, which has another limit than the saddle."""


class State(NamedTuple):
    """The model, the anchor of the stage, the mean of the stage's x so far; the server's control variate (CODASCA)."""

    z: Tree
    anchor: Tree
    mean: Tree
    c: Tree


class Stage(NamedTuple):
    """The stage that a round is in, from 0, and its rounds that are done."""

    number: int
    done: int

    @staticmethod
    def of(options: StageOptions, rnd: Round) -> Stage:
        """Return the stage of a round."""
        rounds = max(1, options.stage_iterations // options.local_steps(rnd.problem.mean_examples))
        return Stage(*divmod(rnd.index, rounds))

    def begin(self, options: StageOptions, state: State) -> State:
        """Return the state with the anchor of the stage."""
        if self.done:
            return state
        average = options.anchor == "stage_average" and self.number
        return state._replace(anchor=state.mean if average else state.z["x"])

    def message(self, options: StageOptions, task: Task, state: State, t: int) -> Message:
        """Return what clients are sent; the anchor only where it is of use."""
        shrink = options.stage_factor**-self.number
        config = {"lr": {p: rate * shrink for p, rate in options.rates(t, task.parts).items()}}
        if not options.theta:
            return Message({"z": state.z}, config)
        return Message({"z": state.z, "anchor": {"x": state.anchor}}, {**config, "theta": options.theta})

    @classmethod
    def skipped(cls, options: StageOptions, state: State, rnd: Round) -> State:
        """Return the state after a round that nobody has answered: the model stays, and the stage goes on."""
        stage = cls.of(options, rnd)
        return stage.end(stage.begin(options, state), state.z)

    def end(self, state: State, z: Tree) -> State:
        """Return the state with the new model."""
        mean = T.axpy(1 / (self.done + 1), T.sub(z["x"], state.mean), state.mean) if self.done else z["x"]
        return state._replace(z=z, mean=mean)


def anchored(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the minibatch gradient with that of the proximal term."""
    d = gradient(ops, shared, local, batch, at, key)
    return proximal(d, local.z, shared["anchor"], shared["theta"]) if "anchor" in shared else d


def coda_plus(options: CodaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build CODA+."""
    train = Phase(name="train", work=local_training(options.plan(), anchored), reduce={"z": Mean()}, model="z")

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z["x"], z["x"], None)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        stage = Stage.of(options, rnd)
        state = stage.begin(options, state)
        shared = stage.message(options, task, state, rnd.index)
        z = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))["z"]
        return stage.end(state, z), {"stage": stage.number}

    view, skipped = View(lambda state: state.z), partial(Stage.skipped, options)
    made = Algorithm(init, round, (train,), {"global": view}, requires=("x", "y"), skipped=skipped)
    return correcting(options.correction, made, "train", "z", model=True, rates=True)


def codasca(options: CodascaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build CODASCA."""
    work = controlled(options.plan(), anchored, None if options.dual_control else ("x",))
    train = Phase(name="train", work=work, reduce={"dz": Mean(), "dc": Mean()}, client_state=no_control)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z["x"], z["x"], T.zeros_like(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        stage = Stage.of(options, rnd)
        state = stage.begin(options, state)
        shared = stage.message(options, task, state, rnd.index)
        shared = Message({**shared.send, "c": state.c}, shared.config)
        heard = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        state = stage.end(state, T.axpy(options.global_lr, heard["dz"], state.z))
        share = len(heard.received) / rnd.problem.clients
        return state._replace(c=T.axpy(share, heard["dc"], state.c)), {"stage": stage.number}

    view, skipped = View(lambda state: state.z), partial(Stage.skipped, options)
    return Algorithm(init, round, (train,), {"global": view}, requires=("x", "y"), skipped=skipped)
