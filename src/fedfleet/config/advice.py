"""What of data that are allowed will rarely do: said before the run, which goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOOKED_AT = 1000  # examples
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
