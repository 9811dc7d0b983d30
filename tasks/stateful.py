"""Nets whose layers keep count of something, or draw: BatchNorm and Dropout as pure functions.

``prepared`` puts layers of ours in the place of torch's, ``called`` runs such a net. What BatchNorm counts comes in as a tree and
goes out as another; Dropout draws from a key. Rows of weight 0, which are padding, enter no statistic.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfleet.simulator.author import Key, Tree, rng


class Pass(NamedTuple):
    """A forward pass in training: weights of the rows (B,), a key, what layers have counted so far."""

    weight: Tensor
    key: Key
    counted: dict[str, Tensor]


class _Under(threading.local):
    way: Pass | None = None


_under = _Under()


def under_way() -> Pass | None:
    """Return the pass of training that the layer asking is in; None outside training."""
    return _under.way


class BatchNorm(nn.Module):
    """torch.nn.BatchNorm1d, 2d and 3d: normalises by the statistics of the real rows, or by running ones outside training.

    A batch of one value a channel has no variance: it becomes the bias, where torch refuses it. One without any real row leaves
    the running statistics as they are.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, place: str):
        super().__init__()
        if like.momentum is None or not like.track_running_stats:
            raise ValueError(f"{place}: give BatchNorm a momentum, and let it track running statistics")
        self.place, self.eps, self.momentum = place, like.eps, like.momentum
        self.weight, self.bias = like.weight, like.bias
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, ...) normalised channel by channel."""
        way = under_way()
        mean, var = self.running_mean, self.running_var
        if way is not None:
            mean, var, count = _moments(x, way.weight)
            unbiased = var * count / (count - 1).clamp(min=1)
            step = self.momentum * (way.weight > 0).any().to(x.dtype)  # of no rows nothing is learnt
            for name, new in (("running_mean", mean), ("running_var", unbiased)):
                way.counted[f"{self.place}.{name}"] = torch.lerp(getattr(self, name), new.detach(), step)
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        shift = (0 if self.bias is None else self.bias) - mean * scale
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        return x * scale.view(shape) + shift.view(shape)


def _moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance (C,) of x (B, C, ...) over real rows, and the number of values a channel."""
    each = x.flatten(2) if x.dim() > 2 else x[..., None]
    count = (weight.sum() * each.shape[2]).clamp(min=1)
    real = (weight > 0).view(-1, 1, 1)
    mean = torch.where(real, each, 0.0).sum((0, 2)) / count
    away = torch.where(real, each - mean.view(1, -1, 1), 0.0)
    return mean, away.square().sum((0, 2)) / count, count


class Dropout(nn.Module):
    """torch.nn.Dropout, drawing from the key of the pass."""

    def __init__(self, p: float, place: str):
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x: Tensor) -> Tensor:
        """Return x with entries zeroed and the others scaled up, as it is outside training."""
        way = under_way()
        if way is None or self.p == 0:
            return x
        kept = rng.bernoulli(rng.fold(way.key, self.place), 1 - self.p, tuple(x.shape))
        return torch.where(kept, x, 0.0) / max(1 - self.p, torch.finfo(x.dtype).tiny)


def prepared(net: nn.Module, place: str = "") -> nn.Module:
    """Return the net with its layers of BatchNorm and Dropout replaced, under the same names. Raises ValueError."""
    for name, layer in net.named_children():
        where = f"{place}{name}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            setattr(net, name, BatchNorm(layer, where))
        elif isinstance(layer, nn.Dropout):
            setattr(net, name, Dropout(layer.p, where))
        else:
            prepared(layer, f"{where}.")
    return net


def buffers(net: nn.Module) -> dict[str, Tensor]:
    """Return what a prepared net's layers keep count of, by name."""
    return {name: b.detach() for name, b in net.named_buffers()}


def called(
    net: nn.Module,
    parameters: Mapping[str, Tensor],
    counted: Mapping[str, Tensor],
    x: Any,
    *,
    weight: Tensor | None = None,
    key: Key | None = None,
) -> tuple[Any, Tree]:
    """Return a prepared net's outputs, (B, ...) as a rule, and its buffers after that.

    Args:
        net: the net.
        parameters, counted: its parameters and buffers by name.
        x: inputs (B, ...), or whatever the net takes.
        weight: (B,), 0 on padded rows; given, with ``key``, the pass is one of training.
        key: what Dropout draws from.

    """
    if weight is None or key is None:
        return functional_call(net, {**parameters, **counted}, (x,)), counted
    with _training(Pass(weight, key, {})) as way:
        outputs = functional_call(net, {**parameters, **counted}, (x,))
    return outputs, {name: way.counted.get(name, old) for name, old in counted.items()}


@contextmanager
def weighing(weight: Tensor | None) -> Iterator[None]:
    """Let rows count by these weights (B,) in the layers that are called in training: for nets that add rows on the way."""
    way = under_way()
    if way is None or weight is None:
        yield
        return
    with _training(way._replace(weight=weight)):
        yield


@contextmanager
def _training(way: Pass) -> Iterator[Pass]:
    before, _under.way = _under.way, way
    try:
        yield way
    finally:
        _under.way = before
