"""Advice before a run, which goes on: data and nets that are allowed, but will rarely do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOOKED_AT = 1000  # examples
SURE = 1e-3  # how near to 1 probabilities add up
FAR = 30.0  # size of a feature from which on the usual steps are too long


def advice(x: Tensor, features: Sequence[str], words: int) -> list[str]:
    """Return a line for what of examples (n, ...) should be mended; ``features`` are the names of their columns, if any."""
    numbers = x.dtype == torch.float32 or (x.dtype == torch.int64 and features)  # else pixels, or words
    if x.dim() != 2 or words or not numbers or not len(x):
        return []
    size = x[:LOOKED_AT].double().square().mean(0).sqrt()
    if not (largest := float(size.max())) > FAR:
        return []
    at = int(size.argmax())
    name = repr(features[at]) if features else f"number {at}"
    far = int((size > FAR).sum())
    others = f", and {far - 1} more are above {FAR:g}" if far > 1 else ""
    return [
        f"feature {name} is about {largest:,.3g} in size{others}: nets and steps are made for features of about 1: scale them, by "
        f"(x - mean) / standard deviation for instance"
    ]


def of_outputs(outputs: Tensor, axis: int, classes: int, loss: str) -> list[str]:
    """Return a line for what of a net's outputs should be mended, whose ``axis`` is that of so many classes; 0: unknown."""
    of_classes = outputs.movedim(axis, -1).double()
    result, many = [], of_classes.shape[-1]
    if loss == "nll_loss":
        if not bool((of_classes.exp().sum(-1) - 1).abs().max() < SURE):
            result.append(
                "the net's outputs are no logarithms of probabilities, which nll_loss takes: end it in nn.LogSoftmax(1), or take "
                "cross_entropy"
            )
    elif many > 1 and bool((of_classes >= 0).all()) and bool(((of_classes.sum(-1) - 1).abs() < SURE).all()):
        result.append(
            "the net's outputs are probabilities, of which cross-entropy takes the softmax once more: leave the last softmax out"
        )
    if 0 < classes < many:
        result.append(
            f"the net has {many} outputs, and the data have {classes} classes: end it in as many, unless others are to come"
        )
    return result
