"""FedFix: an asynchronous server that steps at fixed times, whoever has answered by then.

Fraboni, Vidal, Kameni & Lorenzi, "A general theory for federated optimization with asynchronous and heterogeneous clients
updates", JMLR 2023.

    paper       here
    Delta t     period_s; a round t is one server step
    p_i         weight: a client's part of all
    T_i         how long a client works
    d_i         p_i ceil(T_i / Delta t): p_i times the steps since it was last heard
    eta_g       global_lr

    every Delta t:  x <- x + eta_g sum over those that have answered of d_i Delta_i

A client is sent the model of the step at which it was heard. So a client that takes T_i is heard at one step in
ceil(T_i / Delta t), which d_i makes up for. The server counts steps, and need not know T_i. Steps that a client missed because it
was offline, or had no place, count too; the paper has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.f3ast import of_all
from fedfleet.algorithms.fedau import Counts
from fedfleet.algorithms.local import local_training, send_change
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import Algorithm, Buffer, Key, Message, Phase, Problem, Round, T, Task, Total, Tree, View


class FedFixOptions(LocalOptions):
    """Options of FedFix."""

    period_s: float = Field(default=1.0, gt=0, le=1e9)
    """Virtual seconds between two server steps, Delta t."""
    concurrency: int | None = Field(default=None, ge=1)
    """Clients at work at any time; null: all, as in the paper."""
    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta_g."""
    weight: Literal["num_examples", "uniform"] = "num_examples"
    """A client's part of all, p_i."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class State(NamedTuple):
    """The model, by round the earlier ones that clients still work on, and when clients were last heard."""

    z: Tree
    versions: Mapping[int, Tree]
    known: Counts


def fedfix(options: FedFixOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedFix."""
    work = local_training(options.plan(), optimizer=options.client_optimizer.build(), client_final=send_change)
    train = Phase(name="train", work=work, reduce={"dz": Total()}, reweighted=True)

    buffer = Buffer(seconds=options.period_s, concurrency=options.concurrency)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, {}, Counts.nothing())

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        versions = {**state.versions, rnd.index: state.z}
        messages = {v: Message(send={"z": z}, config={"lr": options.rates(v, task.parts)}) for v, z in versions.items()}

        def d(clients: Tensor) -> Tensor:
            """Return p_i times the steps (R,) since clients were last heard, this one included."""
            known = state.known.with_new(clients)
            steps = rnd.index - known.last[torch.searchsorted(known.clients, clients)]
            return of_all(clients, rnd.problem, options.weight) * steps

        result = rnd.buffered(train, messages=messages, buffer=buffer, weights=d)
        z, known = state.z, state.known
        for _, reduced in result:
            z = T.axpy(options.global_lr, reduced["dz"], z)
            now = torch.full_like(reduced.received, rnd.index)
            known = known.with_new(reduced.received).answered(reduced.received, now, None)
        kept = {v: versions[v] for v in sorted(rnd.versions())}
        answers = sum(len(reduced.received) for _, reduced in result)
        stale = sum(staleness * len(reduced.received) for staleness, reduced in result)
        return State(z, kept, known), {"answers": answers, "staleness_mean": stale / max(1, answers)}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, asynchronous=buffer)
