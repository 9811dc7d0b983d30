"""IRM: each client's loss with a penalty on how much a common factor of its logits could lower it.

Arjovsky, Bottou, Gulrajani & Lopez-Paz, "Invariant risk minimization", arXiv 1907.02893, IRMv1 as in DomainBed: the gradients by
that factor, at 1, of two halves of a batch are multiplied, so that the penalty is unbiased. A client is taken to be of one domain.

    DomainBed                 here
    irm_lambda                penalty: 100 there
    irm_penalty_anneal_iters  anneal_rounds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfleet.algorithms.keeping import cut
from fedfleet.algorithms.local import Local
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.penalised import PenaltyOptions, penalised
from fedfleet.simulator.author import Algorithm, Batch, Key, Ops, StepInfo, Task, Tree


def irm(options: PenaltyOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build IRM."""
    cut(task, "head", "irm", needs="irm")

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        return ops.grad("irm", local.z, batch, key, ctx={"penalty": shared["penalty"]})[0]

    return penalised(options, task, cohort, direction, None, "irm")
