"""FedPer, LG-FedAvg and FedBN: averaging of a part of the model, the rest of which each client has for itself.

FedPer: Arivazhagan, Aggarwal, Singh & Choudhary, "Federated learning with personalization layers", arXiv 1912.00818, Algorithms
1 and 2: the base layers are averaged, with clients' numbers of examples as weights, and the last ones stay.
LG-FedAvg: Liang et al., "Think locally, act globally", arXiv 2001.01523: the other way round.
FedBN: Li, Jiang, Zhang, Kamp & Dou, "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021:
the layers that normalise stay, with their statistics.

In all of them a client's local steps move the whole model.
"""

from __future__ import annotations

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.keeping import Kept, cut, keeping, training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import Algorithm, Task


def fedper(options: AveragingOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedPer."""
    return _partly(options, task, cohort, "head", "fedper")


def lg_fedavg(options: AveragingOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build LG-FedAvg."""
    return _partly(options, task, cohort, "body", "lg_fedavg")


def fedbn(options: AveragingOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedBN."""
    return _partly(options, task, cohort, "norm", "fedbn")


def _partly(options: AveragingOptions, task: Task, cohort: CohortOptions, what: Kept, name: str) -> Algorithm:
    at = cut(task, what, name)
    return keeping(options, task, cohort, at, (training(at, options, options.plan(), "all"),))
