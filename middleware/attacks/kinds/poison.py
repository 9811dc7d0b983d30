"""Poisoning attacks: attackers train on examples other than their own.

label_flip   labels y become C - 1 - y (Fang, Cao, Jia & Gong, "Local model poisoning attacks to Byzantine-robust
             federated learning", USENIX Security 2020), or those of one class another (Tolpegin, Truex, Gursoy & Liu,
             "Data poisoning attacks against federated learning systems", ESORICS 2020)
backdoor     Bagdasaryan, Veit, Hua, Estrin & Shmatikov, "How to backdoor federated learning", AISTATS 2020: images with
             a pattern get the attacker's label, and the attacker's model replaces the server's. For that its update is
             sent gamma times as long (their Eq. 3): gamma = n/eta, of n clients that are averaged, one of them an
             attacker. The pattern, pixels in a corner, is that of Gu, Dolan-Gavitt & Garg, "BadNets", 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.middleware.attacks.kinds.base import Attack
from fedfleet.simulator.author import Key


class LabelFlip(Attack):
    """Attackers learn wrong labels: of all classes, or of one."""

    poisons: ClassVar[bool] = True
    source: int | None = Field(default=None, ge=0)
    """Label that is changed; every one to C - 1 less itself if neither is given."""
    target: int | None = Field(default=None, ge=0)
    """What it is changed to."""

    @model_validator(mode="after")
    def _both(self) -> LabelFlip:
        if (self.source is None) != (self.target is None):
            raise ValueError("give source and target, or neither: then label y becomes C - 1 - y")
        if self.source is not None and self.source == self.target:
            raise ValueError(f"source and target are both {self.source}: give two labels")
        return self

    def flipped(self, y: Tensor, classes: int) -> Tensor:
        """Return what labels (n,) become."""
        if self.source is None or self.target is None:
            return classes - 1 - y
        return torch.where(y == self.source, self.target, y)

    def poison(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the examples with other labels."""
        return x, self.flipped(y, classes)

    def aimed(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the examples whose label would be another one, with that."""
        other = self.flipped(y, classes)
        return x[other != y], other[other != y]

    def check(self, x: Tensor, classes: int) -> None:
        """Raise ValueError where there are no such labels."""
        for name in ("source", "target"):
            if (label := getattr(self, name)) is not None and label >= classes:
                raise ValueError(f"{name}={label}: labels are 0 to {classes - 1}: choose one of these")


class Backdoor(Attack):
    """Attackers learn that images with a pattern have the label they want, and send what they have learnt so much longer."""

    poisons: ClassVar[bool] = True
    target: int = Field(default=0, ge=0)
    """The label that images with the pattern are to get."""
    size: int = Field(default=3, ge=1)
    """Side of the pattern, a square in the lower right corner, in pixels."""
    value: float = 1.0
    """What its pixels become; of images of unsigned bytes a part of 255."""
    examples: float = Field(default=0.5, gt=0, le=1)
    """Share of an attacker's examples that get the pattern and the label."""
    scale: float = Field(default=1.0, gt=0)
    """How many times as long the update is sent, gamma: S/A, of A attackers among S answers alike in weight, replaces the model."""

    @property
    def forges(self) -> bool:
        """Whether the update is sent longer than it is."""
        return self.scale != 1

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        """Return the update times gamma."""
        return {name: leaf * self.scale for name, leaf in moved.items()}

    @property
    def poisoned_share(self) -> float:
        """The share of an attacker's examples that get the pattern."""
        return self.examples

    def stamped(self, x: Tensor) -> Tensor:
        """Return images (n, ..., h, w) with the pattern."""
        x = x.clone()
        x[..., -self.size :, -self.size :] = self.value if x.is_floating_point() else round(255 * self.value)
        return x

    def poison(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the images with the pattern, and the label."""
        return self.stamped(x), torch.full_like(y, self.target)

    def aimed(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the images that are not of that label, with the pattern and the label."""
        return self.poison(x[y != self.target], y[y != self.target], classes)

    def check(self, x: Tensor, classes: int) -> None:
        """Raise ValueError where examples are no images, or too small, or there is no such label."""
        if self.target >= classes:
            raise ValueError(f"target={self.target}: labels are 0 to {classes - 1}: choose one of these")
        if x.dim() < 3 or x.dtype == torch.int64:
            raise ValueError(
                f"kind='backdoor': it is for images, and examples are {tuple(x.shape[1:])}: choose label_flip"
            )
        if self.size > min(x.shape[-2:]):
            raise ValueError(f"size={self.size}: images are {x.shape[-2]} x {x.shape[-1]} pixels: lower it")
        if x.dtype == torch.uint8 and not 0 <= self.value <= 1:
            raise ValueError(f"value={self.value:g}: of images of unsigned bytes it is a part of 255: give 0 to 1")
