"""GT-GDA: local descent-ascent along trackers of the mean gradient. A reconstruction.

Tsaknakis, Hong & Liu, "Decentralized min-max optimization: formulations, algorithms and applications in network poisoning attack",
ICASSP 2020, is for a graph of nodes without noise, and only its idea was at hand: gradient tracking, combined with gradient
descent-ascent. Here the graph is a star that mixes every K steps, and gradients are of minibatches, as where FedMM is compared
with it.

    s_i^k       tracker: s + g_i^k - g_i, with the mean tracker s that was sent
    g_i         own, a client's state: its gradient at the last step it took, 0 before the first
    z           z - eta s_i^k, of both parts at once

Server: the mean of the final points, and s moved so that it stays the mean of all clients' own. Gradients are in direction space.
What layers keep count of goes with the points, and is not tracked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedfleet.algorithms.options import CohortOptions, LocalOptions
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


class State(NamedTuple):
    """The model and the mean tracker s, of what gradients move of it."""

    z: Tree
    s: Tree


class Tracked(NamedTuple):
    """A client in the middle of its steps: the point, its tracker, its last gradient."""

    z: Tree
    s: Tree
    g: Tree


def no_gradient(shared: Mapping[str, Any]) -> Tree:
    """Return the last gradient of a client that has taken no step: zeros."""
    return T.zeros_like(shared["s"])


def tracked(plan: BatchPlan) -> LocalWork:
    """Step along the tracker; send the final point and by how much the client's last gradient has changed."""

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tracked:
        return Tracked(shared["z"], shared["s"], client_state)

    def step(ops: Ops, shared: Mapping[str, Any], at_k: Tracked, batch: Batch, at: StepInfo, key: Key) -> Tracked:
        g, _ = ops.grad("train", at_k.z, batch, key)
        s = T.add(at_k.s, T.sub(trainable(g), at_k.g))
        return Tracked(ops.step("train", at_k.z, shared["lr"], {**g, **s}), s, trainable(g))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, end: Tracked
    ) -> tuple[Message, Tree]:
        return Message(send={"z": end.z, "ds": T.sub(end.g, client_state)}), end.g  # s_i - s is the same difference

    return LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)


def gt_gda(options: LocalOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build GT-GDA."""
    train = Phase(
        name="train", work=tracked(options.plan()), reduce={"z": Mean(), "ds": Mean()}, client_state=no_gradient
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, T.zeros_like(trainable(z)))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message({"z": state.z, "s": state.s}, {"lr": options.rates(rnd.index, task.parts)})
        heard = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
        share = len(heard.received) / rnd.problem.clients
        return State(heard["z"], T.axpy(share, heard["ds"], state.s)), {}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, requires=("x", "y"), buffers=True)
