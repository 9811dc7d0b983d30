"""FedBuff: an asynchronous server that steps whenever its buffer is full.

Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022, Algorithms 1 and 2.

    paper          here
    w^t            z; a round t is one server step
    K              buffer
    M_c            concurrency, clients at work at any time
    Q, eta_l       steps (or epochs), lr
    eta_g          global_lr
    Delta_i        the client's final point minus the point it was sent (the paper's with its sign turned)
    s(tau)         (1 + tau)^-staleness_exponent, tau the server steps made since the client was sent its point

Clients answer in the order of the virtual clock, so what is fast is heard more often. The options of ``cohort`` that are
about rounds (invite, respond, deadline_s, over_select, late) do not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field

from fedfleet.algorithms.local import local_training, send_change
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import Algorithm, Buffer, Key, Message, Phase, Problem, Round, T, Task, Total, Tree, View


class FedBuffOptions(LocalOptions):
    """Options of FedBuff."""

    buffer: int = Field(default=10, ge=1)
    """Answers a server step, K."""
    concurrency: int = Field(default=100, ge=1)
    """Clients at work at any time, M_c; all clients if there are fewer."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Answers older than this many server steps are thrown away."""
    staleness_exponent: float = Field(default=0.5, ge=0)
    """An answer tau steps old counts (1 + tau)^-this."""
    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta_g."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class State(NamedTuple):
    """The model, and by round the earlier ones that clients still work on."""

    z: Tree
    versions: Mapping[int, Tree]


def fedbuff(options: FedBuffOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedBuff."""

    work = local_training(options.plan(), optimizer=options.client_optimizer.build(), client_final=send_change)
    train = Phase(name="train", work=work, reduce={"dz": Total()})

    buffer = Buffer(options.buffer, concurrency=options.concurrency, max_staleness=options.max_staleness)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, {})

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        versions = {**state.versions, rnd.index: state.z}
        messages = {v: Message(send={"z": z}, config={"lr": options.rates(v, task.parts)}) for v, z in versions.items()}
        result = rnd.buffered(train, messages=messages, buffer=buffer)
        z = state.z
        for staleness, reduced in result:
            weight = options.global_lr * (1 + staleness) ** -options.staleness_exponent / options.buffer
            z = T.axpy(weight, reduced["dz"], z)
        answers = {b.staleness: len(b.reduced.received) for b in result}
        mean = sum(s * n for s, n in answers.items()) / sum(answers.values())
        kept = {v: versions[v] for v in sorted(rnd.versions())}
        return State(z, kept), {"staleness_mean": mean, "staleness_max": float(max(answers))}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, asynchronous=buffer)
