"""A net cut before its last layer, if that is linear: a body, which makes features, and a head."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, Tree
from fedfleet.tasks.stateful import called


class BodyAndHead:
    """A net whose last layer has the parameters ``head``; for models z = {"x": parameters}, and "b" where layers keep count."""

    def __init__(self, net: nn.Module, head: frozenset[str]):
        self._head = head
        self._body = copy.deepcopy(net)
        self._body.set_submodule(next(iter(head)).rpartition(".")[0], nn.Identity())

    def features(self, z: Tree, x: Tensor, **training: Any) -> tuple[Tensor, Tree]:
        """Return what the head is given (B, width) for inputs (B, ...), and what layers have counted by then."""
        body = {name: leaf for name, leaf in z["x"].items() if name not in self._head}
        return called(self._body, body, z.get(BUFFERS, {}), x, **training)

    def seen(self, z: Tree, batch: Batch) -> Tensor:
        """Return the features (B, width) of a batch, as they are outside training."""
        return self.features(z, batch.x)[0]

    def head(self, of: Tree) -> dict[str, Any]:
        """Return what there is of the head among parameters: "weight", and "bias" if it has one."""
        return {name.rpartition(".")[2]: of[name] for name in sorted(self._head)}

    def logits(self, of: Tree, features: Tensor) -> Tensor:
        """Return the logits (B, classes) of the head among the parameters."""
        return F.linear(features, **self.head(of))
