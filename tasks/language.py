"""Language modelling: an LSTM, or a net of one's own, that says the next word; z = {"x": parameters}, and "b" as any net."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, ConfigError, Key, Objective, Tree
from fedfleet.simulator.named import is_path
from fedfleet.tasks.making import Make, maker, own_model
from fedfleet.tasks.options import AdapterOptions, DataShape, Net, TaskOptions
from fedfleet.tasks.stateful import buffers, called, hollow, prepared, trainable
from fedfleet.tasks.transformer import is_transformer


class LanguageOptions(TaskOptions):
    """The net: embedding, LSTM layers, output; or another one."""

    texts: ClassVar[bool] = True
    hidden: int = Field(default=128, ge=1)
    """Units of a layer, and width of the embedding."""
    layers: int = Field(default=2, ge=1, le=8)
    """LSTM layers."""
    model: str | None = None
    """If not the LSTM: module:name of what makes a net that takes words (B, L) to logits (B, L, words), or transformers:PATH of a
    causal language model of Hugging Face's."""
    arguments: dict[str, Any] | None = None
    """What one's own is called with; ``seed``, ``shape`` (of its inputs) and ``classes``, the words, it is told besides, if it
    names them. Of a transformer, what is other than its configuration says."""
    adapters: AdapterOptions | None = None
    """Leave the weights of ``model`` as they are, and learn small matrices beside them (LoRA)."""
    source: str | None = None
    """Digest of the code of one's own, or of a transformer's configuration; a run says here what it was."""

    def net(self) -> Net:
        """Return the net that they name."""
        return Net(self.model, self.adapters, self._paths())

    def _paths(self) -> dict[str, str]:
        return own_model(self.model)

    @model_validator(mode="after")
    def _applies(self) -> LanguageOptions:
        for key, default in (("hidden", 128), ("layers", 2)):
            if self.model is not None and (value := getattr(self, key)) != default:
                raise ValueError(
                    f"{key}={value} is of the LSTM, not of model={self.model}: give it in arguments, or set model=null"
                )
        for key in ("arguments", "adapters", "source"):
            if self.model is None and getattr(self, key) is not None:
                raise ValueError(
                    f"{key} is not for the LSTM, which has no linear layers of its own: leave it out, or give model"
                )
        if self.model is not None and not (is_path(self.model) or is_transformer(self.model)):
            raise ValueError(
                f"model={self.model!r} is neither module:name nor transformers:PATH: give one, or null for the LSTM"
            )
        return self


class _Foreseen:
    """What outputs of "predict" have to be."""

    axis = None  # of classes: they are sums of losses

    def misfit(self, outputs: Tensor, y: Tensor) -> str | None:
        """Return nothing: a net whose outputs do not fit has failed before."""
        return None

    astray = misfit


class LanguageModel:
    """Cross-entropy of the next word, a mean over words; perplexity is its exponential.

    Examples are windows (B, L + 1) of word numbers, each read from an empty state. Of texts of several lengths, -1 after their end,
    a batch's loss is the mean over the words that are there, so that each counts alike. Functions: "predict", (B, 3): the sum of
    cross-entropies, words foreseen, words; "per_example", loss and accuracy (B,), means over an example's own words, and of texts
    "weight", their number.
    """

    def __init__(self, options: LanguageOptions, shape: DataShape):
        if len(shape.example) != 1 or shape.example[0] < 2:
            raise ValueError(
                f"task.name='language_model': examples of shape {shape.example} are no windows of words: choose a text data set"
            )
        self._options, self._words, self._several = options, shape.words or shape.classes, shape.words > 0
        self.parts: tuple[str, ...] = ("x",)
        self.make: Make | None = None
        if options.model is not None:
            read = DataShape((shape.example[0] - 1,), self._words, shape.words)
            self.make = maker(options.model, options.arguments, options.adapters, read, "foretell")
            assert self.make is not None
            self._net = prepared(self.make(0))
            self.parts = ("x", BUFFERS) if buffers(self._net) else ("x",)
            self.loss = _Foreseen()
            hollow(self._net)
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1})}
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": self._predict,
            "per_example": self._per_example,
        }

    def init(self, seed: int) -> Tree:
        """Return initial parameters: those of the net, or of the LSTM uniform within 1 / sqrt(hidden) (embedding: 0.1)."""
        if self.make is not None:
            net = prepared(self.make(seed))
            return {"x": trainable(net)} | ({BUFFERS: buffers(net)} if BUFFERS in self.parts else {})
        h, v = self._options.hidden, self._words
        bound = 1 / math.sqrt(h)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draw = lambda *shape, within=bound: torch.empty(*shape).uniform_(-within, within)  # noqa: E731
            net = {"embedding": draw(v, h, within=0.1), "output": draw(v, h), "output_bias": torch.zeros(v)}
            for i in range(self._options.layers):
                net |= {f"input_{i}": draw(4 * h, h), f"hidden_{i}": draw(4 * h, h), f"bias_{i}": draw(4 * h)}
        return {"x": net}

    def net(self) -> nn.Module:
        """Return the net as it is made, with torch's own layers. Raises ConfigError for the LSTM, which is none of torch's."""
        if self.make is None:
            raise ConfigError("task.name='language_model': its LSTM is no torch module: read model.safetensors")
        return self.make(0)

    def losses(self, z: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return of windows (B, L + 1) the cross-entropy of each next word, (B, L), and whether it is the likeliest, (B, L).

        Both are 0 where no word follows.
        """
        return _entropies(self._logits(z, x[:, :-1], None, None)[0], x[:, 1:])

    def _logits(self, z: Tree, x: Tensor, weight: Tensor | None, key: Key | None) -> tuple[Tensor, Tree]:
        """Return logits (B, L, words), and what layers have counted, in training if weights are given."""
        net = z["x"]
        if self.make is not None:
            return called(self._net, net, z.get(BUFFERS, {}), x, weight=weight, key=key)
        seen = F.embedding(x.clamp(min=0) if self._several else x, net["embedding"])
        for i in range(self._options.layers):
            seen = _lstm(seen, net[f"input_{i}"], net[f"hidden_{i}"], net[f"bias_{i}"])
        return F.linear(seen, net["output"], net["output_bias"]), {}

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        logits, new = self._logits(z, batch.x[:, :-1], batch.weight, key)
        entropy = _entropies(logits, batch.x[:, 1:])[0]
        if not self._several:
            return batch.mean(entropy.mean(1)), {BUFFERS: new} if new else {}
        words = batch.weight * _counts(batch.x).to(entropy.dtype)
        total = torch.where(batch.weight > 0, entropy.sum(1), 0.0).sum()
        return total / words.sum().clamp(min=1.0), {BUFFERS: new} if new else {}

    def _predict(self, z: Tree, batch: Batch) -> Tensor:
        entropy, right = self.losses(z, batch.x)
        sums = entropy.sum(1), right.sum(1), _counts(batch.x)
        return torch.stack([each.to(entropy.dtype) for each in sums], 1)

    def _per_example(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        entropy, right = self.losses(z, batch.x)
        words = _counts(batch.x).to(entropy.dtype)
        result = {"loss": entropy.sum(1), "accuracy": right.to(entropy.dtype).sum(1)}
        means = {name: total / words.clamp(min=1) for name, total in result.items()}
        return {**means, "weight": words} if self._several else means

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return perplexity, mean cross-entropy a word, and the share of words foreseen."""
        entropy, right, words = outputs.double().sum(0).tolist()
        loss = entropy / words
        return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss, "accuracy": right / words}


def _entropies(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy (B, L) of words (B, L), and whether each is the likeliest; of -1, which is none, 0 both."""
    if logits.shape[:-1] != wanted.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} for words {tuple(wanted.shape)}: return (examples, words, vocabulary)"
        )
    entropy = -F.log_softmax(logits, -1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return torch.where(wanted >= 0, entropy, 0.0), logits.argmax(-1) == wanted


def _counts(x: Tensor) -> Tensor:
    """Return how many words are foreseen in windows (B, L + 1)."""
    return (x[:, 1:] >= 0).sum(1)


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
