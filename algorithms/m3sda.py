"""M3SDA-beta: moments of all domains' features are matched, while two heads are driven apart on the target, as in MCD.

Peng, Bai, Xia, Huang, Saenko & Wang, "Moment matching for multi-source domain adaptation", ICCV 2019, and the authors' code.
One client that holds all domains is the paper's; several are averaged.

    paper                   here
    MD^2, lambda            objective "matched" beside the cross-entropy; penalty
    G, C_1, C_2             "x", "head", "second"
    step 1                  "matched", all three: sum over sources of both heads' cross-entropy, and the moments
    step 2                  "discord", both heads: the same minus the discrepancy on the target
    step 3, n times         "idd", G; n is generator_steps
    the classifier tested   "head" alone, as in the code
"""

from __future__ import annotations

import torch
from pydantic import Field

from fedfleet.algorithms.fact import check_objective
from fedfleet.algorithms.mcd import McdOptions, driven_apart
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions
from fedfleet.simulator.author import BUFFERS, Algorithm, BatchPlan, Key, Task, Tree, View


class M3sdaOptions(McdOptions):
    """Options of M3SDA-beta."""

    batch_size: int = Field(default=640, ge=1)
    """Examples a step, as many of each domain: the code's 128 of each of five are 640."""
    lr: float = Field(default=2e-4, gt=0)
    optimizer: ClientOptimizer = ClientOptimizer(name="adam", weight_decay=5e-4)
    """The optimiser of G, and that of the heads."""
    penalty: float = Field(default=5e-4, ge=0)
    """Weight of the moments' distance, lambda."""
    moments: int = Field(default=5, ge=1)
    """The number of moments, from the mean on."""


def m3sda(options: M3sdaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build M3SDA-beta."""
    check_objective("m3sda", task, "matched", "task.name=two_heads")
    plan = BatchPlan(size=options.batch_size, steps=options.steps, epochs=options.epochs, stratified="domains")

    def told(key: Key) -> Tree:
        return {"moments": torch.full((options.moments,), options.penalty, dtype=torch.float64, device=key.device)}

    def first_head(z: Tree) -> Tree:
        seen = {n: v for n, v in z.get(BUFFERS, {}).items() if not n.startswith("second.")}
        return {"x": z["x"], "head": z["head"]} | ({BUFFERS: seen} if seen else {})

    made = driven_apart(options, task, cohort, plan, first="matched", ctx=told)
    return made._replace(views={"global": View(first_head)}, name="m3sda")
