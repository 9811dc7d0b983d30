"""Scores of generated images, from what a frozen classifier says of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SPLITS = 10


def inception_score(probabilities: Tensor, splits: int = SPLITS, *, legacy_splits: bool = False) -> float:
    """Return the mean over splits of exp(mean KL(p(y|x) || p(y))) of probabilities (n, classes).

    Salimans et al., "Improved techniques for training GANs", NeurIPS 2016. 1 where all are alike, the number of classes where
    each is certain and all are equally frequent. ``legacy_splits``: as in CDMA's released code, split k is rows k to
    (k + 1) n / splits, so that splits overlap.
    """
    size = len(probabilities) // splits
    result = []
    for k in range(splits):
        part = probabilities[(k if legacy_splits else k * size) : (k + 1) * size].double()
        mean = part.mean(0, keepdim=True)
        divergence = (torch.xlogy(part, part) - torch.xlogy(part, mean)).sum(1)
        result.append(divergence.mean().exp())
    return float(torch.stack(result).mean())


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Return |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)) of features (n, f) and (m, f), in float64.

    Heusel et al., "GANs trained by a two time-scale update rule converge to a local Nash equilibrium", NeurIPS 2017. NaN where
    there are fewer than two rows, or one is not finite.
    """
    if min(len(a), len(b)) < 2 or not (a.isfinite().all() and b.isfinite().all()):
        return math.nan
    a, b = a.double(), b.double()
    of_a, of_b = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(of_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    between = torch.linalg.eigvalsh(root @ of_b @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + of_a.trace() + of_b.trace() - 2 * between)
