"""Votes of source models on the classes of unlabelled examples, and what each source adds to the outcome.

Feng et al., "KD3A: Unsupervised multi-source decentralized domain adaptation via knowledge distillation", ICML 2021.
A source counts for an example if it is surer than the gate; where none is, all count, and the example is not used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 10
"""Sources at the most, since the focus looks at every coalition: 2^n of them."""


class Vote(NamedTuple):
    """The outcome for each coalition of sources and each example, leaves (..., B).

    Attributes:
        confidence: the votes that the winning class got, which are probabilities of its voters.
        winner: that class, int64; the first of equal ones.
        gated: whether a member of the coalition was surer than the gate.

    """

    confidence: Tensor
    winner: Tensor
    gated: Tensor


def vote(probabilities: Tensor, gate: Tensor | float, members: Tensor) -> Vote:
    """Return the vote of coalitions.

    Args:
        probabilities: of each class, by source and example (n, B, K).
        gate: how sure a source must be to count where others are not.
        members: which sources take part (S, n) bool.

    """
    sure, says = probabilities.max(-1)  # (n, B)
    over = (sure > gate).to(sure.dtype)
    inside = members.to(sure.dtype)
    gated = inside @ over > 0  # (S, B)
    counts = inside[:, :, None] * torch.where(gated[:, None], over, 1.0)  # (S, n, B)
    for_class = sure[..., None] * (says[..., None] == torch.arange(probabilities.shape[-1], device=says.device))
    confidence, winner = torch.einsum("snb,nbk->sbk", counts, for_class).max(-1)
    return Vote(confidence, winner, gated)


def coalitions(n: int, device: torch.device) -> Tensor:
    """Return every set of n sources (2^n, n) bool, the empty one first and that of all last."""
    return (torch.arange(2**n, device=device)[:, None] >> torch.arange(n, device=device)) & 1 > 0


def values(found: Vote, real: Tensor) -> Tensor:
    """Return the value of each coalition (S,) float64: the confidence of gated votes, summed over the ``real`` examples (B,)."""
    return torch.where(found.gated & real, found.confidence, 0.0).double().sum(-1)


def shapley(worth: Tensor, members: Tensor) -> Tensor:
    """Return the Shapley value of each source (n,) from the values of all coalitions (2^n,); they add up to that of all."""
    n = members.shape[1]
    others = torch.arange(n, dtype=torch.float64, device=worth.device)
    weight = (torch.lgamma(others + 1) + torch.lgamma(n - others) - math.lgamma(n + 1)).exp()
    size = members.sum(1)  # a set of s others joins s!(n - 1 - s)!/n! of the time
    with_it, without = weight[(size - 1).clamp(min=0)], weight[size.clamp(max=n - 1)]
    return torch.where(members, with_it[:, None], -without[:, None]).T @ worth
