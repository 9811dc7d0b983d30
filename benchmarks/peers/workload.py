"""The job that every contestant runs: clients, their data, nets, local training.

Needs NumPy and torch alone, so that any environment can import it. The data of a client are a pure function of
(seed, client), so that all contestants train on the same numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A federated job.

    Attributes:
        name: what it is called on command lines.
        model: "logistic", "mlp", "lenet", "lenet_relu", "cnn" or "small_cnn".
        shape: of one example.
        clients, cohort: N, and how many of them work in a round (in each phase of it).
        samples, batch, epochs: of one client; its local steps are K = epochs * ceil(samples / batch).
        lr: learning rate of the clients.
        algorithm: "fedavg", "cdma_ada" or "fedmm".
        task: "classification", "auc", "robust", "domain_adaptation" or "source_only".
        rounds, warmup: rounds to time, some seconds of them, and rounds before.

    """

    name: str
    model: str
    shape: tuple[int, ...]
    clients: int
    cohort: int
    samples: int
    batch: int = 10
    epochs: int = 1
    lr: float = 0.1
    algorithm: str = "fedavg"
    task: str = "classification"
    seed: int = 0
    rounds: int = 10
    warmup: int = 3

    @property
    def steps(self) -> int:
        """Local steps of one client a round, K."""
        return self.epochs * -(-self.samples // self.batch)


@lru_cache(maxsize=1)
def data(case: Case) -> tuple[Tensor, Tensor]:
    """Return standard normal inputs (N, samples, *shape) and labels (N, samples) of all clients."""
    x = np.empty((case.clients, case.samples, *case.shape), np.float32)
    y = np.empty((case.clients, case.samples), np.int64)
    for client in range(case.clients):
        draw = np.random.default_rng((case.seed, client))
        y[client] = draw.integers(0, CLASSES, case.samples)
        draw.standard_normal(out=x[client], dtype=np.float32)
    return torch.from_numpy(x), torch.from_numpy(y)


def cohort(case: Case, round_index: int) -> list[int]:
    """Return the clients of a round."""
    return (
        np.random.default_rng((case.seed, case.clients, round_index)).permutation(case.clients)[: case.cohort].tolist()
    )


def net(case: Case) -> nn.Module:
    """Return the initial net, drawn from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return _net(case.model, case.shape)


@cache
def scratch(case: Case) -> nn.Module:
    """Return a net to load parameters into, the same one at each call in a process."""
    return net(case)


def _net(model: str, shape: tuple[int, ...]) -> nn.Module:
    if model == "logistic":
        return nn.Linear(shape[0], CLASSES)
    if model == "mlp":
        wide = 200
        return nn.Sequential(
            *(nn.Linear(shape[0], wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()), nn.Linear(wide, CLASSES)
        )
    if model == "cnn":
        return cnn()
    if model == "small_cnn":  # fedfleet's extractor for domain adaptation, and its head
        return nn.Sequential(
            *(nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * (shape[1] // 4) * (shape[2] // 4), 64), nn.ReLU(), nn.Linear(64, CLASSES)),
        )
    if model in ("lenet", "lenet_relu"):
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
            *((nn.ReLU(),) if model == "lenet_relu" else ()),
        )
    raise ValueError(f"unknown model {model!r}")


def cnn() -> nn.Sequential:
    """Return the net of pfl-research's CIFAR-10 benchmark: two 3x3 convolutions, one pooling, two linear layers (1.6 M floats)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, case: Case) -> None:
    """Train in place on one client's examples: plain SGD, batches in stored order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
    for _ in range(case.epochs):
        for rows, labels in zip(x.split(case.batch), y.split(case.batch)):  # noqa: B905 (both have as many)
            optimizer.zero_grad()
            F.cross_entropy(model(rows), labels).backward()
            optimizer.step()


@dataclass(frozen=True)
class Job:
    """What a peer's script is asked for: ``rounds`` timed rounds after ``warmup`` others."""

    case: Case
    rounds: int
    warmup: int
    workers: int


def asked() -> Job:
    """Return the job given as JSON on the command line."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    case = given["case"]
    return Job(Case(**{**case, "shape": tuple(case["shape"])}), given["rounds"], given["warmup"], given["workers"])


def answer(seconds: Sequence[float], job: Job, version: str) -> None:
    """Print what was measured as one JSON line: seconds of every round, warm-up included."""
    timed = list(seconds)[job.warmup :]
    if len(timed) != job.rounds:
        sys.exit(f"{len(timed)} rounds were timed instead of {job.rounds}")
    print(json.dumps({"seconds": timed, "version": version, "torch": torch.__version__}), flush=True)
