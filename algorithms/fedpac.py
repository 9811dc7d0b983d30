"""FedPAC: features of a class are held near those of all clients, and each client's head is a mixture of those like its own.

Xu, Tong & Huang, "Personalized federated learning with feature alignment and classifier collaboration", ICLR 2023, Algorithm 1.
A round of a client:

    a    of its examples, under the body it is sent: p_k the share of class k, mu_k the mean feature, h_k = p_k mu_k,
         V = (sum_k p_k E|f|^2 in k - sum_k p_k^2 |mu_k|^2) / n
    b    it fits its head to the body; then the body to its head, on CE + pull mean (f - c_y)^2, c_k the common mean feature
    c    it sends the body, its head, V, h, and the mean features of its classes under the new body

The server averages bodies, and over those who have a class its mean features: each alike, as in the code of FedOMG's experiments,
where the authors' own counts examples. To client i goes the head sum_j a_ij head_j, with a_i the least of
a' (diag(V) + D^i) a on the simplex, D^i_ab = <h^i - h^a, h^i - h^b>, weights below ``drop`` left out.

    paper            here
    theta, phi_i     what travels; the head, a client's state
    lambda           pull

D^i is a matrix of inner products, so that the programme is always convex. The head goes to its client in a second exchange, at the
end of the round rather than at the start of the next: a client that this does not reach goes on with the head that it has fitted.
The mean features of a class that nobody heard has examples of are those of an earlier round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.fedrep import FedRepOptions
from fedfleet.algorithms.keeping import cut, initial
from fedfleet.algorithms.local import EVERYTHING, Training, replaced
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.prototypes import Moments, target
from fedfleet.algorithms.simplex_qp import least_quadratic
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    Cohort,
    CollectUploads,
    Key,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Ops,
    Personal,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Total,
    Tree,
    View,
)


class FedPacOptions(FedRepOptions):
    """Options of FedPAC; ``steps`` and ``epochs`` are those of the body."""

    pull: float = Field(default=1.0, ge=0)
    """Weight of how far features are from the common ones of their class, lambda."""
    drop: float = Field(default=1e-3, ge=0, lt=1)
    """Weights of heads below it, the client's own too, are 0; the rest is scaled to sum to 1. With no rest a client has its own."""


class State(NamedTuple):
    """What travels of the model, heads' initial values, common mean features (classes, width) and which there are (classes,)."""

    z: Tree
    initial: Tree
    prototypes: Tensor
    known: Tensor


class _Pac(NamedTuple):
    """A client in the middle: its model, the states of head's and body's optimisers, what it knows of features before and after."""

    z: Tree
    optimizer: tuple[Any, Any]
    before: Moments
    after: Moments


def mixtures(h: Tensor, v: Tensor, drop: float) -> Tensor:
    """Return whose heads make up each client's (S, S), a row a client, from inner products of h (S, S) and V (S,), float64."""
    own, variance = h.diagonal(), torch.diag(v)
    apart = (own[i] - h[i, :, None] - h[i, None, :] + h for i in range(len(v)))  # [i][a, b] = <h_i - h_a, h_i - h_b>
    weights = torch.stack([least_quadratic(d + variance) for d in apart])
    kept = torch.where(weights < drop, 0.0, weights)
    kept = kept + torch.diag((kept.sum(1) == 0).to(kept))  # among very many alike, all may be small
    return kept / kept.sum(1, keepdim=True)


def fedpac(options: FedPacOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedPAC."""
    at = cut(task, "head", "fedpac", needs="near")
    rule = options.client_optimizer.build()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Pac:
        z = at.whole(shared["z"], client_state)
        return _Pac(z, (rule.init(z), rule.init(z)), Moments.none(at, z), Moments.none(at, z))

    def look_before(ops: Ops, shared: Mapping[str, Any], pac: _Pac, batch: Batch, where: StepInfo, key: Key) -> _Pac:
        return pac._replace(before=pac.before.plus(ops, pac.z, batch))

    def look_after(ops: Ops, shared: Mapping[str, Any], pac: _Pac, batch: Batch, where: StepInfo, key: Key) -> _Pac:
        return pac._replace(after=pac.after.plus(ops, pac.z, batch))

    def fit_head(ops: Ops, shared: Mapping[str, Any], pac: _Pac, batch: Batch, where: StepInfo, key: Key) -> _Pac:
        return _moved(ops, shared, pac, ops.grad("train", pac.z, batch, key)[0], kept=False)

    def fit_body(ops: Ops, shared: Mapping[str, Any], pac: _Pac, batch: Batch, where: StepInfo, key: Key) -> _Pac:
        ctx = target(shared["prototypes"], shared["known"], shared["pull"])
        return _moved(ops, shared, pac, ops.grad("near", pac.z, batch, key, ctx=ctx)[0], kept=True)

    def _moved(ops: Ops, shared: Mapping[str, Any], pac: _Pac, d: Tree, *, kept: bool) -> _Pac:
        place = int(kept)
        d, after = rule.update(pac.optimizer[place], at.still(d, kept=kept), pac.z)
        z = ops.step("train", pac.z, shared["lr"], at.still(d, kept=kept))
        return pac._replace(z=z, optimizer=replaced(pac.optimizer, place, after))

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, pac: _Pac
    ) -> tuple[Message, Tree]:
        head = at.stays(pac.z)
        h, v = statistics(pac.before)
        features = {"prototypes": pac.after.means(), "known": pac.after.known.to(torch.int32)}  # a count: see below
        return Message({"z": at.travels(pac.z), "head": head, "h": h, "v": v, **features}), head

    stages = (
        LocalLoop(step=look_before, batches=EVERYTHING),
        LocalLoop(step=fit_head, batches=options.head_plan()),
        LocalLoop(step=fit_body, batches=options.plan()),
        LocalLoop(step=look_after, batches=EVERYTHING),
    )
    work = Training(client_init=client_init, loops=stages, client_final=client_final, divisible=False)
    reduce = {
        "z": Mean(),
        "head": CollectUploads(),
        "h": CollectUploads(),
        "v": CollectUploads(),
        "prototypes": Total(),
        "known": Total(),
    }
    train = Phase(
        name="train", work=work, reduce=reduce, weight=options.weight, client_state=initial, model="z", dated=True
    )
    receive = Phase(
        name="heads",
        work=LocalWork(client_init=_given, loops=(), client_final=_kept),
        reduce={},
        client_state=initial,
        dated=True,
    )

    def message(state: State, t: int) -> Message:
        send = {"z": state.z, "prototypes": state.prototypes, "known": state.known}
        return Message(send, {"lr": options.rates(t, task.parts), "pull": options.pull}, {"initial": state.initial})

    def init(z: Tree, key: Key, problem: Problem) -> State:
        empty = Moments.none(at, z)
        return State(at.travels(z), at.stays(z), empty.features, empty.counts)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        result = rnd.map_reduce(train, shared=message(state, rnd.index), cohort=rnd.invite(cohort.size))
        weights = mixtures(result["h"].gram(), T.leaves(result["v"].stacked())[0].double(), options.drop)
        heads = T.map(lambda leaf: torch.tensordot(weights.to(leaf.dtype), leaf, 1), result["head"].stacked())
        heard = Cohort(result.received, torch.zeros_like(result.received))
        rnd.map_reduce(receive, shared=Message({}, {}, {"initial": state.initial}), cohort=heard, client_input=heads)
        # Who forges what is divided and what it is divided by forges nothing; whole numbers are told truly.
        count = result["known"].to(state.known.dtype)
        common = torch.where(count[:, None] > 0, result["prototypes"] / count.clamp(min=1)[:, None], state.prototypes)
        new = State(result["z"], state.initial, common, torch.maximum(state.known, (count > 0).to(count.dtype)))
        return new, {"own_head": float(weights.diagonal().mean())}

    return Algorithm(
        init,
        round,
        (train, receive),
        {"global": View(lambda state: at.whole(state.z, state.initial))},
        minimises=True,
        same_cohort=True,
        buffers=True,
        personal=Personal(message, LocalWork(client_init=client_init, loops=(), client_final=_whole), initial),
    )


def statistics(seen: Moments) -> tuple[Tensor, Tensor]:
    """Return h (classes, width) and V, a scalar, of what a client has seen of its features."""
    n = seen.counts.sum().clamp(min=1)
    h = seen.features / n
    return h, (seen.squares.sum() / n - h.square().sum()) / n


def _whole(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, pac: _Pac) -> tuple[Message, Tree]:
    return Message({"z": pac.z}), client_state


def _given(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tree:
    return client_input


def _kept(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, head: Tree) -> tuple[Message, Tree]:
    return Message({}), head
