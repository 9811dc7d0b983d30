"""FedProx: FedAvg with a proximal term that holds local training near the global model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2: clients descend
F_i(w) + (mu / 2) |w - w_t|^2. With mu = 0 this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from fedfleet.algorithms.fedavg import FedAvgOptions, averaging
from fedfleet.algorithms.local import Local, gradient, proximal
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import Algorithm, At, Batch, Key, Ops, Task, Tree


class FedProxOptions(FedAvgOptions):
    """Options of FedProx."""

    mu: float = Field(default=0.01, ge=0)
    """Weight of the proximal term, mu."""


def fedprox(options: FedProxOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedProx."""

    def held(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: At, key: Key) -> Tree:
        return proximal(gradient(ops, shared, local, batch, at, key), local.z, shared["z"], shared["mu"])

    return averaging(options, task, cohort, held, {"mu": options.mu})
