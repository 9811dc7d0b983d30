"""Classification by cross-entropy: z = {"x": parameters of the net}, and "b" where its layers keep count of something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree
from fedfleet.tasks.alike import alike
from fedfleet.tasks.body_and_head import BodyAndHead
from fedfleet.tasks.losses import cross_entropy, scored
from fedfleet.tasks.mixstyle import MixStyleOptions, with_mixstyle
from fedfleet.tasks.models import SMALLEST_SIDE, build, leaves
from fedfleet.tasks.options import DataShape, ModelOptions
from fedfleet.tasks.own_heads import own_heads, with_residual
from fedfleet.tasks.shifted import Shift, no_shift, shifted
from fedfleet.tasks.stateful import buffers, called, prepared


class ClassificationOptions(ModelOptions):
    """Which net, and what is done to its features in training."""

    mixstyle: MixStyleOptions | None = None
    """Mix styles of images within a batch (nets with convolutions only)."""

    @model_validator(mode="after")
    def _has_styles(self) -> ClassificationOptions:
        if self.mixstyle is not None and self.model not in SMALLEST_SIDE:
            raise ValueError(
                f"mixstyle is for nets with convolutions, and model={self.model} has none: choose {', '.join(SMALLEST_SIDE)}, or "
                f"leave mixstyle out"
            )
        return self


class Classification:
    """A net, cross-entropy, accuracy. Functions: "predict", logits (B, classes); "per_example", accuracy and loss (B,).

    ``leaves`` says which parameters are the "head", the last layer, where that is linear, and which are of a "norm"alisation.
    A net with such a head has besides the objectives of ``own_heads.py`` and ``alike.py``: of methods with clients' own heads,
    and of those that want features or gradients to be alike; and the functions "features", what the head is given (B, width),
    and "with_residual", as "per_example" of the head in the part "p" added to the net's own.
    """

    def __init__(self, options: ModelOptions, shape: DataShape):
        self._options, self._shape = options, shape
        self._net = self._build(0)
        self.parts = ("x", BUFFERS) if buffers(self._net) else ("x",)
        self.leaves = leaves(self._net)
        train = Objective(loss=self._loss, sign={"x": 1})
        self.objectives = {"train": train, "shifted": shifted(train)}
        self.functions: dict[str, Callable[[Tree, Batch], Any]] = {
            "predict": lambda z, batch: self.logits(z, batch.x),
            "per_example": lambda z, batch: scored(self.logits(z, batch.x), batch.y),
        }
        if self.leaves["head"]:
            net = BodyAndHead(self._net, self.leaves["head"])
            self.objectives |= own_heads(net) | alike(net)
            self.functions |= {"features": net.seen, "with_residual": partial(with_residual, net)}

    def _build(self, seed: int) -> nn.Module:
        o, shape = self._options, self._shape
        net = prepared(build(o.model, shape.example, shape.classes, o.hidden, seed))
        mixstyle = o.mixstyle if isinstance(o, ClassificationOptions) else None
        return net if mixstyle is None else with_mixstyle(net, mixstyle)

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters, and what its layers keep count of, by name."""
        net = self._build(seed)
        z = {"x": {name: p.detach() for name, p in net.named_parameters()}}
        return z | ({BUFFERS: buffers(net)} if BUFFERS in self.parts else {})

    def no_shift(self, kind: Shift) -> Tree:
        """Return the part that the objective "shifted" takes besides, where it leaves inputs as they are."""
        return no_shift(self._shape.example, kind)

    def logits(self, z: Tree, x: Tensor) -> Tensor:
        """Return the net's outputs (B, classes) for inputs (B, ...), as they are outside training."""
        return called(self._net, z["x"], z.get(BUFFERS, {}), x)[0]

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        logits, new = called(self._net, z["x"], z.get(BUFFERS, {}), batch.x, weight=batch.weight, key=key)
        return batch.mean(cross_entropy(logits, batch.y)), {BUFFERS: new} if new else {}

    def probabilities(self, outputs: Tree) -> Tensor:
        """Return how likely each class is (n, classes)."""
        return outputs.softmax(1)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy and mean cross-entropy."""
        right = outputs.argmax(1) == data["y"]
        return {"accuracy": float(right.double().mean()), "loss": float(F.cross_entropy(outputs.double(), data["y"]))}
