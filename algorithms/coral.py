"""CORAL: domains whose features have the same mean and covariance.

Sun & Saenko, "Deep CORAL: correlation alignment for deep domain adaptation", ECCV 2016, as in DomainBed for n domains:

    mean_d CE_d + gamma 2 / (n (n - 1)) sum_{i < j} (mean (m_i - m_j)^2 + mean (C_i - C_j)^2)

with m and C mean and covariance of what the last layer is given. As sum_j (m_i - m_j) = n (m_i - mean m), the part of domain i
in the gradient of that is, times n, the gradient of

    CE_i + gamma 2 n / (n - 1) (mean (m_i - m)^2 + mean (C_i - C)^2)        m, C the means over domains, fixed

Two exchanges a round, with the same clients: means of features and of their products, of all examples, at the model that is sent;
then local steps on that, with m_i and C_i of a minibatch. width + width^2 floats more each way, for features of that width.

    DomainBed     here
    mmd_gamma     penalty: 1 there
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.keeping import Cut, cut, matrix
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


class _Raw(NamedTuple):
    """Means over a client's examples of features (width,) and of their products (width, width)."""

    first: Tensor
    second: Tensor


def coral(options: PenaltyOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build CORAL."""
    at_head = cut(task, "head", "coral", needs="coral")

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        ctx = {name: shared[name] for name in ("mean", "covariance")} | {
            "penalty": shared["penalty"] * shared["factor"]
        }
        return ops.grad("coral", local.z, batch, key, ctx=ctx)[0]

    reduce = {"first": ByDomainMean(), "second": ByDomainMean()}
    moments = Phase(name="moments", work=_moments(at_head), reduce=reduce, weight="num_examples", dated=True)
    return penalised(options, task, cohort, direction, Look(moments, of_all), "coral")


def of_all(result: Reduced, invited: Cohort, problem: Problem) -> Known:
    """Tell the means over the domains heard of their means and unbiased covariances, and 2 n / (n - 1), 0 of one domain."""
    first, n = result["first"].value, len(result["first"].domain)
    count = result["first"].weight.to(first.dtype)[:, None, None]
    covariance = (result["second"].value - first[:, :, None] * first[:, None, :]) * count / (count - 1).clamp(min=1)
    send = {"mean": first.mean(0), "covariance": covariance.mean(0)}
    return Known(send, {"factor": 2 * n / (n - 1) if n > 1 else 0.0})


def _moments(head: Cut) -> LocalWork:
    def begin(shared: Mapping[str, Any], key: Key) -> _Raw:
        first = torch.zeros_like(matrix(head.stays(shared["z"]))[0])
        return _Raw(first, torch.zeros_like(first).expand(len(first), len(first)))

    def add(ops: Ops, shared: Mapping[str, Any], raw: _Raw, batch: Batch, at: StepInfo, key: Key) -> _Raw:
        features = ops.apply("features", shared["z"], batch)
        seen = torch.where((batch.weight > 0)[:, None], features, 0.0)
        return _Raw(raw.first + seen.sum(0) / at.num_examples, raw.second + seen.mT @ seen / at.num_examples)

    return over_all(begin, add, _Raw._asdict)
