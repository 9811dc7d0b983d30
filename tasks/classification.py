"""Classification by cross-entropy: z = {"x": parameters of the net}, and "b" where its layers keep count of something."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree
from fedfleet.tasks.models import build, leaves
from fedfleet.tasks.options import DataShape, ModelOptions
from fedfleet.tasks.pretrained import NETS, Weights, classifier
from fedfleet.tasks.shifted import Shift, no_shift, shifted
from fedfleet.tasks.stateful import buffers, called, prepared


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy (B,) of each example; under ``vmap`` far cheaper than torch's own."""
    return -F.log_softmax(logits, dim=1).gather(1, y[:, None])[:, 0]


def scored(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return accuracy and loss (B,) of each example."""
    return {"accuracy": (logits.argmax(1) == y).to(torch.float32), "loss": cross_entropy(logits, y)}


def without_head(net: nn.Module, head: frozenset[str]) -> nn.Module:
    """Return a net that ends before its last layer, whose parameters are ``head``."""
    body = copy.deepcopy(net)
    body.set_submodule(next(iter(head)).rpartition(".")[0], nn.Identity())
    return body


class ClassificationOptions(ModelOptions):
    """Which net: a small one, or one of torchvision's for photographs."""

    model: str = "mlp"
    """One of logistic, mlp, cnn, cnn_bn, lenet, lenet_relu, convnet; torchvision's mobilenet_v2, resnet18, resnet50, resnet101."""
    weights: Weights | None = None
    """What torchvision's nets begin with, but for their last layer: the weights they have from ImageNet, if nothing is said, or
    random ones."""

    @model_validator(mode="after")
    def _applies(self) -> ClassificationOptions:
        if self.model not in NETS and self.weights is not None:
            raise ValueError(f"weights={self.weights} is not for model={self.model}: leave it out")
        return self


class Classification:
    """A net, cross-entropy, accuracy. Functions: "predict", logits (B, classes); "per_example", accuracy and loss (B,).

    ``leaves`` says which parameters are the "head", the last layer, where that is linear, and which are of a "norm"alisation.
    A net with such a head has besides, of FedRoD: the objective "balanced", cross-entropy of logits + ln n_c, with the
    client's numbers of examples of each class as ``ctx`` (classes,); "residual", that of the head in the part "p" added to the
    net's own, of which it alone learns; and the function "with_residual", as "per_example" of both together. Of FedIIR the
    objective "invariant", with a penalty on how far the batch's gradient of the head is from the one in ``ctx``.
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
            self._body = without_head(self._net, self.leaves["head"])
            self.objectives["balanced"] = Objective(loss=self._balanced, sign={"x": 1})
            self.objectives["residual"] = Objective(loss=self._residual, sign={"p": 1})
            self.objectives["invariant"] = Objective(loss=self._invariant, sign={"x": 1})
            self.functions["with_residual"] = self._with_residual

    def _build(self, seed: int) -> nn.Module:
        o, shape = self._options, self._shape
        if o.model not in NETS:
            return prepared(build(o.model, shape.example, shape.classes, o.hidden, seed))
        weights = (o.weights if isinstance(o, ClassificationOptions) else None) or "imagenet"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return prepared(classifier(o.model, weights, shape.example, shape.classes))

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

    def _balanced(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        logits, new = called(self._net, z["x"], z.get(BUFFERS, {}), batch.x, weight=batch.weight, key=key)
        return batch.mean(cross_entropy(logits + ctx.log(), batch.y)), {BUFFERS: new} if new else {}

    def _features(self, z: Tree, x: Tensor, **training: Any) -> tuple[Tensor, Tree]:
        """Return what the head is given (B, width), and what layers have counted by then."""
        body = {name: leaf for name, leaf in z["x"].items() if name not in self.leaves["head"]}
        return called(self._body, body, z.get(BUFFERS, {}), x, **training)

    def _head(self, of: Tree) -> dict[str, Any]:
        """Return what there is of the head among parameters: "weight", and "bias" if it has one."""
        return {name.rpartition(".")[2]: of[name] for name in sorted(self.leaves["head"])}

    def _both(self, z: Tree, x: Tensor, **training: Any) -> tuple[Tensor, Tensor]:
        """Return the logits (B, classes) of the net's own head, and those of the head in the part "p"."""
        features, _ = self._features(z, x, **training)
        return F.linear(features, **self._head(z["x"])), F.linear(features, **self._head(z["p"]))

    def _invariant(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        features, new = self._features(z, batch.x, weight=batch.weight, key=key)
        logits = F.linear(features, **self._head(z["x"]))
        label = torch.arange(logits.shape[1], device=logits.device) == batch.y[:, None]
        share = batch.weight.to(logits.dtype) / batch.count().clamp(min=1)
        wrong = (logits.softmax(1) - label.to(logits.dtype)) * share[:, None]  # the mean loss' gradient by logits
        found, mean = {"weight": wrong.mT @ features, "bias": wrong.sum(0)}, self._head(ctx["mean"])
        apart = sum((found[name] - mean[name]).square().sum() for name in mean)
        return batch.mean(cross_entropy(logits, batch.y)) + ctx["penalty"] * apart, {BUFFERS: new} if new else {}

    def _residual(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        own, other = self._both(z, batch.x, weight=batch.weight, key=key)
        return batch.mean(cross_entropy(own + other, batch.y)), {}

    def _with_residual(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        own, other = self._both(z, batch.x)
        return scored(own + other, batch.y)

    def probabilities(self, outputs: Tree) -> Tensor:
        """Return how likely each class is (n, classes)."""
        return outputs.softmax(1)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy and mean cross-entropy."""
        right = outputs.argmax(1) == data["y"]
        return {"accuracy": float(right.double().mean()), "loss": float(F.cross_entropy(outputs.double(), data["y"]))}
