"""Mime and MimeLite: clients step with the server's momentum, which stays as it is while they do.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich & Suresh, "Breaking the centralized barrier for cross-device federated learning",
NeurIPS 2021, Algorithm 1, with momentum.

    paper          here
    x, y_i         shared z, local.z
    c              the mean of the clients' full local gradients at x
    s (momentum)   state.m
    beta           beta

    clients:  y <- y - lr ((1 - beta) g + beta m),  g = grad f_i(y; b) - grad f_i(x; b) + c  (Mime), grad f_i(y; b)  (MimeLite)
    server:   x <- mean y_i;   m <- (1 - beta) c + beta m

Clients keep nothing. In Mime, c is asked for first, in a phase of its own; in MimeLite a client sends its part with its model. Both
means are over those heard, so clients that are heard more often count for more. In Mime that bias is all of c: where c and m are 0,
nobody moves. So a correction of c is enough. In MimeLite both means would need one, of one exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from fedfleet.algorithms.local import Local, full_local, gradient, gradient_at_z, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
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


class MomentumOptions(LocalOptions):
    """Options of local steps with the server's momentum."""

    beta: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the old momentum."""
    weight: Literal["num_examples", "uniform"] = "num_examples"
    """How much a client counts in both means."""
    gradient_chunk: int = Field(default=500, ge=1)
    """Examples a client takes at once while it averages its full local gradient. It bounds memory and changes no result."""


class MimeOptions(MomentumOptions):
    """Options of Mime."""

    correction: Correction = Correction()
    """Correction of c for clients that are heard less often than others."""


class MimeLiteOptions(MomentumOptions):
    """Options of MimeLite."""

    @model_validator(mode="before")
    @classmethod
    def _uncorrected(cls, said: Any) -> Any:
        if isinstance(said, Mapping) and "correction" in said:
            raise ValueError(
                "correction is of one mean of an exchange, and MimeLite takes two, of models and of gradients: leave it out, or "
                "choose mime"
            )
        return said


class State(NamedTuple):
    """The model and the momentum."""

    z: Tree
    m: Tree


def _along(shared: Mapping[str, Any], g: Tree) -> Tree:
    """Return (1 - beta) g + beta m."""
    return T.axpy(1.0 - shared["beta"], g, T.scale(shared["beta"], shared["m"]))


def _corrected(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return Mime's direction."""
    if at.k == 0:
        return _along(shared, shared["c"])  # both gradients are at x
    here, there = (ops.grad("train", z, batch, key)[0] for z in (local.z, shared["z"]))
    return _along(shared, T.add(T.sub(here, there), shared["c"]))


def _plain(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return MimeLite's direction."""
    return _along(shared, gradient(ops, shared, local, batch, at, key))


class _Both(NamedTuple):
    """The full local gradient at x, and local training."""

    c: Tree
    local: Any


def _both(whole: LocalWork, training: LocalWork) -> LocalWork:
    """Return the work of doing one after the other, and sending what both do."""
    (first,), (then,) = whole.loops, training.loops

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Both:
        return _Both(
            whole.client_init(shared, client_state, client_input, key),
            training.client_init(shared, client_state, client_input, key),
        )

    def look(ops: Ops, shared: Mapping[str, Any], both: _Both, batch: Batch, at: StepInfo, key: Key) -> _Both:
        return both._replace(c=first.step(ops, shared, both.c, batch, at, key))

    def train(ops: Ops, shared: Mapping[str, Any], both: _Both, batch: Batch, at: StepInfo, key: Key) -> _Both:
        return both._replace(local=then.step(ops, shared, both.local, batch, at, key))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, both: _Both
    ) -> tuple[Message, Tree]:
        c, _ = whole.client_final(shared, client_state, client_input, both.c)
        z, _ = training.client_final(shared, client_state, client_input, both.local)
        return Message(send={**z.send, **c.send}), client_state

    stages = LocalLoop(step=look, batches=first.batches), LocalLoop(step=train, batches=then.batches)
    return LocalWork(client_init=client_init, loops=stages, client_final=client_final, divisible=False)


def mime(options: MimeOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Mime."""
    return correcting(options.correction, _mime(options, task, cohort, lite=False), "gradient", "c")


def mimelite(options: MimeLiteOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build MimeLite."""
    return _mime(options, task, cohort, lite=True)


def _mime(options: MomentumOptions, task: Task, cohort: CohortOptions, *, lite: bool) -> Algorithm:
    whole = full_local(gradient_at_z, "c", options.gradient_chunk)
    training = local_training(options.plan(), _plain if lite else _corrected)
    given: dict[str, Any] = {"weight": options.weight}
    collect = Phase(name="gradient", work=whole, reduce={"c": Mean()}, **given)
    if lite:
        train = Phase(name="train", work=_both(whole, training), reduce={"z": Mean(), "c": Mean()}, model="z", **given)
    else:
        train = Phase(name="train", work=training, reduce={"z": Mean()}, model="z", **given)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        config = {"lr": options.rates(rnd.index, task.parts), "beta": options.beta}
        send, invited, c = {"z": state.z, "m": state.m}, rnd.invite(cohort.size), None
        if not lite:
            c = rnd.map_reduce(collect, shared=Message({"z": state.z}), cohort=invited)["c"]
            send = {**send, "c": c}
            if cohort.resample:
                invited = rnd.invite(cohort.size)
        result = rnd.map_reduce(train, shared=Message(send, config), cohort=invited)
        c = result["c"] if lite else c
        m = T.axpy(1.0 - options.beta, c, T.scale(options.beta, state.m))
        return State(result["z"], m), {}

    phases = (train,) if lite else (collect, train)
    return Algorithm(init, round, phases, {"global": View(lambda state: state.z)}, same_cohort=True)
