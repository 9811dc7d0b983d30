"""Objectives that ask that domains look alike to the net: of methods for domains never seen.

    invariant   FedIIR: cross-entropy + penalty |g - mean|^2, g the batch's gradient of the head; ctx {"mean", "penalty"}
    irm         IRMv1 (Arjovsky et al. 2019): cross-entropy + penalty g_1 g_2, g_i the gradient by a factor of the logits, at 1, of
                every other row, as DomainBed has it; ctx {"penalty"}
    coral       Deep CORAL (Sun & Saenko 2016): cross-entropy + penalty (mean (m - mean)^2 + mean (C - covariance)^2), m and C
                those of the batch's features; ctx {"mean" (width,), "covariance" (width, width), "penalty"}
    mmd         MMD (DomainBed): cross-entropy + penalty |m - mean|^2, m the mean of the batch's features in waves; ctx
                {"mean" (M,), "frequencies" (width, M), "shifts" (M,), "penalty"}
    fishr       Fishr (Rame et al. 2022): cross-entropy + penalty mean (v - variance)^2, v the variance over the batch of each
                coordinate of an example's gradient by the head; ctx {"variance" (classes, width + 1), "penalty"}

The gradients that three of them are about have closed forms, so that no second derivatives are taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree, in_waves
from fedfleet.tasks.body_and_head import BodyAndHead
from fedfleet.tasks.losses import cross_entropy, one_hot


def by_head(net: BodyAndHead, of: Tree, batch: Batch, features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over real rows of the loss' gradient by the head, and of its square, (classes, width + 1) each.

    The last column is that of the bias; of a head without one there is none.
    """
    real = (batch.weight > 0)[:, None]
    wrong, seen = torch.where(real, _wrong(logits, batch.y), 0.0), torch.where(real, features, 0.0)
    if "bias" in net.head(of):
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
    return wrong.mT @ seen, wrong.square().mT @ seen.square()


def head_moments(net: BodyAndHead, z: Tree, batch: Batch) -> dict[str, Tensor]:
    """Return the same at a model, as it is outside training, by the names "first" and "second"."""
    features = net.seen(z, batch)
    first, second = by_head(net, z["x"], batch, features, net.logits(z["x"], features))
    return {"first": first, "second": second}


def alike(net: BodyAndHead) -> dict[str, Objective]:
    """Return the objectives of a net by name."""

    def seen(z: Tree, batch: Batch, key: Key) -> tuple[Tensor, Tensor, dict[str, Any]]:
        features, new = net.features(z, batch.x, weight=batch.weight, key=key)
        return features, net.logits(z["x"], features), {BUFFERS: new} if new else {}

    def invariant(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, logits, aux = seen(z, batch, key)
        share = batch.weight.to(logits.dtype) / batch.count().clamp(min=1)
        wrong = _wrong(logits, batch.y) * share[:, None]  # the mean loss' gradient by logits
        result, mean = {"weight": wrong.mT @ features, "bias": wrong.sum(0)}, net.head(ctx["mean"])
        apart = sum((result[name] - mean[name]).square().sum() for name in mean)
        return batch.mean(cross_entropy(logits, batch.y)) + ctx["penalty"] * apart, aux

    def irm(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        _, logits, aux = seen(z, batch, key)
        by_factor = (_wrong(logits, batch.y) * logits).sum(1)
        odd = torch.arange(len(logits), device=logits.device) % 2 == 1
        halves = batch.only(~odd).mean(by_factor) * batch.only(odd).mean(by_factor)
        return batch.mean(cross_entropy(logits, batch.y)) + ctx["penalty"] * halves, aux

    def coral(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, logits, aux = seen(z, batch, key)
        real, count = (batch.weight > 0)[:, None], batch.count()
        mean = torch.where(real, features, 0.0).sum(0) / count.clamp(min=1)
        away = torch.where(real, features - mean, 0.0)
        covariance = away.mT @ away / (count - 1).clamp(min=1)
        apart = (mean - ctx["mean"]).square().mean() + (covariance - ctx["covariance"]).square().mean()
        known = (count > 1).to(logits.dtype)  # a single example has no covariance
        return batch.mean(cross_entropy(logits, batch.y)) + ctx["penalty"] * known * apart, aux

    def mmd(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, logits, aux = seen(z, batch, key)
        each = in_waves(features, ctx["frequencies"], ctx["shifts"])
        mean = torch.where((batch.weight > 0)[:, None], each, 0.0).sum(0) / batch.count().clamp(min=1)
        apart = (mean - ctx["mean"]).square().sum()
        return batch.mean(cross_entropy(logits, batch.y)) + ctx["penalty"] * apart, aux

    def fishr(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, logits, aux = seen(z, batch, key)
        first, second = by_head(net, z["x"], batch, features, logits)
        count = batch.count().clamp(min=1)
        apart = (second / count - (first / count).square() - ctx["variance"]).square().mean()
        return batch.mean(cross_entropy(logits, batch.y)) + ctx["penalty"] * apart, aux

    return {
        "invariant": Objective(loss=invariant, sign={"x": 1}),
        "irm": Objective(loss=irm, sign={"x": 1}),
        "coral": Objective(loss=coral, sign={"x": 1}),
        "mmd": Objective(loss=mmd, sign={"x": 1}),
        "fishr": Objective(loss=fishr, sign={"x": 1}),
    }


def _wrong(logits: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of each example's cross-entropy by its logits (B, classes)."""
    return logits.softmax(1) - one_hot(y, logits.shape[1], logits.dtype)
