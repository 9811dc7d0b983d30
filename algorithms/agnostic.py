"""What AFL and DRFA share: the work of a client, cohorts drawn by a mixture of domains, the losses of all from those heard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.local import zero
from fedfleet.simulator.author import (
    At,
    Batch,
    BatchPlan,
    Cohort,
    Domains,
    Key,
    LocalWork,
    Message,
    Ops,
    Problem,
    Reduced,
    Round,
    Stage,
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

    It is taken ``inbox`` times, if there is one, which the client tells back.
    """

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> _Path:
        return _Path(T.zeros_like(shared["z"]), zero(shared, key))

    def step(ops: Ops, shared: Mapping[str, Any], path: _Path, batch: Batch, at: At, key: Key) -> _Path:
        here = shared["z"] if at.k == 0 else T.axpy(-shared["local_lr"], path.total, shared["z"])
        d, aux = ops.grad("train", here, batch, key)
        if at.k == 0:
            return _Path(d, aux["loss"])
        return _Path(T.add(path.total, d), path.loss)

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, path: _Path) -> tuple[Message, Tree]:
        send = {"g": path.total if inbox is None else T.scale(inbox, path.total)}
        told = {} if inbox is None else {"scale": inbox}
        return Message(send | ({"loss": path.loss} if losses else {}), told), own

    return LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish)


def loss_at_z(size: int | None) -> LocalWork:
    """Return the loss at ``shared["z"]`` on one batch of so many examples, or on all."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Tree:
        return zero(shared, key)

    def step(ops: Ops, shared: Mapping[str, Any], carry: Tree, batch: Batch, at: At, key: Key) -> Tree:
        return ops.value("train", shared["z"], batch, key)

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, carry: Tree) -> tuple[Message, Tree]:
        return Message({"loss": carry}), own

    plan = BatchPlan(size=size, steps=1)
    return LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish, divisible=False)


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


def learnt(found: Reduced, known: Tensor) -> Tensor:
    """Return the last known losses (p,), NaN for domains that nobody has answered for yet, with those just heard."""
    heard = found["loss"]
    return known.index_copy(0, heard.domain, heard.value.double())


def estimated(found: Reduced, problem: Problem, known_losses: Tensor, estimator: str, answers: float) -> Tensor:
    """Return the losses (p,) of all domains from those of the clients heard.

    "horvitz_thompson": (N/S) sum n_i L_i / m_k, 0 for a domain nobody answered for; "ratio": ``known_losses``, their mean where
    there is none yet; "single": p times the mean over all answers, of clients drawn from domains drawn uniformly. S is ``answers``:
    those heard, where all are as likely to be; those invited, where each is weighted by one over its chance.
    """
    heard, examples = found["loss"], of_problem(problem).examples
    value, weight = heard.value.double(), heard.weight.double()
    if estimator == "ratio":
        return known_losses.where(known_losses.isfinite(), known_losses.nanmean().nan_to_num())
    drawn = len(examples) if estimator == "single" else problem.clients / examples[heard.domain].double()
    return torch.zeros_like(known_losses).index_copy(0, heard.domain, value * weight * drawn / answers)
