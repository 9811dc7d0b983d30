"""Matching gradients on the server: which combination of clients' updates makes the least gain of any client largest.

Nguyen et al., "Federated domain generalization with data-free on-server matching gradient", ICLR 2025, Eqs. (13), (15), (16);
mathematically CAGrad (Liu et al., NeurIPS 2021) on differences of models:

    Gamma* = argmin over the simplex of <g_Gamma, g_FL> + kappa |g_FL| |g_Gamma|                                    (15)
    g_IGD  = g_FL + kappa |g_FL| g_Gamma* / |g_Gamma*|                                                              (16)

with g_FL = sum_u w_u Delta_u and g_Gamma = sum_u gamma_u Delta_u. All of it needs the inner products K of the updates alone, so
that nothing here grows with the model: g_IGD = sum_u a_u Delta_u, where a = w + kappa |g_FL| / |g_Gamma*| gamma*.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-12
"""Of the largest squared norm of an update: what is less counts as nothing."""
LR, MOMENTUM, UPDATES = 25.0, 0.5, 20  # Table 4: 21 evaluations


def objective(gram: Tensor, weights: Tensor, gamma: Tensor, kappa: float) -> Tensor:
    """Return what Eq. (15) minimises, from the inner products (S, S) of updates, w (S,) and gamma (S,)."""
    return gamma @ gram @ weights + kappa * torch.sqrt((weights @ gram @ weights) * (gamma @ gram @ gamma))


def mixture(gram: Tensor, weights: Tensor, kappa: float, updates: int = UPDATES) -> Tensor:
    """Return Gamma (S,), the best that gradient descent on softmax(v) comes by, from v = 0 with the paper's rate and momentum.

    Args:
        gram: inner products of the clients' updates (S, S) float64.
        weights: w (S,) float64, which sum to 1.
        kappa: the radius.
        updates: steps of v.

    """
    eps = TINY * float(gram.diagonal().max())
    scale = torch.sqrt(gram.diagonal() + eps).mean() ** 2
    k, eps = gram / scale, eps / scale
    r, c = k @ weights, kappa * torch.sqrt(weights @ k @ weights + eps)
    v, m = torch.zeros_like(weights), torch.zeros_like(weights)
    best, least = torch.full_like(weights, 1 / len(weights)), torch.inf
    for step in range(updates + 1):
        gamma = v.softmax(0)
        norm = torch.sqrt(gamma @ k @ gamma + eps)
        value = float(gamma @ r + c * norm)
        if value < least:
            best, least = gamma, value
        if step < updates:
            q = r + c * (k @ gamma) / norm
            m = MOMENTUM * m + gamma * (q - gamma @ q)
            v = v - LR * m
    return best


def coefficients(gram: Tensor, weights: Tensor, gamma: Tensor, kappa: float) -> Tensor:
    """Return a (S,) of Eq. (16): those of g_FL where that, or g_Gamma, vanishes."""
    least = TINY * float(gram.diagonal().max())
    of_mean, of_gamma = (float(g @ gram @ g) for g in (weights, gamma))
    if of_mean <= least or of_gamma <= least:
        return weights
    return weights + kappa * (of_mean / of_gamma) ** 0.5 * gamma
