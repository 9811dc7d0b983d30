"""Label-free measures of a model, to select models by where a domain has no labels.

    entropy        mean entropy of predictions, of which less is better
    information    entropy of the mean prediction minus that: certain, and not all the same (Bridle, Heading & MacKay,
                   "Unsupervised classifiers, mutual information and phantom targets", NeurIPS 1991; Shi & Sha, ICML
                   2012)
    density        soft neighbourhood density (Saito et al., "Tune it the right way", ICCV 2021): whether similar
                   predictions have many others near them

All are in nats, of probabilities (n, K).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TEMPERATURE = 0.05
"""Of the similarities in the density, as in its paper."""
ROWS = 1000
"""Similarities of so many rows to all at once."""


def label_free(probabilities: Tensor) -> Mapping[str, float]:
    """Return the measures of predictions (n, K)."""
    p = probabilities.double()
    certain = float(_entropy(p).mean())
    return {
        "entropy": certain,
        "information": float(_entropy(p.mean(0))) - certain,
        "density": _density(p) if len(p) > 1 else 0.0,
    }


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of distributions (..., K)."""
    return -torch.special.xlogy(p, p).sum(-1)


def _density(p: Tensor) -> float:
    """Return the mean entropy of the distributions, over all others, that the similarity of predictions makes."""
    unit = torch.nn.functional.normalize(p, dim=1)
    total = 0.0
    for rows in torch.arange(len(p)).split(ROWS):
        alike = unit[rows] @ unit.T / TEMPERATURE
        alike[torch.arange(len(rows)), rows] = -torch.inf  # none is its own neighbour
        total += float(_entropy(alike.softmax(1)).sum())
    return total / len(p)
