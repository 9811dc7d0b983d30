"""Nets in two parts: a generator of features, and a head that classifies them. The head is what two clients may differ in.

digit_five    FACT's for Digit-Five (its Table 5, without the normalisation after the last layer, which the released code
              defines and never applies): 210,176 and 25,483,550 weights at 3x32x32 and ten classes
digits_small  the same kinds of layers in small: 5,184 and 263,818 weights there
mlp           fully connected layers with ReLU, and a linear head; no normalisation, no dropout
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfleet.simulator.author import Key, Tree, rng
from fedfleet.tasks.pooling import MaxPool2

DECAY, EPS = 0.1, 1e-5  # of running statistics, and beside variances, as in torch


class Nets(NamedTuple):
    """A generator, and a head for its features."""

    generator: nn.Sequential
    head: nn.Sequential


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


def _hidden(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Dropout(), nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()


NETS: dict[str, Callable[[tuple[int, ...], int, tuple[int, ...]], Nets]] = {
    "mlp": mlp,
    "digits_small": digits_small,
    "digit_five": digit_five,
}
LEAST_SIDE = 4


def build(name: str, shape: tuple[int, ...], classes: int, hidden: tuple[int, ...], seed: int) -> Nets:
    """Build both parts with torch's default initialisation, drawn from ``seed`` alone. Raises ValueError for unfit images."""
    if name != "mlp" and (len(shape) != 3 or min(shape[1:]) < LEAST_SIDE):
        raise ValueError(
            f"model {name!r} needs images of at least {LEAST_SIDE}x{LEAST_SIDE}, not {shape}: try model=mlp"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETS[name](shape, classes, hidden)


def weights(net: nn.Module) -> dict[str, Tensor]:
    """Return what is learnt of a net."""
    return {name: p.detach() for name, p in net.named_parameters()}


def statistics(net: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances of a net; how many batches they are of has no influence, and is left out."""
    return {name: b for name, b in net.named_buffers() if not name.endswith("num_batches_tracked")}


def run(
    net: nn.Sequential, at: Tree, seen: Mapping[str, Tensor], x: Tensor, weight: Tensor, key: Key | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a net's outputs and its running statistics after them, at weights ``at`` and statistics ``seen``.

    With a ``key`` in training mode: normalised by the rows of positive ``weight`` (B,), units dropped as the key says.
    Without one as the running statistics say, which then stay as they are.
    """
    new = dict(seen)
    for name, layer in net.named_children():
        mine = {n.partition(".")[2]: p for n, p in at.items() if n.partition(".")[0] == name}
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            names = f"{name}.running_mean", f"{name}.running_var"
            found = seen[names[0]], seen[names[1]]
            if key is not None:
                found, update = _moments(x, weight)
                new |= {n: (1 - DECAY) * seen[n] + DECAY * u for n, u in zip(names, update, strict=True)}
            x = _normalised(x, *found) * _by_channel(mine["weight"], x) + _by_channel(mine["bias"], x)
        elif isinstance(layer, nn.Dropout):
            if key is not None:
                kept = rng.bernoulli(rng.fold(key, int(name)), 1 - layer.p, tuple(x.shape))
                x = x * kept.to(x.dtype) / (1 - layer.p)
        else:
            x = functional_call(layer, mine, (x,))
    return x, new


def _by_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *([1] * (x.dim() - 2)))


def _normalised(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (x - _by_channel(mean, x)) * _by_channel((variance + EPS).rsqrt(), x)


def _moments(x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return mean and variance a channel over the real rows, and what the running ones take up, the variance's unbiased."""
    over = (0, *range(2, x.dim()))
    rows = (weight > 0).to(x.dtype).view(-1, *([1] * (x.dim() - 1)))
    count = rows.sum().clamp(min=1.0) * math.prod(x.shape[2:])
    mean = (x * rows).sum(over) / count
    variance = ((x - _by_channel(mean, x)).square() * rows).sum(over) / count
    return (mean, variance), (mean.detach(), (variance * count / (count - 1).clamp(min=1.0)).detach())
