"""Amplified FedAvg and Amplified SCAFFOLD: one long step for each period in which all clients have their turn.

Wang & Ji, "A unified analysis of federated learning with arbitrary client participation", NeurIPS 2022, Algorithm 1;
Crawshaw & Liu, "Federated learning under periodic client participation and heterogeneity: a new communication-efficient algorithm
and analysis", NeurIPS 2024, Algorithm 1.

    paper         here
    P             period, rounds
    gamma         amplification
    x_0 of a      state.anchor, the model at the start of the period
    period
    c_i, c        own["c"], state.c: those in force; both change between periods alone

    after every P rounds:  x <- anchor + gamma (x - anchor);  anchor <- x

In Amplified SCAFFOLD, c_i is the mean of all gradients that the client took in the last period that is over and in which it took
part. A client keeps the mean of this period, own["pending"], and puts it in force when it is heard in a later one; it sends by how
much that mean has changed, and the server adds that up for the next period.

Neither corrects for clients that are heard more often over whole periods; they make it harmless that clients come in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.control import share
from fedfleet.algorithms.local import carried, gradient, local_training, zero
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
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
    trainable,
)


class PeriodOptions(LocalOptions):
    """Options of both."""

    period: int = Field(default=20, ge=1)
    """P, the rounds in which all clients have had their turn."""
    amplification: float = Field(default=1.5, gt=0)
    """gamma; 1 is the method underneath."""
    weight: Literal["num_examples", "uniform"] = "uniform"
    """How much a client counts in means."""

    def ends(self, t: int) -> bool:
        """Say whether round t is the last of a period."""
        return (t + 1) % self.period == 0

    def amplified(self, t: int, z: Tree, anchor: Tree) -> tuple[Tree, Tree]:
        """Return the model after round t, and the anchor of the next one."""
        if not self.ends(t):
            return z, anchor
        z = carried(T.axpy(self.amplification, T.sub(trainable(z), trainable(anchor)), trainable(anchor)), z)
        return z, z


class AmplifiedFedAvgOptions(PeriodOptions):
    """Options of Amplified FedAvg."""

    client_optimizer: LocalOptimizer = LocalOptimizer()
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others."""


class State(NamedTuple):
    """The model, and that at the start of the period."""

    z: Tree
    anchor: Tree


def amplified_fedavg(options: AmplifiedFedAvgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Amplified FedAvg."""
    work = local_training(options.plan(), gradient, options.client_optimizer.build())
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z")

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message(send={"z": state.z}, config={"lr": options.rates(rnd.index, task.parts)})
        z = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))["z"]
        return State(*options.amplified(rnd.index, z, state.anchor)), {}

    def skipped(state: State, rnd: Round) -> State:
        return State(*options.amplified(rnd.index, *state))

    view = View(lambda state: state.z)
    made = Algorithm(init, round, (train,), {"global": view}, buffers=True, skipped=skipped)
    return correcting(options.correction, made, "train", "z", model=True, rates=True)


class Controlled(NamedTuple):
    """The model, that at the start of the period, c, and c of the next period."""

    z: Tree
    anchor: Tree
    c: Tree
    c_next: Tree


class _Path(NamedTuple):
    """The point, the control c_i in force, the sum of gradients taken, and the steps done."""

    z: Tree
    c: Tree
    taken: Tree
    steps: Any


def _nothing(shared: Mapping[str, Any]) -> Tree:
    zeros = T.zeros_like(shared["z"])
    none = T.leaves(zeros)[0].new_zeros(())
    return {"c": zeros, "pending": zeros, "count": none, "period": none}


def _in_force(shared: Mapping[str, Any], client_state: Tree) -> tuple[Tree, Any]:
    """Return c_i, and whether this is the client's first visit of the period."""
    first = client_state["period"] != shared["period"]
    promoted = first & (client_state["count"] > 0)
    return T.where(promoted, client_state["pending"], client_state["c"]), first | (client_state["count"] == 0)


def _periodic(plan: BatchPlan) -> LocalWork:
    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Path:
        c, _ = _in_force(shared, client_state)
        return _Path(shared["z"], c, T.zeros_like(c), zero(shared, key))

    def step(ops: Ops, shared: Mapping[str, Any], at: _Path, batch: Batch, where: StepInfo, key: Key) -> _Path:
        g = ops.grad("train", at.z, batch, key)[0]
        z = ops.step("train", at.z, shared["lr"], T.add(g, T.sub(shared["c"], at.c)))
        return _Path(z, at.c, T.add(at.taken, g), at.steps + 1)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, at: _Path
    ) -> tuple[Message, Tree]:
        c, first = _in_force(shared, client_state)
        before = T.where(first, T.zeros_like(c), T.scale(client_state["count"], client_state["pending"]))
        count = at.steps + client_state["count"] * ~first
        pending = T.scale(1 / count, T.add(before, at.taken))
        told = T.where(first, c, client_state["pending"])  # what the server has of this client in the next c
        period = client_state["period"] * 0 + shared["period"]
        new = {"c": c, "pending": pending, "count": count, "period": period}
        return Message(send={"dz": T.sub(at.z, shared["z"]), "dc": T.sub(pending, told)}), new

    return LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)


def amplified_scaffold(options: PeriodOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Amplified SCAFFOLD."""
    slots = {"dz": Mean(), "dc": Mean()}
    train = Phase(
        name="train",
        work=_periodic(options.plan()),
        reduce=slots,
        weight=options.weight,
        client_state=_nothing,
        difference="dz",
    )

    def init(z: Tree, key: Key, problem: Problem) -> Controlled:
        return Controlled(z, z, T.zeros_like(z), T.zeros_like(z))

    def round(state: Controlled, rnd: Round) -> tuple[Controlled, dict[str, float]]:
        t = rnd.index
        config = {"lr": options.rates(t, task.parts), "period": float(t // options.period)}
        shared = Message(send={"z": state.z, "c": state.c}, config=config)
        result = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        c_next = T.axpy(share(result.received, rnd.problem, options.weight), result["dc"], state.c_next)
        return after(t, T.add(state.z, result["dz"]), state._replace(c_next=c_next)), {}

    def skipped(state: Controlled, rnd: Round) -> Controlled:
        return after(rnd.index, state.z, state)

    def after(t: int, z: Tree, state: Controlled) -> Controlled:
        z, anchor = options.amplified(t, z, state.anchor)
        return Controlled(z, anchor, state.c_next if options.ends(t) else state.c, state.c_next)

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, skipped=skipped)
