"""Objectives of methods that leave a head with each client.

    balanced    FedRoD: cross-entropy of logits + ln n_c; ctx (classes,) has the client's numbers of examples
    residual    FedRoD: that of the head in the part "p" added to the net's own, of which "p" alone learns
    near        FedPAC: cross-entropy + penalty mean (f - c_y)^2, of a feature and the common one of its class; ctx {"prototypes"
                (classes, width), "known" (classes,) 1 where there is one, "penalty"}
    aligned     FedAS: for each class in the batch the mean of (f - c_y)^2, added up; ctx as for "near"

Squares are averaged over the features. An example whose class has no prototype counts for nothing there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree
from fedfleet.tasks.body_and_head import BodyAndHead
from fedfleet.tasks.losses import cross_entropy, one_hot, scored


def own_heads(net: BodyAndHead) -> dict[str, Objective]:
    """Return the objectives of a net by name."""

    def balanced(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, new = net.features(z, batch.x, weight=batch.weight, key=key)
        return batch.mean(cross_entropy(net.logits(z["x"], features) + ctx.log(), batch.y)), _counted(new)

    def residual(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, _ = net.features(z, batch.x, weight=batch.weight, key=key)
        return batch.mean(cross_entropy(_both(net, z, features), batch.y)), {}

    def near(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, new = net.features(z, batch.x, weight=batch.weight, key=key)
        apart, _ = _apart(features, batch.y, ctx)
        loss = cross_entropy(net.logits(z["x"], features), batch.y)
        return batch.mean(loss + ctx["penalty"] * apart), _counted(new)

    def aligned(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, new = net.features(z, batch.x, weight=batch.weight, key=key)
        apart, label = _apart(features, batch.y, ctx)
        real = label * batch.weight[:, None]
        each = (real * apart[:, None]).sum(0) / real.sum(0).clamp(min=1)
        return each.sum(), _counted(new)

    return {
        "balanced": Objective(loss=balanced, sign={"x": 1}),
        "residual": Objective(loss=residual, sign={"p": 1}),
        "near": Objective(loss=near, sign={"x": 1}),
        "aligned": Objective(loss=aligned, sign={"x": 1}),
    }


def with_residual(net: BodyAndHead, z: Tree, batch: Batch) -> dict[str, Tensor]:
    """Return accuracy and loss (B,) of each example under both heads together."""
    return scored(_both(net, z, net.seen(z, batch)), batch.y)


def _both(net: BodyAndHead, z: Tree, features: Tensor) -> Tensor:
    return net.logits(z["x"], features) + net.logits(z["p"], features)


def _apart(features: Tensor, y: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
    """Return how far each feature is from its class' prototype (B,), 0 where there is none, and the labels (B, classes)."""
    label = one_hot(y, len(ctx["known"]), features.dtype)
    return (features - label @ ctx["prototypes"]).square().mean(1) * (label @ ctx["known"]), label


def _counted(new: Tree) -> dict[str, Any]:
    return {BUFFERS: new} if new else {}
