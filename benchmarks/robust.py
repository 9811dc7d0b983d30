"""Robust training as the engine sees it: a net against one perturbation that all images share.

min over the net x, max over y:  mean CE(net_x(a + y), label) - LAMBDA |y|^2, the second experiment of CDMA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from benchmarks.peers import workload
from benchmarks.peers.workload import Case
from fedfleet.simulator.rng import Key
from fedfleet.simulator.tree import Tree
from fedfleet.simulator.work import Batch, Objective

LAMBDA = 0.001


class RobustTraining:
    """The task of a case: no metrics, since benchmarks evaluate nothing."""

    parts = ("x", "y")
    functions: Mapping[str, Any] = {}

    def __init__(self, case: Case):
        self._case, self._net = case, workload.net(case)
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1, "y": -1})}

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = functional_call(self._net, z["x"], (batch.x + z["y"]["perturbation"],))
        each = F.cross_entropy(outputs, batch.y, reduction="none")
        return batch.mean(each) - LAMBDA * (z["y"]["perturbation"] ** 2).sum(), {}

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters, and no perturbation."""
        net = {name: p.detach().clone() for name, p in workload.net(self._case).named_parameters()}
        return {"x": net, "y": {"perturbation": torch.zeros(self._case.shape)}}

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Measure nothing."""
        return {}
