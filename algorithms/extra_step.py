"""Extra Step Local SGD: every local step first looks ahead, on a minibatch of its own.

Beznosikov, Samokhin & Gasnikov, "Distributed saddle-point problems: lower bounds, optimal algorithms and federated GANs",
arXiv 2010.13112 (2020), with a sampled cohort. Averages are unweighted.

    paper            here
    gamma            lr, of both parts (dual_lr is not the paper's)
    z^{k+1/3}        ahead = z^k - lr * direction at z^k, on the first minibatch
    z^{k+1}          z^k - lr * direction at ahead, on the second

K steps take 2 K minibatches, and as many gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfleet.algorithms.local import Local, local_training
from fedfleet.algorithms.local_sgda import averaged
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.simulator.author import Algorithm, Batch, Key, Ops, StepInfo, Task, Tree, rng


def look_ahead(
    ops: Ops, shared: Mapping[str, Any], local: Local, batches: tuple[Batch, Batch], at: StepInfo, key: Key
) -> Tree:
    """Return the direction at the point that a step along the first minibatch's leads to, on the second."""
    first, second = batches
    here, _ = ops.grad("train", local.z, first, rng.fold(key, "here"))
    ahead = ops.step("train", local.z, shared["lr"], here)
    return ops.grad("train", ahead, second, rng.fold(key, "ahead"))[0]


def extra_step(options: LocalOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Extra Step Local SGD; its state is z."""
    return averaged(options, task, cohort, local_training(options.plan(per_step=2), look_ahead))
