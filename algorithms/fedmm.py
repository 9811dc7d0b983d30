"""FedMM: local descent-ascent on augmented Lagrangians, whose duals bridge the gap between the gradients of clients.

Shen, Du, Zhao, Ji, Ma & Gao, "FedMM: a communication efficient solver for federated adversarial domain adaptation", AAMAS 2023,
Algorithm 1, with sampled cohorts. Averages are unweighted.

    paper                         here
    omega, psi; eta_1, eta_2      z["x"], z["y"]; lr, dual_lr
    omega_0, psi_0                shared["z"]
    lambda_i, beta_i              own, a client's state, in direction space: (lambda_i, beta_i), since the direction of y is -grad
    mu_1, mu_2, M_i               mu1, mu2, steps
    eta_3^t                       eta3

    client    z <- z - eta (direction + mu (z - z_0) + own),   at its end   own <- own + mu (z - z_0)
    server    z_0 <- mean of the final points heard + (eta_3 / mu) dual

In the paper clients send z + (eta_3 / mu) own and the server takes the mean. Each own is large, and only the sum of all of them
small; so, with a cohort, the server itself keeps ``dual``, the mean of every client's own: it grows by the share of the clients
that were heard times the mean of mu (z - z_0). With all clients that is the paper's round, and as many floats travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from fedfleet.algorithms.control import no_control
from fedfleet.algorithms.fedprox_sgda import ProximalOptions
from fedfleet.algorithms.local import Local, held, local_training
from fedfleet.algorithms.options import CohortOptions, Options, refuse_others
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


class Extrapolation(Options):
    """How far the server goes along the mean dual, eta_3 in rounds t = 0, 1, …"""

    kind: Literal["geometric", "constant"] = "geometric"
    """constant; geometric: value * decay^(-t / per), as in the released code."""
    value: float = Field(default=1.0, ge=0, le=1)
    """eta_3 in the first round; 0 leaves the duals to the clients alone, and comes to a point that depends on the start."""
    decay: float = Field(default=1.05, ge=1)
    """Geometric only; the released code takes 1.05 for dann, 1.02 for cdan, 1.01 for mdd."""
    per: float = Field(default=100.0, gt=0)
    """Geometric only: rounds after which eta_3 is divided by ``decay``."""

    @model_validator(mode="after")
    def _applies(self) -> Extrapolation:
        if self.kind == "constant":
            refuse_others(self, "kind=constant", set(), {"decay", "per"})
        return self

    def at(self, t: int) -> float:
        """Return eta_3 of round t."""
        return self.value if self.kind == "constant" else self.value * self.decay ** (-t / self.per)


class FedMmOptions(ProximalOptions):
    """Options of FedMM."""

    eta3: Extrapolation = Extrapolation()

    @model_validator(mode="after")
    def _extrapolates(self) -> FedMmOptions:
        for key, mu in (("mu1", self.mu1), ("mu2", self.mu2)):
            if not mu and self.eta3.value:
                raise ValueError(f"{key}={mu:g}: eta3 / {key} is then infinite: raise it, or take local_sgda")
        return self

    def reach(self, t: int, parts: tuple[str, ...]) -> dict[str, float]:
        """Return eta_3 / mu of round t, a part."""
        eta3 = self.eta3.at(t)
        return {p: eta3 / mu if mu else 0.0 for p, mu in self.mu(parts).items()}


class State(NamedTuple):
    """The model (omega_0, psi_0) and the mean of all clients' duals."""

    z: Tree
    dual: Tree


def pulled(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the direction of the augmented Lagrangian."""
    return T.add(held(ops, shared, local, batch, at, key), local.client_state)


def send_and_renew(
    shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
) -> tuple[Message, Tree]:
    """Upload the final point, and move the client's duals by how far it is from the one that was sent."""
    return Message(send={"z": local.z}), T.axpy(shared["mu"], T.sub(local.z, shared["z"]), client_state)


def fedmm(options: FedMmOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedMM."""
    mu = options.mu(task.parts)
    work = local_training(options.plan(), pulled, client_final=send_and_renew)
    train = Phase(name="train", work=work, reduce={"z": Mean()}, client_state=no_control)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message({"z": state.z}, {"lr": options.rates(rnd.index, task.parts), "mu": mu})
        heard = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        mean, share = heard["z"], len(heard.received) / rnd.problem.clients
        dual = T.axpy({p: share * weight for p, weight in mu.items()}, T.sub(mean, state.z), state.dual)
        z = task.objectives["train"].step(mean, T.neg(options.reach(rnd.index, task.parts)), dual)
        return State(z, dual), {"eta3": options.eta3.at(rnd.index)}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, requires=("x", "y"), buffers=True)
