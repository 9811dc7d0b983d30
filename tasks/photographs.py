"""Nets that tasks of drawn features and of attention take: small ones, and torchvision's for photographs."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from pydantic import model_validator
from torch import nn

from fedfleet.tasks.models import build
from fedfleet.tasks.options import ModelOptions
from fedfleet.tasks.pretrained import NETS, Norm, Weights, classifier


class PhotographOptions(ModelOptions):
    """Which net, a small one or one of torchvision's."""

    weights: Weights | None = None
    """What torchvision's nets begin with, but for their last layer: the weights they have from ImageNet, if nothing is said, or
    random ones."""
    norm: Norm = "batch"
    """What torchvision's nets normalise by: BatchNorm; GroupNorm in its place, with its scales and shifts; frozen: BatchNorm with
    the statistics that it comes with, in training too."""

    @model_validator(mode="after")
    def _of_photographs(self) -> PhotographOptions:
        large = self.model in NETS
        for key, default in (("weights", None), ("norm", "batch")):
            if not large and (value := getattr(self, key)) != default:
                raise ValueError(f"{key}={value} is not for model={self.model}: leave it out")
        if self.norm == "frozen" and self.weights == "random":
            raise ValueError("norm=frozen keeps statistics that weights=random has none of: choose batch or group")
        if large and self.init != "drawn":
            raise ValueError(f"init={self.init} is not for model={self.model}, which has weights: leave it out")
        return self


class Chosen(Protocol):
    """Options that say which net."""

    @property
    def model(self) -> str: ...

    @property
    def hidden(self) -> tuple[int, ...]: ...

    @property
    def init(self) -> Literal["drawn", "zero"]: ...

    @property
    def weights(self) -> Weights | None: ...

    @property
    def norm(self) -> Norm: ...


def made(options: Chosen, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """Return the net that takes examples of a shape to so many outputs (B, outputs), drawn from the seed. Raises ValueError."""
    o = options
    if o.model not in NETS:
        return build(o.model, shape, outputs, o.hidden, seed, o.init)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return classifier(o.model, o.weights or "imagenet", shape, outputs, o.norm)
