"""The maximum mean discrepancy of two samples by several Gaussian kernels, as FedKA's released code takes it."""

from __future__ import annotations

import torch
from torch import Tensor

KERNELS, STEP = 5, 2.0


def mk_mmd(features: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return MK-MMD of the rows of one sample and of the other, biased: pairs of a row with itself count.

    With squared distances D^2 of all rows, and h their mean over pairs of different rows, which no gradient passes through:
    k = sum_q exp(-D^2 / (h 2^(q - 2))), q = 0, …, 4, and the value is mean k_11 + mean k_22 - 2 mean k_12.

    Args:
        features: of each row (B, w).
        one, other: which rows are of the first sample, and of the second (B,) bool.

    """
    here = (one | other)[:, None]
    features = torch.where(here, features, 0.0)
    squares = (features[:, None] - features[None]).square().sum(-1)
    rows = here.sum()
    pairs = torch.where(here & here.T, squares, 0.0).sum().detach()
    width = pairs / (rows * (rows - 1)).clamp(min=1)
    width = torch.where(width > 0, width, 1.0)  # where all rows are equal, any will do
    kernel = torch.stack([(-squares / (width * STEP ** (q - KERNELS // 2))).exp() for q in range(KERNELS)]).sum(0)
    u = one.to(features.dtype) / one.sum().clamp(min=1)
    v = other.to(features.dtype) / other.sum().clamp(min=1)
    both = one.any() & other.any()
    return torch.where(both, (u - v) @ kernel @ (u - v), 0.0)
