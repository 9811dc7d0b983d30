"""V-REx: the mean of the domains' losses plus their variance.

Krueger et al., "Out-of-distribution generalization via risk extrapolation (REx)", ICML 2021, as in DomainBed:

    mean_d R_d + beta mean_d (R_d - mean R)^2

whose gradient is mean_d (1 + 2 beta (R_d - mean R)) grad R_d. Two exchanges a round, with the same clients: the losses at the model
that is sent; then local steps along the gradient times that factor, which a client is told. One whose domain was not heard of in
the first has the factor 1.

    DomainBed                  here
    vrex_lambda                penalty, beta: 10 there
    vrex_penalty_anneal_iters  anneal_rounds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.algorithms.agnostic import of_problem
from fedfleet.algorithms.local import Local, over_all, zero
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
    T,
    Task,
    Tree,
)


def vrex(options: PenaltyOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build V-REx."""

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        g = ops.grad("train", local.z, batch, key)[0]
        return {**g, "x": T.scale(1 + 2 * shared["penalty"] * local.client_state, g["x"])}

    risk = Phase(name="risk", work=_all_losses(), reduce={"loss": ByDomainMean()}, weight="num_examples", dated=True)
    return penalised(options, task, cohort, direction, Look(risk, above_mean), "vrex")


def above_mean(result: Reduced, invited: Cohort, problem: Problem) -> Known:
    """Tell each client how far the loss of its domain is above the mean over domains: R_d - mean R (S,)."""
    domains, heard = of_problem(problem), result["loss"]
    above = torch.zeros(len(domains.examples), dtype=heard.value.dtype)
    above = above.index_copy(0, heard.domain.cpu(), (heard.value - heard.value.mean()).cpu())
    return Known({}, {}, above[domains.of(invited.clients)])


def _all_losses() -> LocalWork:
    """Return the mean loss at ``shared["z"]`` over all of a client's examples."""

    def add(ops: Ops, shared: Mapping[str, Any], total: Tensor, batch: Batch, at: StepInfo, key: Key) -> Tensor:
        loss = batch.mean(ops.apply("per_example", shared["z"], batch)["loss"])
        return total + loss * batch.count() / at.num_examples

    return over_all(zero, add, lambda total: {"loss": total})
