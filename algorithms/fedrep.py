"""FedRep: each client fits a head of its own to the common body, then the body to its head, and the bodies are averaged.

Collins, Hassani, Mokhtari & Shakkottai, "Exploiting shared representations for personalized federated learning", ICML 2021,
Algorithm 1.

    paper                here
    phi, h_i             what travels; the head, a client's state
    tau_h, alpha         head_epochs or head_steps, lr
    one update of phi    epochs or steps

The paper's experiments weigh clients' bodies alike: weight uniform.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field, model_validator

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.keeping import cut, keeping, training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import Algorithm, BatchPlan, Task


class FedRepOptions(AveragingOptions):
    """Options of FedRep; ``steps`` and ``epochs`` are those of the body."""

    head_steps: int | None = Field(default=None, ge=1)
    """Local steps of the head, before the body's; give this or ``head_epochs``."""
    head_epochs: int | None = Field(default=None, ge=1)
    """Passes over the local data for the head; one if neither is given."""

    @model_validator(mode="after")
    def _one_head_length(self) -> FedRepOptions:
        if self.head_steps is not None and self.head_epochs is not None:
            raise ValueError("give head_steps or head_epochs, not both")
        if self.head_steps is None and self.head_epochs is None:
            object.__setattr__(self, "head_epochs", 1)
        return self

    def head_plan(self) -> BatchPlan:
        """Return the batch plan of the head."""
        return replace(self.plan(), steps=self.head_steps, epochs=self.head_epochs)


def fedrep(options: FedRepOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedRep."""
    at = cut(task, "head", "fedrep")
    head, body = options.head_plan(), options.plan()
    stages = (training(at, options, head, "kept"), training(at, options, body, "rest", place=1))
    return keeping(options, task, cohort, at, stages)
