"""Distance of domains' features by their moments, as of M3SDA.

Peng, Bai, Xia, Huang, Saenko & Wang, "Moment matching for multi-source domain adaptation", ICCV 2019. With sources i = 1, …, n and
the target T, moment k of a domain is the mean of the k-th powers of its features, coordinate by coordinate:

    MD = sum_k  (1 / n) sum_i |E_i^k - E_T^k|  +  1 / (n choose 2) sum_{i<j} |E_i^k - E_j^k|        Euclidean norms

From k = 2 on features are taken from the mean of their domain. Domains that have no row in a batch are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def distance(features: Tensor, domain: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return MD, each of its moments times a weight.

    Args:
        features: of each row (B, w).
        domain: which source a row is of (B, n) bool; rows that do not count are of none.
        target: which rows are the target's (B,) bool.
        weights: of the moments, from the first on (K,).

    """
    of = torch.cat([domain, target[:, None]], 1).to(features.dtype)  # (B, n + 1)
    rows = of.sum(0)
    there, share = rows > 0, of.T / rows.clamp(min=1)[:, None]
    features = torch.where(of.sum(1, keepdim=True) > 0, features, 0.0)  # padding may be anything
    mean = share @ features
    away, total = features - of @ mean, features.new_zeros(())
    for k in range(len(weights)):
        moment = mean if k == 0 else share @ away ** (k + 1)
        total = total + weights[k] * _apart(moment, there)
    return total


def _apart(moment: Tensor, there: Tensor) -> Tensor:
    """Return what a moment (n + 1, w) of each domain that is ``there`` adds, the target's last."""
    squares = (moment[:, None] - moment[None]).square().sum(-1)
    norm = torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).sqrt(), 0.0)  # whose gradient at 0 is 0
    both = there[:, None] & there
    sources = both[:-1, :-1].triu(1)
    to_target = torch.where(both[:-1, -1], norm[:-1, -1], 0.0).sum() / there[:-1].sum().clamp(min=1)
    return to_target + torch.where(sources, norm[:-1, :-1], 0.0).sum() / sources.sum().clamp(min=1)
