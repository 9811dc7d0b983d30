"""FedSAM and MoFedSAM: local steps along gradients taken where the loss near the model is large, so that its minima are flat.

Qu, Li, Duan, Liu, Tang & Lu, "Generalized federated learning via sharpness aware minimization", ICML 2022, Algorithms 1 and 2:

    FedSAM      e = rho g / |g|,  g = grad F(w; B),    w <- w - eta grad F(w + e; B)
    MoFedSAM    w <- w - eta (beta grad F(w + e; B) + (1 - beta) Delta^r)

    paper           here
    rho, beta       rho, share
    Delta^r         state.before: what the model moved by in the last round, as a gradient a local step; steps are those that its
                    clients took in the mean, weighed as their models are, of which each sends its number

In FedOMG's code the gradient at w + e is clipped to a norm of 10: client_optimizer.clip_norm. There is no momentum there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.fedavg import AveragingOptions, FedAvgOptions, averaging
from fedfleet.algorithms.local import Local, local_training, zero
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.author import (
    BUFFERS,
    Algorithm,
    Batch,
    Key,
    LocalWork,
    Mean,
    Message,
    Ops,
    Personal,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
)

GUARD = 1e-7  # added to the gradient's norm


class FedSamOptions(FedAvgOptions):
    """Options of FedSAM."""

    rho: float = Field(default=0.1, ge=0)
    """How far from the model the gradient is taken; FedOMG's Table 4 has 0.6. 0 is FedAvg."""


class MoFedSamOptions(AveragingOptions):
    """Options of MoFedSAM."""

    rho: float = Field(default=0.1, ge=0)
    """How far from the model the gradient is taken."""
    share: float = Field(default=0.1, gt=0, le=1)
    """The gradient's share in a local step, beta: 0.6 in FedOMG's Table 4. The rest is what the model moved by in the last round;
    1 is FedSAM."""
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others. Steps are then those of a client with the mean number of
    examples, for those of the clients heard go by who is heard."""

    @property
    def rates_by_epoch(self) -> bool:
        """Return false: the movement of a round is divided by the round's rate."""
        return False


class State(NamedTuple):
    """The model, and what it moved by in the last round, a gradient a local step."""

    z: Tree
    before: Tree


def sharp(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the gradient at the point ``shared["rho"]`` up the gradient from here."""
    g = ops.grad("train", local.z, batch, key)[0]
    length = T.norm({part: tree for part, tree in g.items() if part != BUFFERS}) + GUARD
    return ops.grad("train", ops.step("train", local.z, -shared["rho"] / length, g), batch, key)[0]


def fedsam(options: FedSamOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedSAM."""
    made = averaging(options, task, cohort, sharp, lambda t: {"rho": options.rho})
    return made._replace(minimises=True)


class _Counted(NamedTuple):
    """A client in the middle, and the local steps that it has taken."""

    local: Local
    steps: Tensor


def counted(work: LocalWork) -> LocalWork:
    """Return local training that sends the number of its steps, too."""
    (stage,) = work.loops

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Counted:
        local = work.client_init(shared, client_state, client_input, key)
        return _Counted(local, zero(shared, key))

    def step(ops: Ops, shared: Mapping[str, Any], at_work: _Counted, batch: Batch, at: StepInfo, key: Key) -> _Counted:
        return _Counted(stage.step(ops, shared, at_work.local, batch, at, key), at_work.steps + 1)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, at_work: _Counted
    ) -> tuple[Message, Tree]:
        message, client_state = work.client_final(shared, client_state, client_input, at_work.local)
        return Message({**message.send, "steps": at_work.steps}), client_state

    return replace(work, client_init=client_init, loops=(replace(stage, step=step),), client_final=client_final)


def mofedsam(options: MoFedSamOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build MoFedSAM."""
    corrects = options.correction.kind != "none"

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        d = T.scale(shared["share"], sharp(ops, shared, local, batch, at, key))
        return {**d, "x": T.axpy(1 - shared["share"], shared["before"]["x"], d["x"])}

    work = counted(local_training(options.plan(), direction, options.client_optimizer.build()))
    reduce = {"z": Mean(), "steps": Mean()}
    train = Phase(name="train", work=work, reduce=reduce, weight=options.weight, model="z")

    def message(state: State, t: int) -> Message:
        config = {"lr": options.rates(t, task.parts), "rho": options.rho, "share": options.share}
        return Message({"z": state.z, "before": state.before}, config)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, {"x": T.zeros_like(z["x"])})

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        result = rnd.map_reduce(train, shared=message(state, rnd.index), cohort=rnd.invite(cohort.size))
        steps = options.local_steps(rnd.problem.mean_examples) if corrects else float(result["steps"])
        pace = options.rates(rnd.index, ("x",))["x"] * steps
        if pace == 0:  # a rate that a schedule has brought to nothing moves nothing
            return state._replace(z=result["z"]), {}
        return State(result["z"], {"x": T.scale(1 / pace, T.sub(state.z["x"], result["z"]["x"]))}), {}

    made = Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda state: state.z)},
        minimises=True,
        buffers=True,
        personal=Personal(message, work),
    )
    return correcting(options.correction, made, "train", "z", model=True, rates=True)
