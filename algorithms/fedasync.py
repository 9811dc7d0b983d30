"""FedAsync: an asynchronous server that mixes each model in as it comes, less the older it is.

Xie, Koyejo & Gupta, "Asynchronous federated optimization", arXiv 1903.03934, Algorithm 1.

    paper          here
    x_t            z; a round t is one answer
    alpha          mixing
    s(t - tau)     staleness: constant, polynomial or hinge, of the server's steps since the client was sent its point
    a, b           exponent, hinge
    rho            mu

    x_t <- (1 - alpha_t) x_{t-1} + alpha_t x_new,   alpha_t = alpha s(t - tau)

What is mixed in is the client's model, not its change, which is what ``fedbuff`` with a buffer of one adds. Who is fast answers
more often, and counts for more.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedfleet.algorithms.fedbuff import State
from fedfleet.algorithms.local import gradient, held, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions, refuse_others
from fedfleet.simulator.author import Algorithm, Buffer, Key, Mean, Message, Phase, Problem, Round, T, Task, Tree, View


class FedAsyncOptions(LocalOptions):
    """Options of FedAsync."""

    concurrency: int = Field(default=100, ge=1)
    """Clients at work at any time; all clients if there are fewer."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Answers older than this many server steps are thrown away."""
    mixing: float = Field(default=0.6, gt=0, le=1)
    """alpha."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """s: 1; (1 + tau)^-exponent; or 1 up to ``hinge`` and 1 / (exponent (tau - hinge) + 1) beyond."""
    exponent: float | None = Field(default=None, gt=0)
    """a: 0.5 of polynomial, 10 of hinge if not given."""
    hinge: int | None = Field(default=None, ge=0)
    """b, hinge only; 4 if not given."""
    mu: float = Field(default=0.0, ge=0)
    """Weight of a proximal term, rho."""
    client_optimizer: LocalOptimizer = LocalOptimizer()

    @model_validator(mode="after")
    def _applies(self) -> FedAsyncOptions:
        used = {"constant": set(), "polynomial": {"exponent"}, "hinge": {"exponent", "hinge"}}
        refuse_others(self, self.staleness, used[self.staleness], {"exponent", "hinge"})
        filled = {"polynomial": {"exponent": 0.5}, "hinge": {"exponent": 10.0, "hinge": 4}}
        for key, value in filled.get(self.staleness, {}).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)  # so that it stands in config.yaml
        return self

    def share(self, tau: int) -> float:
        """Return alpha s(tau)."""
        match self:
            case FedAsyncOptions(staleness="polynomial", exponent=float() as a):
                return self.mixing * (1 + tau) ** -a
            case FedAsyncOptions(staleness="hinge", exponent=float() as a, hinge=int() as b):
                return self.mixing / (a * max(0, tau - b) + 1)
            case _:
                return self.mixing


def fedasync(options: FedAsyncOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAsync."""
    work = local_training(options.plan(), held if options.mu else gradient, options.client_optimizer.build())
    train = Phase(name="train", work=work, reduce={"z": Mean()})

    buffer = Buffer(1, concurrency=options.concurrency, max_staleness=options.max_staleness)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(z, {})

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        versions = {**state.versions, rnd.index: state.z}

        def message(v: int, z: Tree) -> Message:
            return Message(send={"z": z}, config={"lr": options.rates(v, task.parts), "mu": options.mu})

        (came,) = rnd.buffered(train, messages={v: message(v, z) for v, z in versions.items()}, buffer=buffer)
        share = options.share(came.staleness)
        z = T.axpy(share, T.sub(came.reduced["z"], state.z), state.z)
        kept = {v: versions[v] for v in sorted(rnd.versions())}
        return State(z, kept), {"staleness": float(came.staleness), "mixing": share}

    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, asynchronous=buffer)
