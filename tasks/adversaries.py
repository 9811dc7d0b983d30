"""Adversaries' losses in domain adaptation, L_dom of DANN, CDAN and MDD.

The adversary wants the loss small, and the feature extractor wants it large. Ganin et al., "Domain-adversarial
training of neural networks", JMLR 2016; Long, Cao, Wang & Jordan, "Conditional adversarial domain adaptation",
NeurIPS 2018; Zhang, Liu, Long & Jordan, "Bridging theory and algorithm for domain adaptation", ICML 2019.

    papers                  here
    h, l, p = softmax(l)    features (B, width), logits (B, classes), their softmax
    D                       judged: the adversary's outputs, (B, 1) or (B, 2) for domains, (B, classes) for margin
                            disparity
    source, target          where ``target`` (B,) is false, true

Rows of weight 0 count nowhere, and a domain without rows has the mean 0.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfleet.simulator.author import Batch
from fedfleet.tasks.losses import cross_entropy


def products(logits: Tensor, features: Tensor, *, detached: bool) -> Tensor:
    """Return the outer products p x h (B, classes * width) that CDAN's adversary takes; ``detached`` keeps gradients from p."""
    p = logits.softmax(1)
    return ((p.detach() if detached else p)[:, :, None] * features[:, None, :]).flatten(1)


def target_logit(judged: Tensor) -> Tensor:
    """Return the logit (B,) of an example being of a target, from what an adversary of domains says."""
    return judged[:, 0] if judged.shape[1] == 1 else judged[:, 1] - judged[:, 0]


def domain_entropy(judged: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy (B,) of the domains."""
    logit = target_logit(judged)
    return F.softplus(torch.where(target, -logit, logit))


def of_pair(source: Tensor, sources: Batch, target: Tensor, targets: Batch, *, confused: bool) -> Tensor:
    """Return the loss of FADA's domain identifier DI, the probability of an example being the source's.

    -mean log DI(source) - mean log(1 - DI(target)), of what the adversary says of the rows of either. Where it is to be
    ``confused``, the extractors' loss: -mean log DI(source) - mean log DI(target).
    """
    called = torch.zeros_like(targets.weight, dtype=torch.bool) | (not confused)
    known = sources.mean(domain_entropy(source, torch.zeros_like(sources.weight, dtype=torch.bool)))
    return known + targets.mean(domain_entropy(target, called))


def dann(judged: Tensor, batch: Batch, target: Tensor) -> Tensor:
    """Return the mean over all rows, DANN's and CDAN's."""
    return batch.mean(domain_entropy(judged, target))


def certainty(logits: Tensor) -> Tensor:
    """Return 1 + exp(-H(p)) (B,), CDAN+E's weight of an example."""
    p = logits.softmax(1)
    return 1 + torch.exp((p * torch.log(p + 1e-5)).sum(1))


def cdan_e(judged: Tensor, logits: Tensor, batch: Batch, target: Tensor) -> Tensor:
    """Return the mean with weights by certainty that sum to 1 in each domain that is there.

    Gradients pass through the weights, and not through what they are divided by.
    """
    real, weights = batch.weight > 0, torch.zeros_like(batch.weight)
    for mask in (~target, target):
        here = torch.where(real & mask, certainty(logits), 0.0)
        weights = weights + here / here.detach().sum().clamp(min=1.0)  # of rows that are there each is at least 1
    each = torch.where(real, domain_entropy(judged, target), 0.0)
    return (weights * each).sum() / weights.detach().sum().clamp(min=1.0)


def mdd(
    judged: Tensor,
    logits: Tensor,
    batch: Batch,
    target: Tensor,
    *,
    margin: float,
    reduction: Literal["batch_mean", "per_domain_mean"],
    source_share: float | None = None,
) -> Tensor:
    """Return the disparity of a second head from what the first says, without gradient for the first.

    On sources the cross-entropy of its labels, ``margin`` times; on targets -log(1.00001 - probability of its label). The mean
    over all rows, or that over each domain's, added; with ``source_share`` each domain's sum by its share of all rows instead.
    """
    label = logits.argmax(1)
    agree = margin * cross_entropy(judged, label)
    differ = -torch.log(1.00001 - judged.softmax(1).gather(1, label[:, None])[:, 0])
    if reduction == "batch_mean":
        return batch.mean(torch.where(target, differ, agree))
    if source_share is not None:
        return batch.mean(torch.where(target, differ / (1 - source_share), agree / source_share))
    return batch.only(~target).mean(agree) + batch.only(target).mean(differ)
