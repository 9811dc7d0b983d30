"""CDMA: cross-device minimax averaging, in its three forms.

Xie, Zhang, Shen, Liu & Qian, "CDMA: a practical cross-device federated learning algorithm for general minimax problems",
AAAI 2023, Algorithms 1 and 2. Clients are stateless; the server remembers u, v and the previous point.

    paper                  here
    z = (x, y)             z
    (u_t, v_t)             u, in direction space: (u_t, -v_t), so that every update is z - lr * direction
    beta = 0 / 1           correct
    alpha_t                alpha
    eta_t, gamma_t         lr = {"x": eta_t, "y": gamma_t}
    K, B                   steps, batch_size
    S-hat'_t, S-hat_t      cohort.size, in both phases

    name       beta  alpha_t   phases
    cdma_nc    0     -         local steps
    cdma_one   1     1         full local gradients, then corrected local steps
    cdma_ada   1     <= 1      the same, with the gradient estimate recursed on the previous point
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from fedfleet.algorithms.local import Evaluate, Local, full_local, gradient, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptions, refuse_others
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.algorithms.theory import CdmaTheory
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
    rng,
)


class CdmaOptions(LocalOptions):
    """Options of CDMA-NC and CDMA-ONE."""

    decay: float = Field(default=0.0, ge=0)
    """s in eta_t = eta_0 / (t+1)^s and gamma_t = gamma_0 / (t+1)^s."""
    theory: CdmaTheory | None = None
    """Constants of the problem: take the schedules of Theorems 1-3 instead of lr, dual_lr, lr_schedule, decay and alpha."""
    gradient_chunk: int = Field(default=500, ge=1)
    """Examples a client takes at once while it averages its full local gradient. It bounds memory and changes no result, unless
    the task draws noise for a batch, or normalises by it: then it is the B of Eq. (2)."""
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others: to the gradients of the first phase, where the bias is."""
    weigh_models: bool = False
    """known_p and fedau: weigh the second phase's mean too, which the fixed point does not need."""
    share_noise: bool = True
    """Take the same noise at both points of Eq. (2) and (3), where the task draws any; false is the released code."""

    @property
    def proven(self) -> bool:
        """Whether constants of a theorem set the steps."""
        return self.theory is not None

    @model_validator(mode="after")
    def _one_schedule(self) -> CdmaOptions:
        if self.weigh_models and self.correction.kind not in ("known_p", "fedau"):
            raise ValueError(f"weigh_models=True: correction={self.correction.kind} has no weights: leave it out")
        practical = {"lr", "dual_lr", "lr_schedule", "decay", "alpha"} & type(self).model_fields.keys()
        if self.theory is not None:
            refuse_others(self, "theory", set(), practical)
        return self


class AdaOptions(CdmaOptions):
    """Options of CDMA-ADA."""

    alpha: float = Field(default=0.95, gt=0)
    """alpha_0 in alpha_t = min(1, alpha_0 / (t+1)^(2s)); 1 is CDMA-ONE."""

    @model_validator(mode="after")
    def _recurses(self) -> AdaOptions:
        if self.alpha > 1 and not self.decay and self.theory is None:
            raise ValueError("alpha above 1 stays at 1 without decay, which is cdma_one: set alpha below 1, or decay")
        return self


class State(NamedTuple):
    """The model z_t, the previous one and the gradient estimate u (None before the first round)."""

    z: Tree
    z_before: Tree
    u: Tree


def corrected(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return u_t + (grad F(z^(k); b) - grad F(z_t; b)), Eq. (3) with beta = 1."""
    if at.k == 0:
        return shared["u"]  # both gradients are at z_t: the bracket is exactly zero
    return _corrected(ops, shared, local, batch, key, key)


def corrected_with_own_noise(
    ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key
) -> Tree:
    """Return the same with noise of its own at z_t, so that the bracket is not zero at first either."""
    return _corrected(ops, shared, local, batch, key, rng.fold(key, "there"))


def _corrected(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, key: Key, there: Key) -> Tree:
    now, _ = ops.grad("train", local.z, batch, key)
    then, _ = ops.grad("train", shared["z"], batch, there)
    return T.add(shared["u"], T.sub(now, then))


def _recursed(share_noise: bool) -> Evaluate:
    def difference(ops: Ops, shared: Mapping[str, Any], batch: Batch, key: Key) -> Tree:
        """Return grad f_i(z_t) - (1 - alpha_t) grad f_i(z_{t-1}), Eq. (2); without z_{t-1} just the gradient."""
        here, _ = ops.grad("train", shared["z"], batch, key)
        if "z_before" not in shared:
            return here
        there, _ = ops.grad("train", shared["z_before"], batch, key if share_noise else rng.fold(key, "there"))
        return T.axpy(shared["alpha"] - 1.0, there, here)

    return difference


def cdma_nc(options: CdmaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build CDMA-NC: beta = 0."""
    return _cdma("nc", options, task, cohort, None)


def cdma_one(options: CdmaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build CDMA-ONE: beta = 1, alpha = 1."""
    return _cdma("one", options, task, cohort, 1.0)


def cdma_ada(options: AdaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build CDMA-ADA: beta = 1, alpha_t decreasing."""
    return _cdma("ada", options, task, cohort, options.alpha)


def _cdma(variant: str, options: CdmaOptions, task: Task, cohort: CohortOptions, alpha_0: float | None) -> Algorithm:
    correct = alpha_0 is not None  # beta
    if options.theory is not None:
        options.theory.check(variant, cohort)
    work = full_local(_recursed(options.share_noise), "r", options.gradient_chunk)
    collect = Phase(name="gradient", work=work, reduce={"r": Mean()}, dated=variant == "ada")
    direction = gradient
    if correct:
        direction = corrected if options.share_noise else corrected_with_own_noise
    update = Phase(name="update", work=local_training(options.plan(), direction), reduce={"z": Mean()})

    def coefficients(t: int, problem: Problem) -> tuple[dict[str, float], float]:
        if options.theory is not None:
            return options.theory.at(variant, options.local_steps(problem.mean_examples), t)
        shrink = (t + 1.0) ** -options.decay
        rates = {p: rate * shrink for p, rate in options.rates(t, task.parts).items()}
        return rates, min(1.0, (alpha_0 or 1.0) * shrink**2)  # the latter matters to ADA alone

    def init(z: Tree, key: Key, problem: Problem) -> State:
        if options.theory is not None:
            options.theory.check_steps(variant, options, problem)
        return State(z, z, None)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        lr, alpha = coefficients(rnd.index, rnd.problem)
        told = {"alpha": alpha} if variant == "ada" else {}
        invited = rnd.invite(cohort.size)
        send, u = {"z": state.z}, state.u
        if correct:  # phase 1, Alg. 1 l. 3-8
            recurse = variant == "ada" and u is not None
            shared = Message(send | {"z_before": state.z_before}, {"alpha": alpha}) if recurse else Message(send)
            r = rnd.map_reduce(collect, shared=shared, cohort=invited)["r"]
            u = T.axpy(1.0 - alpha, u, r) if recurse else r  # Eq. (2)
            send = send | {"u": u}
            if options.steps == 1:  # every client would return z_t - lr * u, so the server takes the step itself
                return State(task.objectives["train"].step(state.z, lr, u), state.z, u), told
            if cohort.resample:
                invited = rnd.invite(cohort.size)
        z = rnd.map_reduce(update, shared=Message(send, {"lr": lr}), cohort=invited)["z"]  # phase 2, l. 9-14
        return State(z, state.z, u), told

    phases = (collect, update) if correct else (update,)
    view = View(lambda state: state.z)
    made = Algorithm(init, round, phases, {"global": view}, requires=("x", "y"), same_cohort=True)
    if correct:
        return correcting(options.correction, made, "gradient", "r", also="update" if options.weigh_models else None)
    return correcting(options.correction, made, "update", "z", model=True, rates=True)
