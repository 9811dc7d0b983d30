"""FedGA: clients on whose own examples averaging does harm count for more in the mean of the next round.

Zhang, Xu, Yao, Zhang, Tian & Wang, "Federated domain generalization with generalization adjustment", CVPR 2023,
Algorithm 1. A round has two exchanges, with the same clients:

    1    local training; each client measures its model on examples that it has not learnt from, F_u(theta_u)
    2    it measures the new mean on them, F_u(theta_g); the gap is G_u = F_u(theta_g) - F_u(theta_u), and
         a_u <- a_u + (G_u / max |G|) s_r / U, cut to [0, 1] and divided by their sum

    paper, its code      here
    a_u                  state.shares, 1/N each in the beginning
    s_r                  step (1 - r / rounds), r = 0, 1, ...; in the code step (1 - (r - 1) / rounds), from the same 0 on
    F_u                  loss, or accuracy with the other sign

What one measures on is ``population.held_out`` of its examples. In the paper the mean gap is subtracted first (centre: true); in
the code that FedOMG is compared with it is not. Of more clients than are heard of in both exchanges, the U that are share anew
what they had together, a_u being their parts of that, and the others keep theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.local import EVERYTHING, Local, Training, gradient, zero
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    Cohort,
    Key,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Reduced,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
    positions,
)

LEAST = 1e-12  # share of a client in a mean: that of clients whose shares are all 0 exists
ROUNDING = 1e-6  # gaps are divided by the largest: were it the error of single precision, they would be anything


class FedGaOptions(LocalOptions):
    """Options of FedGA."""

    client_optimizer: LocalOptimizer = LocalOptimizer()
    step: float = Field(default=0.2, ge=0, le=1)
    """How far shares move in the first round, s_0, as a part of the mean one; it falls linearly to 0 over ``rounds``. 0 is FedAvg
    with equal weights."""
    rounds: int = Field(default=100, ge=1)
    """Rounds over which the step falls: those of the run."""
    gap: Literal["loss", "accuracy"] = "loss"
    """What is measured."""
    centre: bool = False
    """Subtract the mean gap of the clients heard, as in the paper."""


class State(NamedTuple):
    """The model, and the clients' shares (N,) float64, which sum to 1."""

    z: Tree
    shares: Tensor


class _Measured(NamedTuple):
    """A client at work: its model, the sum of what is measured of it, of how many examples."""

    local: Local
    total: Tensor
    number: Tensor

    def mean(self) -> Tensor:
        return self.total / self.number.clamp(min=1)


def adjusted(shares: Tensor, gaps: Tensor, step: float) -> Tensor:
    """Return the new shares (U,) of clients with these gaps (U,), with the sum that they had; gaps of rounding change nothing."""
    largest, had = gaps.abs().max(), shares.sum()
    if float(largest) < ROUNDING or float(had) == 0.0:
        return shares
    moved = (shares / had + gaps / largest * step / len(gaps)).clamp(0, 1)
    total = moved.sum()
    return moved * (had / total) if float(total) > 0 else shares


def fedga(options: FedGaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedGA."""
    rule = options.client_optimizer.build()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Measured:
        nothing = zero(shared, key)
        return _Measured(Local(shared["z"], rule.init(shared["z"]), client_state), nothing, nothing)

    def step(
        ops: Ops, shared: Mapping[str, Any], at_work: _Measured, batch: Batch, at: StepInfo, key: Key
    ) -> _Measured:
        local = at_work.local
        d, after = rule.update(local.optimizer, gradient(ops, shared, local, batch, at, key), local.z)
        return at_work._replace(local=Local(ops.step("train", local.z, shared["lr"], d), after, local.client_state))

    def measure(
        ops: Ops, shared: Mapping[str, Any], at_work: _Measured, batch: Batch, at: StepInfo, key: Key
    ) -> _Measured:
        each, n = ops.apply("per_example", at_work.local.z, batch)[options.gap], batch.count()
        return at_work._replace(total=at_work.total + batch.mean(each) * n, number=at_work.number + n)

    def send(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, at_work: _Measured
    ) -> tuple[Message, Tree]:
        told = {"share": client_input.clamp(min=LEAST), "measured": at_work.mean()}
        return Message({"z": at_work.local.z}, told), client_state

    def tell(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, at_work: _Measured
    ) -> tuple[Message, Tree]:
        return Message({}, {"measured": at_work.mean()}), client_state

    apart = LocalLoop(step=measure, batches=replace(EVERYTHING, held_out=True))
    training = Training(
        client_init=client_init, loops=(LocalLoop(step=step, batches=options.plan()), apart), client_final=send
    )
    train = Phase(name="train", work=training, reduce={"z": Mean()}, weight="share", model="z", dated=True)
    measuring = LocalWork(client_init=client_init, loops=(apart,), client_final=tell, divisible=False)
    after = Phase(name="after", work=measuring, reduce={}, dated=True)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, torch.full((problem.clients,), 1 / problem.clients, dtype=torch.float64))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        invited = rnd.invite(cohort.size)
        shares = state.shares[invited.clients].to(T.leaves(state.z)[0].dtype)
        shared = Message({"z": state.z}, {"lr": options.rates(rnd.index, task.parts)})
        trained = rnd.map_reduce(train, shared=shared, cohort=invited, client_input=shares)
        heard = Cohort(trained.received, torch.zeros_like(trained.received))
        measured = rnd.map_reduce(after, shared=Message({"z": trained["z"]}), cohort=heard)
        who, gaps = _gaps(trained, measured)
        if options.gap == "accuracy":
            gaps = -gaps
        now = max(0.0, 1 - rnd.index / options.rounds) * options.step
        new = adjusted(state.shares[who], gaps - gaps.mean() if options.centre else gaps, now)
        return State(trained["z"], state.shares.index_copy(0, who, new)), {"gap_mean": float(gaps.mean())}

    return Algorithm(
        init,
        round,
        (train, after),
        {"global": View(lambda state: state.z)},
        minimises=True,
        same_cohort=True,
        buffers=True,
    )


def _gaps(before: Reduced, after: Reduced) -> tuple[Tensor, Tensor]:
    """Return the clients heard of twice, and what was measured of the mean minus what was of their own models, both (U,)."""
    place = positions(after.received, before.received)
    return after.received, after.config["measured"] - before.config["measured"][place]
