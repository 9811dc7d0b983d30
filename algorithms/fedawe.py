"""FedAWE: clients train on from where they were, and make up for the rounds that they missed.

Xiang, Ioannidis, Yeh, Joe-Wong & Su, "Efficient federated learning against heterogeneous and non-stationary client
unavailability", NeurIPS 2024, Algorithm 1.

    paper             here
    x_i, tau_i        own: the client's model (z^0 at first) and the round in which it was last heard (-1 at first)
    G_i               local.z - x_i, of its local steps from x_i
    echo x_i-dagger   x_i + global_lr (t - tau_i) (local.z - x_i)
    x^{t+1}           the mean of the echoes of those heard, which keep it as their x_i

A client needs the model after its round, not before: the server hands it back to those heard (``Round.hand_back``). The authors'
code cuts the norm of the mean of (t - tau_i) G_i, which the method as described does not: ``clip``. It evaluates the mean of all
x_i: ``evaluate``. For either a client sends x_i and its change apart, so that the server knows by how much that mean moves. The
longer a client was away, the longer its step: ``max_echo`` bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field

from fedfleet.algorithms.local import Local, gradient, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
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
    evaluate: Literal["server", "clients"] = "server"
    """server: the server's model; clients: the mean of all clients' models, as the authors' code. It takes a second model up."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class State(NamedTuple):
    """The model; the initial one, which clients begin at whenever they are first heard; the mean of all clients', if evaluated."""

    z: Tree
    first: Tree
    mean: Tree = None


def _kept(shared: Mapping[str, Any]) -> Tree:
    """Return what a client keeps that was handed the model of round t."""
    like = T.leaves(shared["z"])[0]
    return {"z": shared["z"], "last": torch.as_tensor(shared["t"], dtype=like.dtype, device=like.device)}


def _new(shared: Mapping[str, Any]) -> Tree:
    """Return what a client keeps that has not been heard."""
    return _kept({"z": shared["z"], "t": -1.0})


def fedawe(options: FedAweOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAWE."""
    of_clients = options.evaluate == "clients"
    apart = options.clip is not None or of_clients

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        missed = shared["t"] - client_state["last"]
        if options.max_echo is not None:
            missed = missed.clamp(max=options.max_echo)
        change = T.scale(options.global_lr * missed, T.sub(local.z, client_state["z"]))
        if not apart:
            return Message(send={"z": T.add(client_state["z"], change)}), client_state
        return Message(send={"z": client_state["z"], "dz": change}), client_state

    work = local_training(options.plan(), gradient, options.client_optimizer.build(), client_final)
    client_init = work.client_init

    def from_own(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tree:
        return client_init({**shared, "z": client_state["z"]}, client_state, client_input, key)

    slots = {"z": Mean(), "dz": Mean()} if apart else {"z": Mean()}
    train = Phase(name="train", work=replace(work, client_init=from_own), reduce=slots, client_state=_new)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z, z if of_clients else None)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        config = {"lr": options.rates(rnd.index, task.parts), "t": float(rnd.index)}
        result = rnd.map_reduce(
            train, shared=Message(config=config, known={"z": state.first}), cohort=rnd.invite(cohort.size)
        )
        z = T.axpy(_cut(options, result["dz"]), result["dz"], result["z"]) if apart else result["z"]
        rnd.hand_back(train, result, shared=Message({"z": z}, {"t": float(rnd.index)}), client_state=_kept)
        if not of_clients:
            return State(z, state.first), {}
        share = len(result.received) / rnd.problem.clients
        return State(z, state.first, T.axpy(share, T.sub(z, result["z"]), state.mean)), {}

    view = View(lambda state: state.mean if of_clients else state.z)
    return Algorithm(init, round, (train,), {"global": view})


def _cut(options: FedAweOptions, change: Tree) -> float:
    """Return by what the mean change is multiplied so that its norm, without eta_g, is at most ``clip``."""
    if options.clip is None:
        return 1.0
    size = float(T.norm(change)) / options.global_lr
    return min(1.0, options.clip / size) if size else 1.0
