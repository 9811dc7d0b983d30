"""FedAWE: clients train on from where they were, and make up for the rounds that they missed.

Xiang, Ioannidis, Yeh, Joe-Wong & Su, "Efficient federated learning against heterogeneous and non-stationary client
unavailability", NeurIPS 2024, Algorithm 1.

    paper             here
    x_i, tau_i        own: the client's model (z^0 at first) and the round in which it was last heard (-1 at first)
    G_i               local.z - x_i, of its local steps from x_i
    echo x_i-dagger   x_i + global_lr (t - tau_i) (local.z - x_i)
    x^{t+1}           the mean of the echoes of those heard, which keep it as their x_i

A client needs the model after its round, not before: the server hands it back to those heard (``Round.hand_back``). The authors'
code cuts the norm of the mean of (t - tau_i) G_i, which the method as described does not: ``clip``. Then a client sends x_i and
its change apart. The longer a client was away, the longer its step: ``max_echo`` bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field

from fedfleet.algorithms.local import Local, gradient, local_training
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Key,
    Mean,
    Message,
    Phase,
    Problem,
    Round,
    T,
    Task,
    Tree,
    View,
)


class FedAweOptions(LocalOptions):
    """Options of FedAWE."""

    global_lr: float = Field(default=1.0, gt=0)
    """eta_g."""
    max_echo: int | None = Field(default=None, ge=1)
    """The largest t - tau_i that counts; null: any."""
    clip: float | None = Field(default=None, gt=0)
    """The largest norm of the mean change, 0.5 in the authors' code; null: any, as in the paper."""
    client_optimizer: ClientOptimizer = ClientOptimizer()


class State(NamedTuple):
    """The model, and the initial one, which clients begin at whenever they are first heard."""

    z: Tree
    first: Tree


def _kept(shared: Mapping[str, Any]) -> Tree:
    """Return what a client keeps that was handed the model of round t."""
    like = T.leaves(shared["z"])[0]
    return {"z": shared["z"], "last": torch.as_tensor(shared["t"], dtype=like.dtype, device=like.device)}


def _new(shared: Mapping[str, Any]) -> Tree:
    """Return what a client keeps that has not been heard."""
    return _kept({"z": shared["z"], "t": -1.0})


def fedawe(options: FedAweOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAWE."""

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, local: Local) -> tuple[Message, Tree]:
        missed = shared["t"] - own["last"]
        if options.max_echo is not None:
            missed = missed.clamp(max=options.max_echo)
        change = T.scale(options.global_lr * missed, T.sub(local.z, own["z"]))
        if options.clip is None:
            return Message(send={"z": T.add(own["z"], change)}), own
        return Message(send={"z": own["z"], "dz": change}), own

    work = local_training(options.plan(), gradient, options.client_optimizer.build(), finish)
    begin = work.begin

    def from_own(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Tree:
        return begin({**shared, "z": own["z"]}, own, inbox, key)

    slots = {"z": Mean()} if options.clip is None else {"z": Mean(), "dz": Mean()}
    train = Phase(name="train", work=replace(work, begin=from_own), reduce=slots, own=_new)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        config = {"lr": options.rates(rnd.index, task.parts), "t": float(rnd.index)}
        found = rnd.map_reduce(
            train, shared=Message(config=config, known={"z": state.first}), cohort=rnd.invite(cohort.invite)
        )
        z = found["z"]
        if options.clip is not None:
            size = float(T.norm(found["dz"])) / options.global_lr
            z = T.axpy(min(1.0, options.clip / size) if size else 1.0, found["dz"], z)
        rnd.hand_back(train, found, shared=Message({"z": z}, {"t": float(rnd.index)}), own=_kept)
        return State(z, state.first), {}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)})
