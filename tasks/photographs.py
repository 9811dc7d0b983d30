"""Nets that tasks of classes take: small ones, and torchvision's for photographs."""

from __future__ import annotations

import torch
from pydantic import model_validator
from torch import nn

from fedfleet.tasks.models import build
from fedfleet.tasks.options import ModelOptions
from fedfleet.tasks.pretrained import NETS, Norm, Weights, classifier


class PhotographOptions(ModelOptions):
    """Which net, a small one or one of torchvision's."""

    weights: Weights | None = None
    """The first weights of torchvision's nets, but for their last layer: those from ImageNet if not given, or random ones."""
    norm: Norm = "batch"
    """The normalisation of torchvision's nets: BatchNorm; GroupNorm in its place, with its scales and shifts; frozen: BatchNorm
    with the statistics that it comes with, in training too."""

    @property
    def normalised(self) -> bool:
        """Whether ``norm`` is of the net."""
        return self.model in NETS

    @model_validator(mode="after")
    def _of_photographs(self) -> PhotographOptions:
        large = self.model in NETS
        if not large and self.weights is not None:
            raise ValueError(f"weights={self.weights} is not for model={self.model}: leave it out")
        if self.norm != "batch" and not self.normalised:
            raise ValueError(f"norm={self.norm} is not for model={self.model}: leave it out")
        if self.norm == "frozen" and self.weights == "random":
            raise ValueError("norm=frozen keeps statistics that weights=random has none of: choose batch or group")
        if large and self.init != "drawn":
            raise ValueError(f"init={self.init} is not for model={self.model}, which has weights: leave it out")
        return self


def made(options: PhotographOptions, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """Return the net that takes examples of a shape to so many outputs (B, outputs), drawn from the seed. Raises ValueError."""
    o = options
    if o.model not in NETS:
        return build(o.model, shape, outputs, o.hidden, seed, o.init)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return classifier(o.model, o.weights or "imagenet", shape, outputs, o.norm)
