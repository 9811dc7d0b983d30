"""Nets for adversarial domain adaptation: an extractor, a bottleneck, a head that classifies, an adversary.

    model      extractor (ReLU after each)                          head                    adversary     initial weights, biases
    mlp        linear, of the widths ``hidden``                     linear                  32, 1         normal (He et al. 2015), 0
    cnn        conv 3x3 to 16, pool, conv 3x3 to 32, pool, 64       classes                 64, 1         as mlp
    conv2      conv 5x5 to 32, pool, conv 5x5 to 48, pool           100, 100, classes       100, 2        normal within two of its
    conv3      as conv2, conv 3x3 to 64                             as conv2                as conv2      deviations of 0.1, 0.1
    torchvision's (pretrained.py), normalised as for ImageNet       1024, classes           1024, 2       ImageNet's; as mlp

``conv2`` is that of FedMM's released code, and ``conv3`` has a third convolution, as its paper says; all pad, so that only pooling
makes images smaller. Margin disparity has two heads alike, of 200, 200, classes (``cnn``: of 64, classes), with dropout after each
hidden layer. Between a net of torchvision and its heads there is a bottleneck of 1024, normalised, with ReLU and dropout, and all
heads that classify have dropout, as in FedMM's released code. An adversary with one output gives the logit of an example being of
a target, one with two those of both domains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn

from fedfleet.tasks import pretrained
from fedfleet.tasks.models import Net
from fedfleet.tasks.pooling import MaxPool2
from fedfleet.tasks.stateful import prepared

Takes = Literal["nothing", "features", "products", "margin"]
"""What there is for an adversary: none, the features, their products with each class's probability, features for a second head."""
SMALLEST_SIDE = 4


class Nets(NamedTuple):
    """The four; the bottleneck, between the extractor and the others, may do nothing; ``adversary`` is None where there is none."""

    features: nn.Module
    bottleneck: nn.Module
    head: nn.Module
    adversary: nn.Module | None


class Widths(NamedTuple):
    """Hidden layers of the head, of the adversary, of both heads for margin disparity; the outputs of a domain's adversary."""

    head: tuple[int, ...]
    adversary: tuple[int, ...]
    margin: tuple[int, ...]
    domains: int


FEATURES = 64  # of the small convolutional net
SMALL = Widths((), (32,), (), 1)
SMALL_CNN = Widths((), (64,), (64,), 1)
RELEASED = Widths((100, 100), (100,), (200, 200), 2)
BOTTLENECK = 1024
PRETRAINED = Widths((BOTTLENECK,), (BOTTLENECK,), (BOTTLENECK,), 2)


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    hidden: tuple[int, ...],
    takes: Takes,
    dropout: float,
    seed: int,
    weights: pretrained.Weights = "random",
) -> Nets:
    """Build the nets, drawn from ``seed`` alone; the extractor is the same whatever there is for an adversary.

    Raises ValueError for images that do not fit a convolutional net, and for weights that are not to be had.
    """
    if name != "mlp" and (len(shape) != 3 or min(shape[1:]) < SMALLEST_SIDE):
        raise ValueError(f"model {name!r} needs images of at least 4x4, not {shape}: try model=mlp")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in pretrained.NETS:
            return _pretrained(name, weights, shape, classes, takes, dropout)
        if name == "mlp":
            return _nets(_mlp(shape, hidden), classes, SMALL, takes, dropout, _he)
        if name == "cnn":
            return _nets(_cnn(shape), classes, SMALL_CNN, takes, dropout, _he)
        return _nets(_convolutions(shape, third=name == "conv3"), classes, RELEASED, takes, dropout, _released)


def _nets(
    extractor: tuple[nn.Module, int],
    classes: int,
    widths: Widths,
    takes: Takes,
    dropout: float,
    initialise: Callable[[nn.Module], None],
) -> Nets:
    features, width = extractor
    features.apply(initialise)  # before the next is made, which draws too
    of_heads = dropout if takes == "margin" else None
    return Nets(features, nn.Identity(), *_heads(width, classes, widths, takes, of_heads, initialise))


def _pretrained(
    name: str, weights: pretrained.Weights, shape: tuple[int, ...], classes: int, takes: Takes, dropout: float
) -> Nets:
    pretrained.check(name, shape, "cnn")
    net, width = pretrained.features(name, weights)
    features = prepared(nn.Sequential(pretrained.AsImageNet(), net))
    layers = (nn.Linear(width, BOTTLENECK).apply(_he), nn.BatchNorm1d(BOTTLENECK), nn.ReLU(), nn.Dropout(dropout))
    bottleneck = prepared(nn.Sequential(*layers))
    return Nets(features, bottleneck, *_heads(BOTTLENECK, classes, PRETRAINED, takes, dropout, _he))


def _heads(
    width: int,
    classes: int,
    widths: Widths,
    takes: Takes,
    dropout: float | None,
    initialise: Callable[[nn.Module], None],
) -> tuple[nn.Module, nn.Module | None]:
    """Return the head and the adversary, the former with dropout where some is given, and the latter if it is such a head too."""

    def head(hidden: tuple[int, ...]) -> nn.Module:
        return prepared(_head(width, *hidden, classes, dropout=dropout).apply(initialise))

    if takes == "margin":
        return head(widths.margin), head(widths.margin)
    classifier = head(widths.head)
    if takes == "nothing":
        return classifier, None
    given = width if takes == "features" else width * classes
    return classifier, _head(given, *widths.adversary, widths.domains).apply(initialise)


def _head(*widths: int, dropout: float | None = None) -> nn.Sequential:
    """Return linear layers with ReLU between, and dropout where some is asked for, be it 0."""
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(itertools.pairwise(widths)):
        if k:
            layers += [nn.ReLU(), nn.Dropout(dropout)] if dropout is not None else [nn.ReLU()]
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


def _mlp(shape: tuple[int, ...], hidden: tuple[int, ...]) -> tuple[nn.Module, int]:
    widths = (math.prod(shape), *hidden)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return Net(nn.Flatten(), *layers), widths[-1]


def _cnn(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    channels, height, width = shape
    layers = [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), MaxPool2()]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), MaxPool2(), nn.Flatten()]
    return Net(*layers, nn.Linear(32 * (height // 4) * (width // 4), FEATURES), nn.ReLU()), FEATURES


def _convolutions(shape: tuple[int, ...], *, third: bool) -> tuple[nn.Module, int]:
    channels, height, width = shape
    layers = [nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), MaxPool2()]
    layers += [nn.Conv2d(32, 48, 5, padding=2), nn.ReLU(), MaxPool2()]
    if third:
        layers += [nn.Conv2d(48, 64, 3, padding=1), nn.ReLU()]
    return Net(*layers, nn.Flatten()), (64 if third else 48) * (height // 4) * (width // 4)


def _he(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)


def _released(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | nn.Conv2d):
        nn.init.trunc_normal_(layer.weight, std=0.1, a=-0.2, b=0.2)
        assert layer.bias is not None
        nn.init.constant_(layer.bias, 0.1)
