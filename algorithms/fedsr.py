"""FedSR: features that are drawn are kept short, and of a class near a distribution of each client's own.

Nguyen, Torr & Lim, "FedSR: a simple and effective domain generalization method for federated learning", NeurIPS 2022, and its
released code; ``tasks/stochastic.py`` has the net and the objective

    cross-entropy + l2r |z| + cmi KL(N(C mu, (C sigma)^2) || N(r_mu, r_sigma^2))

    paper, released code        here
    net, cls                    z, averaged, every client alike
    r_mu, r_sigma, C            a client's state
    alpha^L2R, alpha^CMI        l2r, cmi

A step moves all of it at one rate. The released code keeps momentum between rounds: ``state: persist``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.local import Local, local_training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    ConfigError,
    Key,
    Mean,
    Message,
    Ops,
    Personal,
    Phase,
    Problem,
    Round,
    StepInfo,
    Task,
    Tree,
    View,
)


class FedSrOptions(AveragingOptions):
    """Options of FedSR."""

    weight: Literal["num_examples", "uniform"] = "uniform"
    l2r: float = Field(default=0.01, ge=0)
    """Weight of the features' norm, alpha^L2R."""
    cmi: float = Field(default=0.001, ge=0)
    """Weight of the divergence from the class' distribution, alpha^CMI: 0.0005 in the released code."""


def fedsr(options: FedSrOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedSR; its state is z. Raises ConfigError for a task whose features are not drawn."""
    reference = getattr(task, "reference", None)
    if reference is None:
        raise ConfigError("algorithm.name='fedsr': it is for a net whose features are drawn: set task.name=stochastic")
    rule = options.client_optimizer.build()
    weights = {"l2r": options.l2r, "cmi": options.cmi}

    def fresh(shared: Mapping[str, Any]) -> Tree:
        return reference(shared["z"])

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        z = {**shared["z"], **client_state}
        return Local(z, rule.init(z), None)

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        return ops.grad("fedsr", local.z, batch, key, ctx=weights)[0]

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        return Message({"z": {part: local.z[part] for part in shared["z"]}}), {"p": local.z["p"]}

    work = replace(local_training(options.plan(), direction, rule, client_final), client_init=client_init)
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, client_state=fresh, model="z")

    def message(z: Tree, t: int) -> Message:
        return Message({"z": z}, {"lr": options.rates(t, (*task.parts, "p"))})

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        return rnd.map_reduce(train, shared=message(z, rnd.index), cohort=rnd.invite(cohort.size))["z"], {}

    return Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda z: z)},
        minimises=True,
        buffers=True,
        personal=Personal(message, work, fresh),
    )
