"""Losses and scores of single examples: cross-entropy, and whether a prediction is right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy (B,) of each example; under ``vmap`` far cheaper than torch's own."""
    return -F.log_softmax(logits, dim=1).gather(1, y[:, None])[:, 0]


def scored(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return accuracy and loss (B,) of each example."""
    return {"accuracy": (logits.argmax(1) == y).to(torch.float32), "loss": cross_entropy(logits, y)}


def one_hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return (B, classes) of labels (B,), rows of zeros where a label is none of the classes."""
    return (torch.arange(classes, device=y.device) == y[:, None]).to(dtype)
