"""MMD: domains whose features have the same distribution, by their maximum mean discrepancy.

Li, Pan, Wang & Kot, "Domain generalization with adversarial feature learning", CVPR 2018, as in DomainBed, which has its distance
without the adversary. Of n domains:

    mean_d CE_d + gamma 2 / (n (n - 1)) sum_{i < j} MMD^2(f_i, f_j)        kernel sum_g exp(-g |x - y|^2), g = 1e-3, 1e-2, ..., 1e3

Here a kernel is the mean product of random waves (``waves``), so that MMD^2 is |m_i - m_j|^2, m the mean of what the last
layer is given in waves. Then, as in CORAL, the part of domain i in the gradient is, times n, the gradient of

    CE_i + gamma 2 n / (n - 1) |m_i - m|^2                                 m the mean over domains, fixed

Two exchanges a round, with the same clients: the means, of all examples, at the model that is sent; then local steps with m_i of a
minibatch. ``waves`` floats a kernel more go each way. The waves are those of one seed, the same in every run, and travel nowhere.

    DomainBed     here
    mmd_gamma     penalty: 1 there
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.keeping import cut, matrix
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
    in_waves,
    rng,
    waves,
)


class MmdOptions(PenaltyOptions):
    """Options of MMD."""

    waves: int = Field(default=64, ge=1)
    """Random waves a kernel, of which there are seven."""


def mmd(options: MmdOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build MMD."""
    at_head = cut(task, "head", "mmd", needs="mmd")

    def common(z: Tree) -> dict[str, Tensor]:
        weight = matrix(at_head.stays(z))
        frequencies, shifts = waves(
            rng.fold(rng.key(0, weight.device), "mmd"), weight.shape[1], options.waves, weight.dtype
        )
        return {"frequencies": frequencies, "shifts": shifts}

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        ctx = {name: shared[name] for name in ("mean", "frequencies", "shifts")}
        return ops.grad("mmd", local.z, batch, key, ctx={**ctx, "penalty": shared["penalty"] * shared["factor"]})[0]

    means = Phase(name="means", work=_means(), reduce={"mean": ByDomainMean()}, weight="num_examples", dated=True)
    return penalised(options, task, cohort, direction, Look(means, of_all, common), "mmd")


def of_all(result: Reduced, invited: Cohort, problem: Problem) -> Known:
    """Tell the mean over the domains heard of their means in waves, and 2 n / (n - 1), 0 of one domain."""
    mean = result["mean"].value
    n = len(mean)
    return Known({"mean": mean.mean(0)}, {"factor": 2 * n / (n - 1) if n > 1 else 0.0})


def _means() -> LocalWork:
    def begin(shared: Mapping[str, Any], key: Key) -> Tensor:
        return torch.zeros_like(shared["shifts"])

    def add(ops: Ops, shared: Mapping[str, Any], total: Tensor, batch: Batch, at: StepInfo, key: Key) -> Tensor:
        each = in_waves(ops.apply("features", shared["z"], batch), shared["frequencies"], shared["shifts"])
        return total + torch.where((batch.weight > 0)[:, None], each, 0.0).sum(0) / at.num_examples

    return over_all(begin, add, lambda total: {"mean": total})
