"""Catalyst-Scaffold-S: corrected local steps towards a proximal anchor, a random number of them a round.

Hou, Thekumparampil, Fanti & Oh, "Efficient algorithms for federated saddle point optimization", arXiv 2102.06333 (2021), with
sampled cohorts, as in the experiments of CDMA. Clients are stateless.

    paper            here
    z_t, u_t         z, u: the mean full local gradient at z_t, in direction space
    z-bar, theta     anchor, theta
    K, T_0           steps (the mean number of local steps), stage_iterations
    eta_l, eta_g     lr, lr * global_lr

A stage is T_0 virtual iterations around an anchor, the model it starts at. Clients and server exchange at each with probability
1/K, so a round has K_r local steps, the gap between two exchanges: geometric with mean K. Iterations after a stage's last
exchange are left out. With theta = 0 and K_r = K this is CDMA-ONE with one step size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.cdma import corrected
from fedfleet.algorithms.local import Local, full_local, gradient_at_z, local_training, proximal
from fedfleet.algorithms.options import CohortOptions, LocalOptions
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


class CatalystOptions(LocalOptions):
    """Options of Catalyst-Scaffold-S."""

    theta: float = Field(default=0.0, ge=0)
    """Weight of the proximal terms: + (theta/2) |x - anchor|^2 - (theta/2) |y - anchor|^2."""
    stage_iterations: int = Field(default=2000, ge=1, le=10_000_000)
    """Virtual iterations a stage, T_0."""
    random_steps: bool = True
    """Draw K_r; false takes K local steps every round, and T_0 / K rounds a stage."""
    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta_g / eta_l."""
    gradient_chunk: int = Field(default=500, ge=1)
    """Examples a client takes at once while it averages its full local gradient. It bounds memory and changes no result, unless
    the task draws noise for a batch, or normalises by it (``gan``), or averages labelled examples by themselves
    (``domain_adaptation``, by up to one in a chunk): then each chunk counts by its share."""


class State(NamedTuple):
    """The model, the anchor of the stage, the local steps of the rounds that are left of it: (R,) int64."""

    z: Tree
    anchor: Tree
    gaps: Tensor


def drawn_gaps(iterations: int, mean_steps: int, key: Key) -> Tensor:
    """Return K_r of a stage's rounds: gaps between the successes of so many trials with chance 1 / K, the first from 0."""
    if mean_steps == 1:
        return torch.ones(max(1, iterations - 1), dtype=torch.int64)
    for attempt in range(1000):
        happened = rng.bernoulli(rng.fold(key, attempt), 1 / mean_steps, (iterations,))
        if len(at := happened.nonzero().flatten()) and at[-1] > 0:
            at = at[at > 0]
            return torch.diff(at, prepend=torch.zeros(1, dtype=torch.int64))
    return torch.full((1,), mean_steps)  # a stage far shorter than a round


def pulled(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
    """Return the corrected direction with that of the proximal terms."""
    d = corrected(ops, shared, local, batch, at, key)
    return proximal(d, local.z, shared["anchor"], shared["theta"]) if "anchor" in shared else d


def catalyst_scaffold_s(options: CatalystOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Catalyst-Scaffold-S."""
    work = full_local(gradient_at_z, "g", options.gradient_chunk)
    collect = Phase(name="gradient", work=work, reduce={"g": Mean()})
    update = Phase(name="update", work=local_training(options.plan(), pulled), reduce={"z": Mean()})

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, z, torch.zeros(0, dtype=torch.int64))

    def new_stage(state: State, rnd: Round) -> State:
        mean_steps = options.local_steps(rnd.problem.mean_examples)
        if options.random_steps:
            gaps = drawn_gaps(options.stage_iterations, mean_steps, rng.fold(rnd.key, "stage"))
        else:
            gaps = torch.full((max(1, options.stage_iterations // mean_steps),), mean_steps)
        return State(state.z, state.z, gaps)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        if not len(state.gaps):
            state = new_stage(state, rnd)
        invited = rnd.invite(cohort.size)
        u = rnd.map_reduce(collect, shared=Message({"z": state.z}), cohort=invited)["g"]
        if cohort.resample:
            invited = rnd.invite(cohort.size)
        send = {"z": state.z, "u": u} | ({"anchor": state.anchor} if options.theta else {})
        shared = Message(send, {"lr": options.rates(rnd.index, task.parts), "theta": options.theta})
        steps = int(state.gaps[0])
        z = rnd.map_reduce(update, shared=shared, cohort=invited, steps=steps)["z"]
        if options.global_lr != 1:
            z = T.axpy(options.global_lr, T.sub(z, state.z), state.z)
        return State(z, state.anchor, state.gaps[1:]), {"local_steps": steps}

    view = View(lambda state: state.z)
    return Algorithm(init, round, (collect, update), {"global": view}, requires=("x", "y"), same_cohort=True)
