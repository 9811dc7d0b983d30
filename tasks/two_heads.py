"""Classification by a generator and a head, of which there may be two that differ: what FACT and MCD learn.

    paper, released code    here
    G                       z["x"], the generator
    F, F_1, F_2             z["head"]; where there are two, z["head"] and z["second"]
    cross-entropy           objective "train", of labelled rows, summed over the heads
    MCD's step B            objective "discord", the one minus the other; moves the heads alone
    M3SDA's step 1          objective "matched", the cross-entropy of each source domain, and how far domains' moments are apart
    KD3A's loss             objective "distil", of rows with a class that others have voted for; moves G and the head
    L_IDD, disc             objective "idd", mean |softmax(F_1(G(x))) - softmax(F_2(G(x)))| over unlabelled rows; moves G alone

A model with two heads predicts, of each example, as the head that is surer: whose largest probability is larger, the first of
equal ones.

The released code's heads end in a softmax, whose probabilities its cross-entropy and its discrepancy take for logits, and apply
another (``double_softmax``); so the cross-entropy of K classes stays above ln(e + K - 1) - 1, and the discrepancy of an example
below 2 (e - 1) / (e + K - 1), or a K-th of that where it is a mean over classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree, rng
from fedfleet.tasks import moments
from fedfleet.tasks.losses import cross_entropy
from fedfleet.tasks.options import DataShape, Net, TaskOptions, Width
from fedfleet.tasks.pretrained import Weights
from fedfleet.tasks.stateful import buffers, called
from fedfleet.tasks.two_heads_nets import NETS, Nets, build

PARTS = {"x": 0, "head": 1, "second": 1}
"""The parts of a model with two heads, and which net each is for."""


class TwoHeadsOptions(TaskOptions):
    """The nets, and the losses' details."""

    model: Literal["mlp", "digits_small", "digit_five", "resnet18", "resnet50", "resnet101"] = "mlp"
    """Generator and head; ``fedfleet.tasks.two_heads_nets`` says which layers."""
    weights: Weights = "imagenet"
    """The generators resnet18, resnet50 and resnet101 begin with the weights they have from ImageNet, or random ones."""
    hidden: tuple[Width, ...] = Field(default=(64,), min_length=1)
    """Widths of the generator's layers (mlp only)."""
    double_softmax: bool = True
    """Apply softmax to the heads' probabilities once more in both losses, as FACT's released code does; false: as in its paper."""
    idd_reduction: Literal["class_mean", "class_sum"] = "class_mean"
    """Mean of the discrepancy over classes, as in FACT's released code, or their sum, as in its paper."""
    idd_heads_eval: bool = False
    """Take both heads' discrepancy without dropout, normalised by running statistics; false: in training mode, as in the
    released code, where two heads that are the same differ by their dropout."""

    def net(self) -> Net:
        """Return the nets that they name."""
        return Net(self.model)

    @model_validator(mode="after")
    def _applies(self) -> TwoHeadsOptions:
        if self.model != "mlp" and self.hidden != type(self).model_fields["hidden"].default:
            raise ValueError(f"hidden={list(self.hidden)} is not for model={self.model}: leave it out")
        if self.model in NETS and self.weights != type(self).model_fields["weights"].default:
            raise ValueError(f"weights={self.weights} is not for model={self.model}: leave it out")
        return self


def heads_of(z: Tree) -> list[str]:
    """Return the names of the heads that a model has."""
    return [part for part in ("head", "second") if part in z]


class TwoHeads:
    """A generator, a head or two, cross-entropy, discrepancy, accuracy.

    Functions: "predict", logits (B, classes) of the head that is surer; "per_example", accuracy and loss (B,).
    """

    def __init__(self, options: TwoHeadsOptions, shape: DataShape):
        self._options, self._shape = options, shape
        self._nets = self._build(0)
        self.parts = ("x", "head", BUFFERS) if any(map(buffers, self._nets)) else ("x", "head")
        self.objectives = {
            "train": Objective(loss=self._train, sign={"x": 1, "head": 1, "second": 1}),
            "discord": Objective(loss=self._discord, sign={"head": 1, "second": 1}),
            "idd": Objective(loss=self._idd, sign={"x": 1}),
            "matched": Objective(loss=self._matched, sign={"x": 1, "head": 1, "second": 1}),
            "distil": Objective(loss=self._distil, sign={"x": 1, "head": 1}),
        }
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": self._predict,
            "per_example": self._per_example,
        }

    def _build(self, seed: int) -> Nets:
        o = self._options
        try:
            return build(o.model, self._shape.example, self._shape.classes, o.hidden, seed, o.weights)
        except ValueError as e:
            raise ValueError(f"task.name='two_heads': {e}") from None

    def init(self, seed: int) -> Tree:
        """Return the initial generator and head, and their running statistics, if they have any."""
        parts = dict(zip(("x", "head"), self._build(seed), strict=True))
        z = {part: {n: p.detach() for n, p in net.named_parameters()} for part, net in parts.items()}
        counted = {f"{part}.{n}": v for part, net in parts.items() for n, v in buffers(net).items()}
        return z | ({BUFFERS: counted} if counted else {})

    def _run(self, part: str, z: Tree, x: Tensor, weight: Tensor, key: Key | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the outputs of a part, in training where there is a key, and its statistics after it by their names in z."""
        seen = {n.partition(".")[2]: v for n, v in z.get(BUFFERS, {}).items() if n.partition(".")[0] == part}
        mine = None if key is None else rng.fold(key, part)  # so that no two heads drop the same
        y, new = called(self._nets[PARTS[part]], z[part], seen, x, weight=weight, key=mine)
        return y, {f"{part}.{n}": v for n, v in new.items()}

    def _features(self, z: Tree, batch: Batch, key: Key | None) -> tuple[Tensor, dict[str, Tensor]]:
        x = batch.x if batch.x.is_floating_point() else batch.x.to(torch.float32)
        return self._run("x", z, x, batch.weight, key)

    def _train(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        """Return the cross-entropy of the labelled rows, summed over the heads there are.

        It is the mean over the rows, or, where these say of which domain they are, the sum of the domains' means.
        """
        total, _, seen = self._entropies(z, batch, key)
        return total, self._aux(z, seen)

    def _entropies(self, z: Tree, batch: Batch, key: Key) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the same, with the features (B, width) and the statistics after that."""
        batch = batch.only(~batch.data["target"]) if "target" in batch.data else batch
        features, seen = self._features(z, batch, key)
        total = features.new_zeros(())
        for head in heads_of(z):
            logits, of_head = self._run(head, z, features, batch.weight, key)
            each = cross_entropy(self._scores(logits), batch.y.clamp(min=0))
            domains = batch.data["domain"].unbind(1) if "domain" in batch.data else ()
            total = total + (sum(batch.only(d).mean(each) for d in domains) if domains else batch.mean(each))
            seen |= of_head
        return total, features, seen

    def _matched(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        """Return the cross-entropy of the labelled rows and how far domains are apart, by ``ctx["moments"]`` (K,) weights."""
        target, real = batch.data["target"], batch.weight > 0
        value, features, seen = self._entropies(z, batch, key)
        known = {**z, **self._aux(z, seen)}
        of_target, seen = self._features(known, batch.only(target), rng.fold(key, "target"))
        features = torch.where(target[:, None], of_target, features)
        sources = batch.data["domain"] & (real & ~target)[:, None]
        apart = moments.distance(features, sources, real & target, ctx["moments"].to(features.dtype))
        return value + apart, self._aux(known, seen)

    def _discord(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        """Return the cross-entropy of the labelled rows minus the discrepancy of the others."""
        value, seen = self._train(z, batch, ctx, rng.fold(key, "train"))
        apart, seen = self._idd({**z, **seen}, batch, ctx, rng.fold(key, "idd"))
        return value - apart, seen

    def _idd(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        """Return how far both heads' probabilities are from each other on the unlabelled rows; on all where none is labelled."""
        batch = batch.only(batch.data["target"]) if "target" in batch.data else batch
        features, seen = self._features(z, batch, key)
        given = None if self._options.idd_heads_eval else key
        (one, of_one), (two, of_two) = (self._run(h, z, features, batch.weight, given) for h in ("head", "second"))
        apart = (self._scores(one).softmax(1) - self._scores(two).softmax(1)).abs()
        each = apart.mean(1) if self._options.idd_reduction == "class_mean" else apart.sum(1)
        return batch.mean(each), self._aux(z, seen | of_one | of_two)

    def _distil(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        """Return the mean over all rows of ``ctx["used"]`` (B,) times the cross-entropy of ``ctx["soft"]`` (B, classes)."""
        features, seen = self._features(z, batch, key)
        logits, of_head = self._run("head", z, features, batch.weight, key)
        each = -(ctx["soft"] * self._scores(logits).log_softmax(1)).sum(1)
        return batch.mean(ctx["used"] * each), self._aux(z, seen | of_head)

    def _scores(self, logits: Tensor) -> Tensor:
        """Return what both losses take for logits."""
        return logits.softmax(1) if self._options.double_softmax else logits

    def _aux(self, z: Tree, seen: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the new statistics, and the old ones of parts that took no part."""
        return {BUFFERS: {n: seen.get(n, v) for n, v in z[BUFFERS].items()}} if BUFFERS in z else {}

    def _predict(self, z: Tree, batch: Batch) -> Tensor:
        features, _ = self._features(z, batch, None)
        result = [self._run(h, z, features, batch.weight, None)[0] for h in heads_of(z)]
        if len(result) == 1:
            return result[0]
        one, two = result
        return torch.where((two.softmax(1).amax(1) > one.softmax(1).amax(1))[:, None], two, one)

    def _per_example(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        logits = self._predict(z, batch)
        y = batch.y.clamp(min=0)
        return {"accuracy": (logits.argmax(1) == batch.y).to(torch.float32), "loss": cross_entropy(logits, y)}

    def probabilities(self, outputs: Tree) -> Tensor:
        """Return how likely each class is (n, classes)."""
        return outputs.softmax(1)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy and mean cross-entropy, with one softmax."""
        right = outputs.argmax(1) == data["y"]
        return {"accuracy": float(right.double().mean()), "loss": float(F.cross_entropy(outputs.double(), data["y"]))}
