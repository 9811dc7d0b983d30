"""Local descent-ascent held near the model that was sent, by a proximal term of each player: the baselines of FedMM.

Shen et al., "FedMM: a communication efficient solver for federated adversarial domain adaptation", AAMAS 2023. Averages are
unweighted.

    paper                    here
    omega, psi               z["x"], z["y"]
    mu                       mu1, mu2
    omega_0, psi_0           shared["z"]

    fedprox_sgda   omega <- omega - eta1 (grad f_i + mu1 (omega - omega_0)),   psi <- psi + eta2 (grad f_i - mu2 (psi - psi_0))
    fedsgda        the same without these terms and with one local step: descent-ascent on the mean of the gradients

FedAvgSGDA is the first without these terms: ``local_sgda``.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from fedfleet.algorithms.local import held, local_training
from fedfleet.algorithms.local_sgda import averaged
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.simulator.author import Algorithm, Task


class ProximalOptions(LocalOptions):
    """Options of local descent-ascent with a proximal term of each player."""

    mu1: float = Field(default=2.0, ge=0)
    """Weight of the primal proximal term; 2 in FedMM's released code."""
    mu2: float = Field(default=2.0, ge=0)
    """Weight of the dual one."""

    def mu(self, parts: tuple[str, ...]) -> dict[str, float]:
        """Return the weights, one a part; of what is no player, such as buffers, 0."""
        return {p: {"x": self.mu1, "y": self.mu2}.get(p, 0.0) for p in parts}


class OneStepOptions(LocalOptions):
    """Options of descent-ascent with one local step."""

    steps: int | None = Field(default=1, ge=1, le=1)
    """Always 1: with more of them it is fedavg_sgda."""

    @model_validator(mode="after")
    def _one_step(self) -> OneStepOptions:
        if self.steps is None:
            raise ValueError(f"epochs={self.epochs} is not for a method of one local step: leave it out, and steps too")
        return self


def fedprox_sgda(options: ProximalOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedProxSGDA; its state is z."""
    return averaged(options, task, cohort, local_training(options.plan(), held), {"mu": options.mu(task.parts)})


def fedsgda(options: OneStepOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedSGDA; its state is z."""
    return averaged(options, task, cohort, local_training(options.plan()))
