"""A case in pfl-research, run by its own interpreter under torchrun: ``pfl_loop.py JOB``."""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from importlib.metadata import version

import torch
import torch.nn.functional as F
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

NEVER = 10**9


class Learner(torch.nn.Module):
    """The net as pfl-research wants it."""

    def __init__(self, net: torch.nn.Module):
        super().__init__()
        self.net = net

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        """Return the cross-entropy of a batch."""
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, float]:
        """Return nothing: there is no evaluation."""
        return {}


class Clock(TrainingProcessCallback):
    """Times every round."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def on_train_begin(self, *, model: object) -> Metrics:
        """Start."""
        self.ticks.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: object, model: object, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Take the time."""
        self.ticks.append(time.perf_counter())
        return False, Metrics()


def users(case: workload.Case) -> Iterator[int]:
    """Yield the clients of round after round."""
    for t in itertools.count():
        yield from workload.cohort(case, t)


def main() -> None:
    """Run the job and print its times, on the first process only."""
    torch.set_num_threads(1)
    job = workload.asked()
    case = job.case
    x, y = workload.data(case)
    clients = [Dataset([x[c], y[c]], user_id=str(c)) for c in range(case.clients)]
    federation = FederatedDataset(clients.__getitem__, users(case).__next__)
    learner = Learner(workload.net(case))
    model = PyTorchModel(
        learner,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(learner.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.warmup + job.rounds,
            evaluation_frequency=NEVER,
            train_cohort_size=case.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=case.epochs, local_learning_rate=case.lr, local_batch_size=case.batch
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if get_default_framework_module().distributed.global_rank == 0:
        workload.answer([b - a for a, b in itertools.pairwise(clock.ticks)], job, f"pfl {version('pfl')}")


if __name__ == "__main__":
    main()
