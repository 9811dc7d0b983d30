"""Dynamic attention of FADA: sources count by how much tighter their updates make the clusters of the target's features.

Peng, Huang, Zhu & Saenko, "Federated adversarial domain adaptation", ICLR 2020:

    I = sum over clusters r of  1 / (2 n_r)  sum over a, b in r of  |f_a - f_b|
    gain_i = I before - I after source i's update
    alpha = softmax(gain)

Clusters are those of k-means, of the features that are measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedfleet.simulator.author import Key, k_means

LLOYD = 10
"""Steps of Lloyd's algorithm."""


def gap(features: Tensor, member: Tensor) -> Tensor:
    """Return I (), float64, of features (B, width), of which ``member`` (K, B) bool says which cluster they are in, if any."""
    points, real = features.to(torch.float64), member.any(0)
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    apart = torch.where(real[:, None] & real, apart, 0.0)
    weight = member.to(torch.float64)
    within = ((weight @ apart) * weight).sum(1)
    return (within / (2 * weight.sum(1).clamp(min=1))).sum()


def clustered_gap(key: Key, features: Tensor, real: Tensor, clusters: int) -> Tensor:
    """Return I () of the ``real`` (B,) ones of features (B, width) in clusters of their own. One key gives seeds at one place."""
    return gap(features, k_means(key, features.to(torch.float64), real, clusters, LLOYD))


def attention(gain: Tensor) -> Tensor:
    """Return the weights of sources (n,) with these gains (n,); they add up to 1."""
    return gain.softmax(0)
