"""Nets in two parts: a generator of features, and a head that classifies them. The head is what two clients may differ in.

digit_five    FACT's for Digit-Five (its Table 5, without the normalisation after the last layer, which the released code
              defines and never applies): 210,176 and 25,483,550 weights at 3x32x32 and ten classes
digits_small  the same kinds of layers in small: 5,184 and 263,818 weights there
mlp           fully connected layers with ReLU, and a linear head; no normalisation, no dropout
resnet…       FACT's for Office: resnet101, its layer of 1,000 classes included, 44,549,160 weights, and a head of 517,093 for 31
              classes; or a smaller one
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fedfleet.tasks import pretrained
from fedfleet.tasks.pooling import MaxPool2
from fedfleet.tasks.stateful import prepared


class Nets(NamedTuple):
    """A generator, and a head for its features."""

    generator: nn.Module
    head: nn.Module


def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> Nets:
    """Fully connected layers of the given widths, each with ReLU, and a linear head."""
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return Nets(nn.Sequential(*layers), nn.Sequential(nn.Linear(widths[-1], classes)))


def digits_small(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> Nets:
    """Two 3x3 convolutions (16, 32 channels), each normalised and pooled; a head with one hidden layer of 128."""
    channels, height, width = shape
    generator = nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), MaxPool2()),
        nn.Flatten(),
    )
    flat = 32 * (height // 4) * (width // 4)
    return Nets(generator, nn.Sequential(*_hidden(flat, 128), nn.Linear(128, classes)))


def digit_five(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> Nets:
    """Two 5x5 convolutions (64, 128 channels), each normalised and pooled; a head with hidden layers of 3,072 and 100."""
    channels, height, width = shape
    generator = nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        nn.Flatten(),
    )
    flat = 128 * (-(-height // 4)) * (-(-width // 4))
    head = nn.Sequential(*_hidden(flat, 3072), *_hidden(3072, 100), nn.Dropout(), nn.Linear(100, classes))
    return Nets(generator, head)


def resnet(name: str, weights: pretrained.Weights, shape: tuple[int, ...], classes: int) -> Nets:
    """A whole net of torchvision, and a head with one hidden layer of 500, both its layers normalised, with ReLU."""
    outputs, hidden = 1000, 500
    pretrained.check(name, shape, "mlp")
    last = (nn.Linear(hidden, classes), nn.BatchNorm1d(classes), nn.ReLU())
    return Nets(pretrained.pretrained(name, weights), nn.Sequential(*_hidden(outputs, hidden), *last))


def _hidden(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Dropout(), nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()


NETS: dict[str, Callable[[tuple[int, ...], int, tuple[int, ...]], Nets]] = {
    "mlp": mlp,
    "digits_small": digits_small,
    "digit_five": digit_five,
}
LEAST_SIDE = 4


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    hidden: tuple[int, ...],
    seed: int,
    weights: pretrained.Weights = "random",
) -> Nets:
    """Build both parts with torch's default initialisation, drawn from ``seed`` alone, or a generator with the weights it has.

    Raises ValueError for unfit images, and for weights that are not to be had.
    """
    if name != "mlp" and (len(shape) != 3 or min(shape[1:]) < LEAST_SIDE):
        raise ValueError(
            f"model {name!r} needs images of at least {LEAST_SIDE}x{LEAST_SIDE}, not {shape}: try model=mlp"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = NETS[name](shape, classes, hidden) if name in NETS else resnet(name, weights, shape, classes)
        return Nets(*map(prepared, made))
