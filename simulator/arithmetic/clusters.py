"""k-means on the rows of a batch, in fixed shapes: rows that do not count are neither drawn nor looked at.

Seeds are those of Arthur & Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007, one trial a seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key

EXACT = "donot_use_mm_for_euclid_dist"
"""The way of ``torch.cdist`` that takes each difference itself, so that near points lose no digits."""


def pick(u: Tensor, mass: Tensor) -> Tensor:
    """Return for each of u (n,), uniform on [0, 1), the row that it falls on, where rows have mass (B,) or (n, B)."""
    up_to = mass.to(torch.float64).cumsum(-1)
    return (up_to <= u[:, None] * up_to[..., -1:]).sum(-1).clamp(max=mass.shape[-1] - 1)


def seeded(key: Key, points: Tensor, real: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return seeds (most, D) among the points (B, D) that are ``real`` (B,), and squared distances from them (most, B) float64.

    Each is drawn in proportion to its squared distance from the nearest so far. Where all points are seeds, any is drawn.
    """
    u = rng.uniform(key, most, torch.float64)
    seeds, apart = [], []
    alike = mass = real.to(torch.float64)
    for j in range(most):
        seeds.append(points.index_select(0, pick(u[j : j + 1], torch.where(mass.sum() > 0, mass, alike))))
        apart.append((points - seeds[-1]).square().sum(1).to(torch.float64) * alike)
        mass = apart[0] if j == 0 else torch.minimum(mass, apart[j])
    return torch.cat(seeds), torch.stack(apart)


def members(apart: Tensor, real: Tensor) -> Tensor:
    """Return which points (B,) are in which of k clusters (k, B) bool: the nearest by distances (k, B), the first of equal ones."""
    return (apart.argmin(0) == torch.arange(len(apart), device=apart.device)[:, None]) & real


def centres(member: Tensor, points: Tensor, before: Tensor) -> Tensor:
    """Return the means (k, D) of clusters (k, B) bool of points (B, D); one that is empty stays where it was."""
    weight = member.to(points.dtype)
    size = weight.sum(1, keepdim=True)
    return torch.where(size > 0, weight @ points / size.clamp(min=1), before)


def k_means(key: Key, points: Tensor, real: Tensor, clusters: int, steps: int) -> Tensor:
    """Return which points are in which cluster, (clusters, B) bool, after steps of Lloyd's algorithm.

    Args:
        key: of the seeds.
        points: (B, D).
        real: which of them count, (B,) bool.
        clusters: how many there are at most.
        steps: of the algorithm, after k-means++ seeds.

    """
    middle, apart = seeded(key, points, real, clusters)
    for _ in range(steps):
        middle = centres(members(apart, real), points, middle)
        apart = torch.cdist(middle, points, compute_mode=EXACT)
    return members(apart, real)
