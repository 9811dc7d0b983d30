"""Language modelling: an LSTM that says the next word; z = {"x": parameters}."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedfleet.simulator.author import Batch, Key, Objective, Tree
from fedfleet.tasks.options import DataShape


class LanguageOptions(BaseModel):
    """The net: embedding, LSTM layers, output."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    hidden: int = Field(default=128, ge=1)
    """Units of a layer, and width of the embedding."""
    layers: int = Field(default=2, ge=1, le=8)
    """LSTM layers."""


class LanguageModel:
    """Cross-entropy of the next word, a mean over words; perplexity is its exponential.

    Examples are windows (B, L + 1) of word numbers, each read from an empty state. Functions: "predict", (B, 3): the sum of
    cross-entropies, words foreseen, words; "per_example", loss and accuracy (B,).
    """

    parts = ("x",)

    def __init__(self, options: LanguageOptions, shape: DataShape):
        if len(shape.example) != 1 or shape.example[0] < 2:
            raise ValueError(
                f"task.name='language_model': examples of shape {shape.example} are no windows of words: choose a text data set"
            )
        self._options, self._words = options, shape.classes
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1})}
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": self._predict,
            "per_example": self._per_example,
        }

    def init(self, seed: int) -> Tree:
        """Return initial parameters, uniform within 1 / sqrt(hidden) (embedding: 0.1)."""
        h, v = self._options.hidden, self._words
        bound = 1 / math.sqrt(h)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draw = lambda *shape, within=bound: torch.empty(*shape).uniform_(-within, within)  # noqa: E731
            net = {"embedding": draw(v, h, within=0.1), "output": draw(v, h), "output_bias": torch.zeros(v)}
            for i in range(self._options.layers):
                net |= {f"input_{i}": draw(4 * h, h), f"hidden_{i}": draw(4 * h, h), f"bias_{i}": draw(4 * h)}
        return {"x": net}

    def losses(self, z: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return of windows (B, L + 1) the cross-entropy of each next word, (B, L), and whether it is the likeliest, (B, L)."""
        net = z["x"]
        seen = F.embedding(x[:, :-1], net["embedding"])
        for i in range(self._options.layers):
            seen = _lstm(seen, net[f"input_{i}"], net[f"hidden_{i}"], net[f"bias_{i}"])
        logits = F.linear(seen, net["output"], net["output_bias"])
        wanted = x[:, 1:]
        entropy = -F.log_softmax(logits, -1).gather(-1, wanted[..., None])[..., 0]
        return entropy, logits.argmax(-1) == wanted

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.mean(self.losses(z, batch.x)[0].mean(1)), {}

    def _predict(self, z: Tree, batch: Batch) -> Tensor:
        entropy, right = self.losses(z, batch.x)
        return torch.stack(
            [entropy.sum(1), right.sum(1).to(entropy.dtype), torch.full_like(entropy[:, 0], entropy.shape[1])], 1
        )

    def _per_example(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        entropy, right = self.losses(z, batch.x)
        return {"loss": entropy.mean(1), "accuracy": right.to(entropy.dtype).mean(1)}

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return perplexity, mean cross-entropy a word, and the share of words foreseen."""
        entropy, right, words = outputs.double().sum(0).tolist()
        loss = entropy / words
        return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss, "accuracy": right / words}


def _lstm(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """Run an LSTM layer over (B, L, in) from an empty state; gates in the order of torch's: input, forget, cell, output."""
    through = F.linear(x, w, b)
    h = c = torch.zeros_like(through[:, 0, : u.shape[1]])
    out = []
    for step in through.unbind(1):
        i, f, g, o = (step + F.linear(h, u)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out, 1)
