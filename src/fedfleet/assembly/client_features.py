"""Features of clients, to cluster them by: gradients or losses at the initial model.

Clustering by gradients before the first round follows Sattler, Müller & Samek, "Clustered federated learning", IEEE
TNNLS 2021. Gradients of many floats are sketched (Charikar, Chen & Farach-Colton, "Finding frequent items in data
streams", ICALP 2002), which keeps squared distances in the mean.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.population import Population, gather
from fedfleet.simulator.work import Batch

SKETCHED = 1024
"""Floats of a gradient that are kept as they are, and those of a sketch of more."""
ROWS = 500
"""Examples of a client at once."""


class ClientFeatures:
    """The vectors of clients at a model ``z``."""

    def __init__(self, task: Task, z: Tree):
        self._task, self._z = task, z

    def __call__(self, kind: str, clients: Population) -> NDArray[np.float64]:
        """Return the vectors (N, k) of all clients.

        "gradient": of the mean training loss, for what every player descends, scaled to length 1. "loss": of each label the mean
        loss of the client's examples that have it, and over all of them where there is none, so (N, classes).
        Raises ValueError where the task does not say the loss of an example.
        """
        if kind == "loss" and "per_example" not in self._task.functions:
            raise ValueError("by=loss: the task does not say the loss of each example: use by=gradient")
        with torch.no_grad():
            if kind == "gradient":
                return torch.stack([self._gradient(clients, i) for i in range(clients.size)]).numpy()
            means, losses = zip(*(self._losses(clients, i) for i in range(clients.size)), strict=True)
        by_label = pad_sequence(list(losses), batch_first=True, padding_value=torch.nan)
        return torch.where(by_label.isnan(), torch.stack(means)[:, None], by_label).numpy()

    def _batches(self, clients: Population, client: int) -> list[Batch]:
        mine = clients.local_data(torch.tensor([client]))
        rows = mine.rows[0, : int(mine.counts)].split(ROWS)
        return [Batch(gather(mine.data, some), torch.ones(len(some))) for some in rows]

    def _losses(self, clients: Population, client: int) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a client's examples, and that of each label, NaN where it has none."""
        batches, each = self._batches(clients, client), self._task.functions["per_example"]
        losses = torch.cat([each(self._z, b)["loss"].double() for b in batches])
        y = torch.cat([b.y for b in batches])
        total = torch.zeros(int(y.max()) + 1, dtype=torch.float64).index_add_(0, y, losses)
        return losses.mean(), total / y.bincount()

    def _gradient(self, clients: Population, client: int) -> Tensor:
        ops, total = EngineOps(self._task.objectives, self._task.functions), None
        for b in self._batches(clients, client):
            direction, rows = ops.grad("train", self._z, b, rng.key(0))[0], len(b.weight)
            total = T.scale(rows, direction) if total is None else T.axpy(rows, direction, total)
        flat = torch.cat([leaf.flatten().double() for leaf in T.leaves(total)])
        return sketch(flat) / flat.norm().clamp(min=1e-30)


def sketch(x: Tensor) -> Tensor:
    """Return a vector (d,) as it is, or if it is long the sums of its entries, with random signs, in random places (SKETCHED,)."""
    if len(x) <= SKETCHED:
        return x
    bits = rng.bits(rng.fold(rng.key(0), "sketch"), len(x))
    sign, place = 1 - 2 * (bits & 1), (bits >> 1) % SKETCHED
    return torch.zeros(SKETCHED, dtype=x.dtype).index_add_(0, place, x * sign)
