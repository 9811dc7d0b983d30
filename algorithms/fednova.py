"""FedNova: clients that have done more steps do not count for more.

Wang, Liu, Liang, Joshi & Poor, "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS
2020, Eq. (6) and (7), for local SGD with momentum and a proximal term.

    paper           here
    tau_i           the steps that client i really did
    |a_i|_1         norm: the length of its path in units of lr, were all its gradients the same
    d_i             slot "d": (final point - z) / |a_i|_1
    w_i             weight, over the sum of those heard
    tau_eff         slot "tau": the mean of |a_i|_1, or of tau_i with a proximal term, as in the authors' code
    rho, mu         momentum, mu

    x <- x + tau_eff sum_i w_i d_i

It removes the bias of unequal work, such as of ``cohort.partial_work`` or of ``epochs`` over unequal data. That of who is heard
FedVARP's memory removes, whose differences vanish. Weights do not: the two means of a product would each be right, and the product
is not; and MIFA's memory of steps needs tau_eff where nobody is heard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from fedfleet.algorithms.local import proximal, zero
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.algorithms.participation import Correction, correcting
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
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
)


class FedNovaOptions(LocalOptions):
    """Options of FedNova."""

    weight: Literal["num_examples", "uniform"] = "num_examples"
    """How much a client counts, w_i."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """rho of the clients' momentum, which starts afresh every round."""
    mu: float = Field(default=0.0, ge=0)
    """Weight of the proximal term."""
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others; fedvarp is the one that is right here."""

    @model_validator(mode="after")
    def _corrects(self) -> FedNovaOptions:
        if (kind := self.correction.kind) not in ("none", "fedvarp"):
            raise ValueError(
                f"correction={kind!r}: FedNova's step is a product of two means, which it does not correct: take fedvarp"
            )
        return self


class _Path(NamedTuple):
    """The point, the momentum, the norm of both per unit of gradient, and the steps done."""

    z: Tree
    v: Tree
    norm: Any
    speed: Any
    steps: Any


def _local(plan: BatchPlan, options: FedNovaOptions) -> LocalWork:
    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Path:
        none = zero(shared, key)
        return _Path(shared["z"], T.zeros_like(shared["z"]), none, none, none)

    def step(ops: Ops, shared: Mapping[str, Any], at: _Path, batch: Batch, where: StepInfo, key: Key) -> _Path:
        d = ops.grad("train", at.z, batch, key)[0]
        pull = 0.0
        if options.mu:
            d, pull = proximal(d, at.z, shared["z"], options.mu), options.mu * shared["lr"]["x"]
        v = T.axpy(options.momentum, at.v, d) if options.momentum else d
        speed = options.momentum * at.speed + 1 - pull * at.norm  # as v, of gradients that are all 1
        return _Path(ops.step("train", at.z, shared["lr"], v), v, at.norm + speed, speed, at.steps + 1)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, at: _Path
    ) -> tuple[Message, Tree]:
        d = T.scale(1 / at.norm, T.sub(at.z, shared["z"]))
        return Message(send={"d": d, "tau": at.steps if options.mu else at.norm}), client_state

    return LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)


def fednova(options: FedNovaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedNova; its state is z."""
    slots = {"d": Mean(), "tau": Mean()}
    train = Phase(name="train", work=_local(options.plan(), options), reduce=slots, weight=options.weight)

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        shared = Message(send={"z": z}, config={"lr": options.rates(rnd.index, task.parts)})
        result = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        tau = float(result["tau"])
        return T.axpy(tau, result["d"], z), {"tau_eff": tau}

    made = Algorithm(init, round, (train,), {"global": View(lambda z: z)}, minimises=True)
    return correcting(options.correction, made, "train", "d")
