"""The mean of the vectors of a text's words, and a linear layer: A. Joulin et al., "Bag of tricks for efficient text
classification", EACL 2017, without its pairs of words."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class Bag(nn.Module):
    """Takes tokens (B, L) and where there are any (B, L) to logits (B, classes)."""

    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits."""
        seen = self.embedding(tokens)
        there = mask[..., None].to(seen.dtype)
        return self.out((seen * there).sum(1) / there.sum(1).clamp(min=1))


def bag(words: int, classes: int, hidden: tuple[int, ...], seed: int, init: Literal["drawn", "zero"]) -> nn.Module:
    """Build the net for texts of ``words`` tokens, drawn from ``seed`` alone. Raises ValueError for options of other nets."""
    if len(hidden) != 1:
        raise ValueError(f"model 'bag' has vectors of one width, and hidden={list(hidden)}: give one number")
    if init != "drawn":
        raise ValueError("model 'bag' has units that would stay alike: leave init out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Bag(words, hidden[0], classes)
