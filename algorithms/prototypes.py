"""Prototypes: the mean features of each class on a client, by which FedPAC and FedAS compare bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.keeping import Cut, matrix
from fedfleet.simulator.author import Batch, Ops, Tree


class Moments(NamedTuple):
    """Sums over the examples of each class: of features (classes, width), of their squared norms (classes,), of ones (classes,)."""

    features: Tensor
    squares: Tensor
    counts: Tensor

    @classmethod
    def none(cls, at: Cut, z: Tree) -> Moments:
        """Return those of no examples; the head's weight (classes, width) tells the shapes."""
        weight = matrix(at.stays(z))
        return cls(torch.zeros_like(weight), torch.zeros_like(weight[:, 0]), torch.zeros_like(weight[:, 0]))

    def plus(self, ops: Ops, z: Tree, batch: Batch) -> Moments:
        """Return them with those of a batch under the body of ``z``."""
        features = ops.apply("features", z, batch)
        label = torch.arange(len(self.counts), device=batch.y.device) == batch.y[:, None]
        real = (label & (batch.weight > 0)[:, None]).to(features.dtype)  # (B, classes)
        seen = torch.where((batch.weight > 0)[:, None], features, 0.0)
        return Moments(
            self.features + real.mT @ seen,
            self.squares + real.mT @ seen.square().sum(1),
            self.counts + real.sum(0),
        )

    @property
    def known(self) -> Tensor:
        """1 for each class of which there are examples (classes,)."""
        return (self.counts > 0).to(self.features.dtype)

    def means(self) -> Tensor:
        """Return the mean features (classes, width), 0 where there are no examples."""
        return self.features / self.counts.clamp(min=1)[:, None]


def target(prototypes: Tensor, known: Tensor, penalty: Any = 1.0) -> Mapping[str, Any]:
    """Return what the objectives "near" and "aligned" take as ctx."""
    return {"prototypes": prototypes, "known": known, "penalty": penalty}
