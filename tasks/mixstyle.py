"""MixStyle: in training, features of an image take on some of the style of another image of the client's batch.

Zhou, Yang, Qiao & Xiang, "Domain generalization with MixStyle", ICLR 2021, Algorithm 1, and its released code. With the mean m and
the deviation s of each channel of an example's feature maps x, over places, and those m', s' of a partner:

    x <- (lambda s + (1 - lambda) s') (x - m) / s + lambda m + (1 - lambda) m',    lambda ~ Beta(alpha, alpha)

    paper                 here
    p, alpha              p, alpha
    res1, res2, …         after the first ``blocks`` poolings
    m, s                  not differentiated through; s^2 is unbiased, with 1e-6 added, as in the released code
    shuffled batch        partners among the rows that count: padding is mixed into none

Whether a batch is mixed, with whom and by how much is drawn from the key of the step, as Dropout does, in each place anew.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedfleet.simulator.author import Key, imported, rng
from fedfleet.simulator.registry import Options
from fedfleet.tasks.pooling import MaxPool2
from fedfleet.tasks.stateful import under_way

EPS = 1e-6
NODES = 1024


class MixStyleOptions(Options):
    """Options of MixStyle."""

    p: float = Field(default=0.5, ge=0, le=1)
    """Probability that a batch is mixed."""
    alpha: float = Field(default=0.1, gt=0)
    """Of the Beta distribution of how much an example keeps of its own style; small: nearly all or nearly nothing."""
    blocks: int = Field(default=1, ge=1, le=2)
    """After how many of the net's poolings, from the first on."""


class MixStyle(nn.Module):
    """A layer without parameters; outside training it does nothing."""

    def __init__(self, p: float, alpha: float, place: str):
        super().__init__()
        self.p, self.alpha, self.place = p, alpha, place

    def forward(self, x: Tensor) -> Tensor:
        """Return feature maps x (B, C, ...) with mixed styles."""
        way = under_way()
        if way is None or self.p == 0:
            return x
        key = way.draw(self.place)
        share = kept(rng.fold(key, "share"), len(x), self.alpha).to(x.dtype)[:, None]
        other = rng.partners(rng.fold(key, "partner"), way.weight > 0)
        mean, deviation = style(x.detach())
        new_mean = share * mean + (1 - share) * mean.index_select(0, other)
        new_deviation = share * deviation + (1 - share) * deviation.index_select(0, other)
        each = (*mean.shape, *(1 for _ in x.shape[2:]))
        mixed = (x - mean.view(each)) / deviation.view(each) * new_deviation.view(each) + new_mean.view(each)
        return torch.where(rng.bernoulli(rng.fold(key, "batch"), self.p), mixed, x)


def kept(key: Key, n: int, alpha: float) -> Tensor:
    """Draw n numbers (n,) float64 of Beta(alpha, alpha), by the inverse of its distribution function."""
    u, of = rng.uniform(key, n, torch.float64), torch.from_numpy(_quantiles(alpha)).to(key.device)
    at = (2 * torch.minimum(u, 1 - u)) ** (1 / alpha) * NODES
    below = at.long().clamp(max=NODES - 1)
    half = torch.lerp(of.gather(0, below), of.gather(0, below + 1), at - below)
    return torch.where(u < 0.5, half, 1 - half)


@functools.cache
def _quantiles(alpha: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the quantiles of Beta(alpha, alpha) up to its median, at (j / NODES)^alpha / 2, j = 0 … NODES.

    Near 0 the distribution function goes with the power alpha, so that they are smooth in j.
    """
    betaincinv = imported("scipy.special").betaincinv  # here, for it takes its time

    return betaincinv(alpha, alpha, np.linspace(0, 1, NODES + 1) ** alpha / 2)


def style(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation (B, C) of each channel of x (B, C, ...) over its places; of a single place sqrt(1e-6)."""
    each = x.flatten(2)
    mean = each.mean(2)
    squares = (each - mean[..., None]).square().sum(2) / max(1, each.shape[2] - 1)
    return mean, (squares + EPS).sqrt()


def with_mixstyle(net: nn.Module, options: MixStyleOptions) -> nn.Module:
    """Return the net with layers that mix styles after its first poolings; names of parameters stay as they are."""
    pools = [(name, layer) for name, layer in net.named_children() if isinstance(layer, MaxPool2)]
    for name, pool in pools[: options.blocks]:
        setattr(net, name, nn.Sequential(pool, MixStyle(options.p, options.alpha, name)))
    return net
