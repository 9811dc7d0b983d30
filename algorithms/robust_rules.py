"""Robust rules as functions of updates' inner products.

They return how much each of S updates counts, float64. ``robust.py`` cites their papers.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIKE = 1e-7
"""How far a cosine of float32 updates may be from 1 by rounding alone."""
ONE = 0.99
"""What a FoolsGold weight of 1 is taken for before its logit, which would be infinite; as in the released code."""


def geometric_median(gram: Tensor, weights: Tensor, updates: int, nu: float) -> Tensor:
    """Return the coefficients (S,), whose sum is 1, after so many steps of the smoothed Weiszfeld algorithm from the mean.

    A step weighs update i by weights_i / max(nu, |v - d_i|), v the combination before it; distances are had from ``gram`` (S, S).
    An update that is not finite counts 0, its weight at an infinite distance.
    """
    there = finite(gram)
    if bool(there.any()):
        gram, weights = gram.where(there & there[:, None], 0.0), weights.where(there, 0.0)
    result = weights / weights.sum()
    for _ in range(updates):
        squared = gram.diagonal() - 2 * gram @ result + result @ gram @ result
        beta = weights / squared.clamp(min=0).sqrt().clamp(min=nu)
        result = beta / beta.sum()
    return result


def norm_bound(norms: Tensor, bound: float) -> Tensor:
    """Return what updates of these norms (S,) are multiplied by, so that none is longer than ``bound``; 0 of an infinite one."""
    return torch.where(norms <= bound, 1.0, bound / norms).where(norms.isfinite(), 0.0)


def finite(gram: Tensor) -> Tensor:
    """Return which updates (S,) are finite, by their inner products (S, S)."""
    return gram.diagonal().isfinite()


def trust(products: Tensor, norms: Tensor, root: float) -> Tensor:
    """Return the trust scores (S,) of updates: the cosines with the server's, of norm ``root``, 0 where these are below 0.

    ``products`` (S,) are their inner products with it, ``norms`` (S,) their own. What does not move is trusted in nothing.
    """
    both = norms * root
    return torch.where((products > 0) & (both > 0) & both.isfinite(), products / both, 0.0)


def foolsgold(gram: Tensor) -> Tensor:
    """Return the weights (S,) in [0, 1] of clients by the inner products (S, S) of all that each has sent so far (Algorithm 1).

    Clients whose histories point the same way as another's count less. One that has sent nothing is like nobody, and one whose
    history is not finite counts 0.
    """
    there = finite(gram)
    gram = gram.where(there & there[:, None], 0.0)
    norms = gram.diagonal().clamp(min=0).sqrt()
    product = norms[:, None] * norms
    cosine = torch.where(product > 0, gram / product, 0.0).fill_diagonal_(0.0)
    most = cosine.max(1).values
    pardon = (most[None] > most[:, None]) & (most[None] > 0)  # j is more like somebody than i is: i is pardoned
    cosine = torch.where(pardon, cosine * most[:, None] / torch.where(pardon, most[None], 1.0), cosine)
    alpha = (1 - cosine.fill_diagonal_(0.0).max(1).values).clamp(0.0, 1.0).where(there, 0.0)
    if float(alpha.max()) <= ALIKE:  # everybody has a twin, and what is left of 1 - 1 is rounding
        return torch.zeros_like(alpha)
    alpha = (alpha / alpha.max()).clamp(max=ONE)
    return (torch.logit(alpha) + 0.5).clamp(0.0, 1.0)
