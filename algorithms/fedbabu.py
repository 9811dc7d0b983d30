"""FedBABU: only the body is trained, under a head that stays as it was drawn; clients fine-tune both before they are evaluated.

Oh, Kim & Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022, Algorithm 1. Clients keep
nothing. FedOMG's experiments fine-tune for ten epochs.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.keeping import cut, keeping, training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import Algorithm, Task


class FedBabuOptions(AveragingOptions):
    """Options of FedBABU."""

    fine_tune_epochs: int = Field(default=10, ge=1)
    """Passes over a client's data, of body and head, before its own model is evaluated; the rest of the run knows nothing of it."""


def fedbabu(options: FedBabuOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedBABU."""
    at = cut(task, "head", "fedbabu")
    tuning = training(at, options, replace(options.plan(), steps=None, epochs=options.fine_tune_epochs), "all")
    stages = (training(at, options, options.plan(), "rest"),)
    return keeping(options, task, cohort, at, stages, learns=False, tuning=(tuning,))
