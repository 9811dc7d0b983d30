"""FedProx: FedAvg with a proximal term that holds local training near the global model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Algorithm 2: clients descend
F_i(w) + (mu / 2) |w - w_t|^2. With mu = 0 this is FedAvg.
"""

from __future__ import annotations

from pydantic import Field

from fedfleet.algorithms.fedavg import FedAvgOptions, averaging
from fedfleet.algorithms.local import held
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import Algorithm, Task


class FedProxOptions(FedAvgOptions):
    """Options of FedProx."""

    mu: float = Field(default=0.01, ge=0)
    """Weight of the proximal term, mu."""


def fedprox(options: FedProxOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedProx."""
    return averaging(options, task, cohort, held, lambda t: {"mu": options.mu})
