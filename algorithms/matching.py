"""Matching gradients on the server: which combination of clients' updates makes the least gain of any client largest.

Nguyen et al., "Federated domain generalization with data-free on-server matching gradient", ICLR 2025, Eqs. (13), (15), (16);
mathematically CAGrad (Liu et al., NeurIPS 2021) on differences of models:

    Gamma* = argmin over the simplex of <g_Gamma, g_FL> + kappa |g_FL| |g_Gamma|                                    (15)
    g_IGD  = g_FL + kappa |g_FL| g_Gamma* / |g_Gamma*|                                                              (16)

with g_FL = sum_u w_u Delta_u and g_Gamma = sum_u gamma_u Delta_u. All of it needs the inner products K of the updates alone, so
that nothing here grows with the model: g_IGD = sum_u a_u Delta_u, where a = w + kappa |g_FL| / |g_Gamma*| gamma*.

Eq. (15) is convex. As |v| is the least of (|v|^2 / t + t) / 2 over t > 0, its Gamma is, for the best t, the one whose g_Gamma lies
nearest to -s g_FL with s = t / (kappa |g_FL|): a programme that is solved exactly. The best t is |g_Gamma|.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfleet.algorithms.simplex_qp import least_quadratic

TINY = 1e-12
"""Of the largest squared norm of an update: what is less counts as nothing.

Of a client that does not move the best mixture is that client alone, of norm 0. The paper's search ends near it, at 1e-9 to 1e-5 of
the largest, which counts: what is left of the others then gives a step of length kappa |g_FL| its direction.
"""
LR, MOMENTUM, UPDATES = 25.0, 0.5, 20  # Table 4: 21 evaluations
HALVINGS = 48  # of log t, whose range is 1 - log(TINY) / 2: to a relative 1e-13


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


def exact_mixture(gram: Tensor, weights: Tensor, kappa: float) -> Tensor:
    """Return the Gamma (S,) that Eq. (15) is least at, to the rounding of K: by bisection of log t.

    Args:
        gram: inner products of the clients' updates (S, S) float64.
        weights: w (S,) float64, which sum to 1.
        kappa: the radius.

    """
    largest = float(gram.diagonal().max())
    radius = kappa * float((weights @ gram @ weights).clamp(min=0).sqrt())
    if radius**2 <= TINY * largest:  # a mean of nothing, or no radius, is the step whatever the mixture
        return torch.full_like(weights, 1 / len(weights))
    r = gram @ weights
    one, gamma = torch.ones_like(weights), weights
    high = math.log(largest) / 2  # no mixture is longer than the longest update
    low = high + math.log(TINY) / 2 - 1  # where even that is too long, a mixture of nothing is the best
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        s = math.exp(middle) / radius
        gamma = least_quadratic(gram + s * (torch.outer(r, one) + torch.outer(one, r)) + s**2 * (weights @ r))
        if float(gamma @ gram @ gamma) > math.exp(2 * middle):
            low = middle
        else:
            high = middle
    return gamma


def coefficients(gram: Tensor, weights: Tensor, gamma: Tensor, kappa: float) -> Tensor:
    """Return a (S,) of Eq. (16): those of g_FL where that, or g_Gamma, vanishes."""
    least = TINY * float(gram.diagonal().max())
    of_mean, of_gamma = (float(g @ gram @ g) for g in (weights, gamma))
    if of_mean <= least or of_gamma <= least:
        return weights
    return weights + kappa * (of_mean / of_gamma) ** 0.5 * gamma
