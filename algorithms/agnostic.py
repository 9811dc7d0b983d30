"""Building blocks of AFL and DRFA: client work, cohorts drawn by domain, estimates of all domains' losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.local import zero
from fedfleet.simulator.author import (
    Batch,
    BatchPlan,
    Cohort,
    Domains,
    Key,
    LocalLoop,
    LocalWork,
    Message,
    Ops,
    Problem,
    Reduced,
    Round,
    StepInfo,
    T,
    Tree,
    rng,
)


class _Path(NamedTuple):
    """The sum of the gradients along a client's local steps, and the loss at the first point."""

    total: Tree
    loss: Tensor


def weighted_gradient(plan: BatchPlan, *, losses: bool) -> LocalWork:
    """Return the sum of minibatch gradients along local steps from ``shared["z"]``, and with ``losses`` the loss there.

    It is taken ``client_input`` times, if there is one, which the client tells back.
    """

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Path:
        return _Path(T.zeros_like(shared["z"]), zero(shared, key))

    def step(ops: Ops, shared: Mapping[str, Any], path: _Path, batch: Batch, at: StepInfo, key: Key) -> _Path:
        here = shared["z"] if at.k == 0 else T.axpy(-shared["local_lr"], path.total, shared["z"])
        d, aux = ops.grad("train", here, batch, key)
        if at.k == 0:
            return _Path(d, aux["loss"])
        return _Path(T.add(path.total, d), path.loss)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, path: _Path
    ) -> tuple[Message, Tree]:
        send = {"g": path.total if client_input is None else T.scale(client_input, path.total)}
        told = {} if client_input is None else {"scale": client_input}
        return Message(send | ({"loss": path.loss} if losses else {}), told), client_state

    return LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)


def loss_at_z(size: int | None) -> LocalWork:
    """Return the loss at ``shared["z"]`` on one batch of so many examples, or on all."""

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tree:
        return zero(shared, key)

    def step(ops: Ops, shared: Mapping[str, Any], carry: Tree, batch: Batch, at: StepInfo, key: Key) -> Tree:
        return ops.value("train", shared["z"], batch, key)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, carry: Tree
    ) -> tuple[Message, Tree]:
        return Message({"loss": carry}), client_state

    plan = BatchPlan(size=size, steps=1)
    return LocalWork(
        client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final, divisible=False
    )


def by_shares(rnd: Round, size: int, mixture: Tensor) -> Cohort:
    """Invite clients of domains drawn from a mixture with replacement, in each by the number of examples."""
    domains = of_problem(rnd.problem)

    def clients(number: int, key: Key) -> Tensor:
        u = rng.uniform(rng.fold(key, "domain"), (number,), torch.float64)
        upto = mixture.cumsum(0)
        drawn = torch.searchsorted(upto, u * upto[-1], right=True)
        return domains.draw(drawn, rng.fold(key, "client"))

    return rnd.draw(size, clients)


def share_of(problem: Problem, cohort: Cohort, mixture: Tensor) -> Tensor:
    """Return lambda_k n_i / m_k of each client i of a cohort, k its domain: its part in the mixture of all examples."""
    domains = of_problem(problem)
    mine = domains.of(cohort.clients)
    assert problem.num_examples is not None
    return mixture[mine] * problem.num_examples(cohort.clients) / domains.examples[mine]


def of_problem(problem: Problem) -> Domains:
    """Return the domains of a federation. Raises ValueError where it has none."""
    if problem.domains is None:
        raise ValueError("the problem has no domains")
    return problem.domains


def latest_losses(result: Reduced, known: Tensor) -> Tensor:
    """Return the last known losses (p,), NaN for domains that nobody has answered for yet, with those just heard."""
    heard = result["loss"]
    return known.index_copy(0, heard.domain, heard.value.double())


def estimated(result: Reduced, problem: Problem, known_losses: Tensor, estimator: str, answers: float) -> Tensor:
    """Return the losses (p,) of all domains from those of the clients heard.

    "horvitz_thompson": (N/S) sum n_i L_i / m_k, 0 for a domain nobody answered for; "ratio": ``known_losses``, their mean where
    there is none yet; "single": p times the mean over all answers, of clients drawn from domains drawn uniformly. S is ``answers``:
    those heard, where all are as likely to be; those invited, where each is weighted by one over its chance.
    """
    heard, examples = result["loss"], of_problem(problem).examples
    value, weight = heard.value.double(), heard.weight.double()
    if estimator == "ratio":
        return known_losses.where(known_losses.isfinite(), known_losses.nanmean().nan_to_num())
    drawn = len(examples) if estimator == "single" else problem.clients / examples[heard.domain].double()
    return torch.zeros_like(known_losses).index_copy(0, heard.domain, value * weight * drawn / answers)
