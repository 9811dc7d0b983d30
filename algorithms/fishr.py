"""Fishr: domains whose gradients by the head vary alike from example to example.

Rame, Dancette & Cord, "Fishr: invariant gradient variances for out-of-distribution generalization", ICML 2022, and its released
code. Of n domains, with v_d the variance over examples of each coordinate of the cross-entropy's gradient by the head:

    mean_d CE_d + lambda mean_d mean (v_d - v)^2        v the mean of the v_d

As sum_d (v_d - v) = 0, the part of domain d in the gradient of that is, times n, the gradient of

    CE_d + lambda mean (v_d - v)^2                      v fixed

Of a linear head, with E the softmax less the label and X the features and a 1, v_d = (E o E)' (X o X) / N - (E' X / N)^2, so that
no second derivative is taken. Two exchanges a round, with the same clients: the two means of v_d, of all examples, at the model
that is sent; then local steps with v_d of a minibatch. For K classes and features of a width w, 2 K (w + 1) floats more go up, and
K (w + 1) down.

    released code              here
    lambda                     penalty: 1000
    penalty_anneal_iters       anneal_rounds, in which there is no penalty: 1500 steps there
    ema of v_d, divided by     not there: all examples are seen. There the differences, and with them lambda, grow 20-fold in the
    1 - ema                    first hundred steps
    Adam begins anew after     not there
    the annealing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.keeping import Cut, cut
from fedfleet.algorithms.local import Local, over_all
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.penalised import Known, Look, PenaltyOptions, penalised
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    ByDomainMean,
    Cohort,
    Key,
    LocalWork,
    Ops,
    Phase,
    Problem,
    Reduced,
    StepInfo,
    Task,
    Tree,
)


class FishrOptions(PenaltyOptions):
    """Options of Fishr."""

    penalty: float = Field(default=1000.0, ge=0)
    """Weight of the penalty, lambda; 0 is FedAvg."""
    anneal_rounds: int = Field(default=0, ge=0)
    """Rounds at the beginning without the penalty."""

    def penalty_at(self, t: int) -> float:
        """Return the penalty's weight in round t."""
        return 0.0 if t < self.anneal_rounds else self.penalty


class _Moments(NamedTuple):
    """Means over a client's examples of the gradient by the head, and of its square, (classes, width + 1) each."""

    first: Tensor
    second: Tensor


def fishr(options: FishrOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Fishr."""
    at_head = cut(task, "head", "fishr", needs="fishr")

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        ctx = {"variance": shared["variance"], "penalty": shared["penalty"] * shared["factor"]}
        return ops.grad("fishr", local.z, batch, key, ctx=ctx)[0]

    reduce = {"first": ByDomainMean(), "second": ByDomainMean()}
    moments = Phase(name="variance", work=_moments(at_head), reduce=reduce, weight="num_examples", dated=True)
    return penalised(options, task, cohort, direction, Look(moments, of_all), "fishr")


def of_all(result: Reduced, invited: Cohort, problem: Problem) -> Known:
    """Tell the mean over the domains heard of their variances, and 1, or 0 where there is one domain."""
    first, second = result["first"].value, result["second"].value
    variance = (second - first.square()).mean(0)
    return Known({"variance": variance}, {"factor": float(len(first) > 1)})


def _moments(head: Cut) -> LocalWork:
    def begin(shared: Mapping[str, Any], key: Key) -> _Moments:
        leaves = head.stays(shared["z"])["x"].values()
        flat = torch.cat([torch.zeros_like(leaf).view(len(leaf), -1) for leaf in leaves], 1)
        return _Moments(flat, flat)

    def add(ops: Ops, shared: Mapping[str, Any], seen: _Moments, batch: Batch, at: StepInfo, key: Key) -> _Moments:
        found = ops.apply("head_moments", shared["z"], batch)
        return _Moments(*(old + found[name] / at.num_examples for name, old in seen._asdict().items()))

    return over_all(begin, add, _Moments._asdict)
