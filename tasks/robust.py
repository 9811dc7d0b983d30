"""Robust adversarial training against one perturbation that all images share (CDMA's second experiment).

min over the net x, max over y:   mean CE(net_x(a + y), label) - lambda |y|^2

    paper, released code    here
    x                       z["x"], the net
    y                       z["y"]["perturbation"], of the shape of an image; not bounded, and a + y is not clipped
    lambda                  penalty

The robust loss of a net on a data set is the value after ``ascent_steps`` steps of gradient ascent on y alone, each along the
gradient of the mean over the whole set, from the y at hand (or from 0, if that is large).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from fedfleet.simulator.author import Batch, Key, Objective, Tree
from fedfleet.tasks.losses import cross_entropy
from fedfleet.tasks.models import build, first_linear
from fedfleet.tasks.options import DataShape, ModelOptions

ROWS = 1000  # at a time, while the whole set is gone through


class RobustOptions(ModelOptions):
    """Options of robust training."""

    penalty: float = Field(default=0.001, ge=0)
    """lambda, weight of the squared norm of the perturbation."""
    ascent_steps: int = Field(default=20, ge=0)
    """Steps of ascent behind the robust loss."""
    ascent_lr: float = Field(default=1.0, gt=0)
    """Their size."""
    reset_above: float = Field(default=10.0, ge=0)
    """The ascent starts from 0 where the squared norm of the perturbation at hand is larger than this."""


class RobustTraining:
    """A net against a universal perturbation; robust loss and accuracy.

    Functions: "predict", on a whole split: {"robust", "clean"} logits (n, classes) with and without the perturbation that the
    ascent has found, and {"squared_norm"} of that, (n,); "per_example", accuracy and loss (B,) under the perturbation at hand.
    """

    parts = ("x", "y")
    whole = True

    def __init__(self, options: RobustOptions, shape: DataShape):
        self._options, self._shape = options, shape
        self._net = self._build(0)
        self._first = first_linear(self._net)
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1, "y": -1})}
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": self._predict,
            "per_example": self._per_example,
        }

    def _build(self, seed: int) -> nn.Module:
        o, shape = self._options, self._shape
        return build(o.model, shape.example, shape.classes, o.hidden, seed, o.init)

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters, and no perturbation."""
        net = {name: p.detach() for name, p in self._build(seed).named_parameters()}
        return {"x": net, "y": {"perturbation": torch.zeros(self._shape.example)}}

    def logits(self, z: Tree, x: Tensor, perturbation: Tensor) -> Tensor:
        """Return the net's outputs (B, classes) for perturbed inputs (B, ...)."""
        net, first = z["x"], self._first
        if first is None:
            return functional_call(self._net, net, (x + perturbation,))
        # W (a + y) + b = W a + (W y + b): the images stay as they are, and y costs a row instead of one an image.
        bias = F.linear(perturbation.flatten(), net[f"{first}.weight"], net[f"{first}.bias"])
        return functional_call(self._net, {**net, f"{first}.bias": bias}, (x,))

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Tensor]]:
        y = z["y"]["perturbation"]
        each = cross_entropy(self.logits(z, batch.x, y), batch.y)
        return batch.mean(each) - self._options.penalty * (y * y).sum(), {}

    def _per_example(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        logits = self.logits(z, batch.x, z["y"]["perturbation"])
        return {"accuracy": (logits.argmax(1) == batch.y).float(), "loss": cross_entropy(logits, batch.y)}

    def attacked(self, z: Tree, batch: Batch) -> Tensor:
        """Return the perturbation after the ascent on a whole data set."""
        o, y = self._options, z["y"]["perturbation"].clone()
        if not y.square().sum() <= o.reset_above:
            y = torch.zeros_like(y)
        for _ in range(o.ascent_steps):
            gradient = -2 * o.penalty * y
            for rows in torch.arange(len(batch.y), device=y.device).split(ROWS):
                with torch.enable_grad():
                    at = y.detach().requires_grad_()
                    loss = F.cross_entropy(self.logits(z, batch.x[rows], at), batch.y[rows], reduction="sum")
                    gradient = gradient + torch.autograd.grad(loss, at)[0] / len(batch.y)
            y = y + o.ascent_lr * gradient
        return y

    def _predict(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        y = self.attacked(z, batch)
        norm = y.square().sum().expand(len(batch.y)).contiguous()
        robust, clean = (
            torch.cat([self.logits(z, x, at) for x in batch.x.split(ROWS)]) for at in (y, torch.zeros_like(y))
        )
        return {"robust": robust, "clean": clean, "squared_norm": norm}

    def predicted(self, outputs: Tree) -> Tensor:
        """Return the class that the net says of each perturbed example (n,)."""
        return outputs["robust"].argmax(1)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return robust loss and accuracy, and the accuracy without perturbation."""
        robust, clean = (outputs[k].argmax(1) == data["y"] for k in ("robust", "clean"))
        entropy = F.cross_entropy(outputs["robust"].double(), data["y"])
        return {
            "robust_loss": float(entropy - self._options.penalty * outputs["squared_norm"][0].double()),
            "robust_accuracy": float(robust.double().mean()),
            "accuracy": float(clean.double().mean()),
        }
