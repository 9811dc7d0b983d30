"""Nets of torchvision for photographs, without or with a classifier of ours: drawn anew, or with their weights from ImageNet.

    model            features    pooled over the image from
    mobilenet_v2     1,280       width 1.0 (M. Sandler et al., CVPR 2018)
    resnet18         512         (K. He et al., CVPR 2016)
    resnet50         2,048
    resnet101        2,048

Weights are those torchvision calls IMAGENET1K_V1, read from the cache that torch keeps its downloads in. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Weights = Literal["imagenet", "random"]
Norm = Literal["batch", "group", "frozen"]
BatchNorms = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
GROUPS = 32  # of channels, as GroupNorm's paper has them (Wu & He 2018), where that divides their number
NETS = ("mobilenet_v2", "resnet18", "resnet50", "resnet101")
RESNETS = tuple(name for name in NETS if name.startswith("resnet"))
SMALLEST_SIDE = 32  # halved five times


def pretrained(name: str, weights: Weights) -> nn.Module:
    """Return a whole net; random weights are drawn from torch's generator. Raises ValueError where a file is not to be had."""
    from torchvision import models  # here, for torchvision takes more than a second to import

    net: nn.Module = models.get_model(name, weights=None)
    if weights == "imagenet":
        net.load_state_dict(_read(name, models.get_model_weights(name)))
    return net


def features(name: str, weights: Weights) -> tuple[nn.Module, int]:
    """Return a net up to its features (B, width), and how many they are. Raises ValueError."""
    net: Any = pretrained(name, weights)
    if name == "mobilenet_v2":
        return nn.Sequential(net.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()), net.last_channel
    width, net.fc = net.fc.in_features, nn.Identity()
    return net, width


def classifier(name: str, weights: Weights, shape: tuple[int, ...], classes: int, norm: Norm = "batch") -> nn.Module:
    """Return a net that takes images (B, 3, H, W) in [-1, 1] to logits (B, classes); its last layer is drawn. Raises ValueError."""
    check(name, shape, "cnn")
    net: Any = with_norm(pretrained(name, weights), norm)
    if name == "mobilenet_v2":
        net.classifier[-1] = nn.Linear(net.last_channel, classes)
    else:
        net.fc = nn.Linear(net.fc.in_features, classes)
    return nn.Sequential(AsImageNet(), net)


def with_norm(net: nn.Module, norm: Norm) -> nn.Module:
    """Return a net with other layers in the place of BatchNorm's, which have their scales and shifts."""
    for name, layer in net.named_children() if norm != "batch" else ():
        if isinstance(layer, BATCH_NORMS):
            setattr(net, name, _grouped(layer) if norm == "group" else FixedNorm(layer))
        else:
            with_norm(layer, norm)
    return net


def _grouped(layer: BatchNorms) -> nn.GroupNorm:
    # Features that are no maps: a group of one would normalise each number by itself, to 0.
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(GROUPS, layer.num_features)
    made = nn.GroupNorm(groups, layer.num_features, eps=layer.eps)
    made.weight, made.bias = layer.weight, layer.bias
    return made


class FixedNorm(nn.Module):
    """BatchNorm whose statistics are constants, in training too; scale and shift are learnt. They travel nowhere."""

    def __init__(self, like: BatchNorms):
        super().__init__()
        if like.running_mean is None or like.running_var is None:
            raise ValueError("a BatchNorm without running statistics has none to keep: choose norm=group")
        self.weight, self.bias = like.weight, like.bias
        self.mean, self.scale = like.running_mean.clone(), torch.rsqrt(like.running_var + like.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, ...) normalised channel by channel."""
        wide = (-1, *[1] * (x.dim() - 2))
        mean, scale = (v.to(x.device, x.dtype).view(wide) for v in (self.mean, self.scale))
        result = (x - mean) * scale
        return result if self.weight is None else result * self.weight.view(wide) + self.bias.view(wide)


class AsImageNet(nn.Module):
    """Takes images in [-1, 1] to the mean and deviation of ImageNet's, channel by channel, which pretrained nets have seen."""

    MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, 3, H, W) normalised."""
        mean, deviation = (x.new_tensor(v).view(3, 1, 1) for v in (self.MEAN, self.DEVIATION))
        return ((x + 1) / 2 - mean) / deviation


def check(name: str, shape: tuple[int, ...], instead: str) -> None:
    """Refuse images that a net cannot take. Raises ValueError, which names the model to take instead."""
    if shape[0] != 3 or min(shape[1:]) < SMALLEST_SIDE:
        raise ValueError(
            f"model {name!r} needs images in colour of at least {SMALLEST_SIDE}x{SMALLEST_SIDE}, not {shape}: try model={instead}"
        )


def cached(file: str) -> Path:
    """Return where torch keeps a file that it has downloaded."""
    return Path(torch.hub.get_dir()) / "checkpoints" / file


def genuine(path: Path) -> bool:
    """Say whether a file's SHA-256 begins with the digits at the end of its name."""
    return _digest(path).startswith(path.stem.rpartition("-")[2])


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a file."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _read(name: str, known: Any) -> dict[str, torch.Tensor]:
    url: str = known.IMAGENET1K_V1.url
    path = cached(url.rpartition("/")[2])
    if not path.exists():
        raise ValueError(
            f"weights='imagenet': {path} is not there: download {url} to it, or set weights=random for a net that has seen nothing"
        )
    if not genuine(path):
        raise ValueError(f"weights='imagenet': {path} is not what its name says: download {url} again")
    return loaded(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
