"""AUC maximisation in its l2-relaxed minimax form (Ying, Wen & Lyu, NeurIPS 2016; CDMA's first experiment).

    paper            here
    x = (w, a, b)    z["x"] = {"net", "a", "b"}
    y = alpha        z["y"] = {"alpha"}
    h_w(s)           score: entry 1 of the softmax over the net's outputs, in [0, 1]
    p                prior, the share of positive examples, fixed

    F = (1-p) (h-a)^2 1[+] + p (h-b)^2 1[-] + 2 (1+alpha) (p h 1[-] - (1-p) h 1[+]) - p (1-p) alpha^2,
    averaged over all examples of a batch, the indicators inside the mean.

For scores with class means h+, h- and variances v+, v-, and p the true share of positives, the saddle is a = h+, b = h-,
alpha = h- - h+, with value p (1-p) (v+ + v- + (1 - h+ + h-)^2 - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from fedfleet.simulator.author import Batch, Key, Objective, Tree
from fedfleet.tasks.models import build
from fedfleet.tasks.options import DataShape, ModelOptions

SCORE_INDEX = 1


class AucOptions(ModelOptions):
    """Options of the AUC task."""

    positive_class: int = Field(default=0, ge=0)
    """The class that counts as positive; all others are negative."""
    prior: float | None = Field(default=None, gt=0, lt=1)
    """p, the share of positives assumed; 1 / classes if not given."""


def auc_loss(score: Tensor, positive: Tensor, a: Tensor, b: Tensor, alpha: Tensor, p: float) -> Tensor:
    """Return F for each example: ``score`` (B,) in [0, 1], ``positive`` (B,) bool, scalars a, b, alpha."""
    plus = positive.to(score.dtype)
    minus = 1 - plus
    squares = (1 - p) * (score - a) ** 2 * plus + p * (score - b) ** 2 * minus
    return squares + 2 * (1 + alpha) * (p * score * minus - (1 - p) * score * plus) - p * (1 - p) * alpha**2


class AucMaximisation:
    """A net scoring examples, the relaxed AUC objective, ROC AUC.

    Functions: "predict", scores (B,); "per_example", score and objective (B,).
    """

    parts = ("x", "y")

    def __init__(self, options: AucOptions, shape: DataShape):
        if options.positive_class >= shape.classes:
            raise ValueError(
                f"task.positive_class={options.positive_class}: the data have classes 0 to {shape.classes - 1}"
            )
        self._options, self._shape = options, shape
        self._prior = options.prior if options.prior is not None else 1 / shape.classes
        self._net = self._build(0)
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1, "y": -1})}
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": lambda z, batch: self.score(z, batch.x),
            "per_example": lambda z, batch: {"score": self.score(z, batch.x), "loss": self._each(z, batch)},
        }

    def _build(self, seed: int) -> nn.Module:
        o, shape = self._options, self._shape
        return build(o.model, shape.example, shape.classes, o.hidden, seed, o.init)

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters and a = b = alpha = 0."""
        net = {name: p.detach() for name, p in self._build(seed).named_parameters()}
        return {"x": {"net": net, "a": torch.zeros(()), "b": torch.zeros(())}, "y": {"alpha": torch.zeros(())}}

    def score(self, z: Tree, x: Tensor) -> Tensor:
        """Return scores (B,) in [0, 1]."""
        return functional_call(self._net, z["x"]["net"], (x,)).softmax(-1)[:, SCORE_INDEX]

    def _each(self, z: Tree, batch: Batch) -> Tensor:
        positive = batch.y == self._options.positive_class
        return auc_loss(self.score(z, batch.x), positive, z["x"]["a"], z["x"]["b"], z["y"]["alpha"], self._prior)

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.mean(self._each(z, batch)), {}

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the ROC AUC; 0 where a score is not finite, as in the CDMA protocol, NaN where there is one class alone."""
        positive = data["y"] == self._options.positive_class
        if positive.all() or not positive.any():
            return {"auc": math.nan}
        if not bool(torch.isfinite(outputs).all()):
            return {"auc": 0.0}
        from sklearn.metrics import (
            roc_auc_score,  # here, for scikit-learn takes a second to import, and workers need none
        )

        return {"auc": float(roc_auc_score(positive.numpy(), outputs.numpy()))}
