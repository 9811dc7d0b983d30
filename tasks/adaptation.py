"""Adversarial domain adaptation: learn from labelled sources what holds on a target without labels (DANN, CDAN, MDD).

min over x, max over y:   L_cls(x) - nu L_dom(x, y)

    papers                      here
    omega                       z["x"]: "features.…", the extractor, "bottleneck.…", if it has one, and "head.…", which classifies
    psi                         z["y"], the adversary; not there with loss: none, which learns from sources alone
    L_cls                       the mean cross-entropy of the rows with labels, 0 where a batch has none
    L_dom                       adversaries.py
    -grad_psi F / nu            the direction of y: it descends L_dom itself, in the same backward pass (psi_rescale)

FedMM's released code averages L_cls over a client's labelled rows, so that the fewer clients hold labels the less it weighs beside
L_dom in the mean over clients. ``task_weight: per_sample`` divides their sum by all rows of the batch and by ``source_share``: for
clients with as many examples each, the mean is then the objective of all examples together, whoever holds them (but for cdan_e,
whose weights are of a batch).

Its fine-tuning multiplies the gradient of the extractor by ``feature_gradient`` and that of the adversary by 1 / (nu + 0.01).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree, rng
from fedfleet.tasks import adaptation_nets, adversaries
from fedfleet.tasks.adaptation_nets import Takes
from fedfleet.tasks.kernels import mk_mmd
from fedfleet.tasks.losses import cross_entropy
from fedfleet.tasks.options import DataShape, Net, TaskOptions, Width
from fedfleet.tasks.pretrained import NETS, Weights
from fedfleet.tasks.shifted import Shift, no_shift, shifted
from fedfleet.tasks.stateful import buffers, called

Loss = Literal["none", "dann", "cdan", "cdan_e", "mdd"]
TAKES: Mapping[Loss, Takes] = {
    "none": "nothing",
    "dann": "features",
    "cdan": "products",
    "cdan_e": "products",
    "mdd": "margin",
}
OF_LOSSES: Mapping[str, set[Loss]] = {
    "nu": {"dann", "cdan", "cdan_e", "mdd"},
    "psi_rescale": {"dann", "cdan", "cdan_e", "mdd"},
    "fine_tune": {"dann", "cdan", "cdan_e", "mdd"},
    "cdan_detach": {"cdan", "cdan_e"},
    "mdd_margin": {"mdd"},
    "mdd_reduction": {"mdd"},
    "dropout": {"mdd"},
}
"""Options that some losses have alone."""
OF_THE_GAME = ("nu", "psi_rescale", "task_weight", "source_share")
"""Options of the objective "train", which others do not read."""
FINE_TUNED = 0.01


class AdaptationOptions(TaskOptions):
    """Which nets, which loss of the adversary, how the two losses are weighed."""

    model: Literal["mlp", "cnn", "conv2", "conv3", "mobilenet_v2", "resnet18", "resnet50", "resnet101"] = "mlp"
    """The nets: mlp for any inputs; cnn, small, conv2 (FedMM's released code) and conv3 for images; torchvision's, which
    have their own names, for photographs."""
    weights: Weights = "imagenet"
    """Extractors of torchvision begin with the weights they have from ImageNet, or random ones."""
    hidden: tuple[Width, ...] = (64, 64, 64)
    """Widths of the extractor's layers (mlp only)."""
    loss: Loss = "dann"
    """What the adversary wants small; "none" has no adversary, and learns from labelled examples alone."""
    nu: float = Field(default=1.0, gt=0)
    """Weight of the adversary's loss, nu; the released code takes 1 for dann and cdan, 0.5 for mdd, a quarter of it and less for
    nets trained before."""
    psi_rescale: bool = True
    """The adversary steps along the gradient of its own loss; false leaves the factor nu there, so that the game is zero-sum."""
    cdan_detach: bool = False
    """No gradient passes through the probabilities that multiply the features, as in CDAN's own code."""
    mdd_margin: float = Field(default=1.0, gt=0)
    """gamma: weight of the sources in margin disparity; MDD's own code takes 3."""
    mdd_reduction: Literal["batch_mean", "per_domain_mean"] = "batch_mean"
    """Mean over all rows, as in FedMM's code, or the sum of each domain's mean, as in MDD's own."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of hidden units left out of both heads (mdd; the mlp's have none), or of bottleneck and head (torchvision's nets)."""
    task_weight: Literal["per_client_mean", "per_sample"] = "per_client_mean"
    """How labelled rows weigh: each client's mean, or alike whoever holds them."""
    source_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of all training examples that have labels, as the data have it (per_sample only)."""
    fine_tune: bool = False
    """For an extractor trained before: small steps of it, and of the adversary 1 / (nu + 0.01) times those of the game."""
    feature_gradient: float = Field(default=0.05, gt=0)
    """What the extractor's gradients are multiplied by (fine_tune only)."""

    def net(self) -> Net:
        """Return the nets that they name."""
        return Net(self.model)

    @model_validator(mode="after")
    def _applies(self) -> AdaptationOptions:
        for key, losses in OF_LOSSES.items():
            if self.loss in losses or (key == "dropout" and self.model in NETS):
                continue
            if (value := self._changed(key)) is not None:
                raise ValueError(f"{key}={value} is not for loss={self.loss}: leave it out")
        if self.loss == "mdd" and self.model == "mlp" and (value := self._changed("dropout")) is not None:
            raise ValueError(f"dropout={value} is not for model=mlp, whose heads have no hidden layers: leave it out")
        if self.model != "mlp" and (value := self._changed("hidden")) is not None:
            raise ValueError(f"hidden={list(value)} is not for model={self.model}: leave it out")
        if self.model not in NETS and (value := self._changed("weights")) is not None:
            raise ValueError(f"weights={value} is not for model={self.model}: leave it out")
        if self.task_weight != "per_sample" and (value := self._changed("source_share")) is not None:
            raise ValueError(
                f"source_share={value} is of use with task_weight=per_sample only: set that, or leave it out"
            )
        if not self.fine_tune and (value := self._changed("feature_gradient")) is not None:
            raise ValueError(f"feature_gradient={value} is of use with fine_tune=true only: set that, or leave it out")
        return self

    def _changed(self, key: str) -> Any:
        value = getattr(self, key)
        return None if value == type(self).model_fields[key].default else value

    @property
    def of_the_game(self) -> dict[str, Any]:
        """The options of the objective "train" that are not at their defaults."""
        return {key: value for key in OF_THE_GAME if (value := self._changed(key)) is not None}

    @property
    def y_sign(self) -> float:
        """The factor of the objective's gradient in the direction of the adversary."""
        if not self.psi_rescale:
            return -1.0
        return -1 / (self.nu + FINE_TUNED) if self.fine_tune else -1 / self.nu


class Pass(NamedTuple):
    """A forward pass: one of training has weights of the rows (B,), and a key that dropout draws from."""

    weight: Tensor | None = None
    key: Key | None = None


OUTSIDE = Pass()


class DomainAdaptation:
    """An extractor, a head and an adversary; accuracy.

    Rows of a target have no labels in training. Functions: "predict", {"logits"} (B, classes) and, of an adversary that tells
    domains apart, {"target"} (B,), its logit of an example being of a target; "per_example", accuracy and loss (B,); "features",
    and those "in training", which take ``batch.data["key"]``.
    """

    def __init__(self, options: AdaptationOptions, shape: DataShape):
        self._options, self._shape = options, shape
        self.of_the_game = options.of_the_game
        self._nets = self._build(0)
        self.unlabelled = self._nets.adversary is not None
        players = ("x", "y") if self.unlabelled else ("x",)
        self.parts = (*players, BUFFERS) if _counted(self._nets) else players
        sign = {"x": 1.0, "y": options.y_sign}
        train = Objective(loss=self._loss, sign={p: sign[p] for p in players})
        self.objectives = {"train": train, "shifted": shifted(train)}
        if options.loss == "dann":
            self.objectives |= {
                "reversed": Objective(loss=self._reversed, sign={"x": 1, "y": 1}),
                "mkmmd": Objective(loss=self._mkmmd, sign={"x": 1}),
                "voted": Objective(loss=self._voted, sign={"x": 1}),
                "labels": Objective(loss=self._labels, sign={"x": 1}),
                "identify": Objective(loss=self._identify, sign={"y": 1}),
                "confuse": Objective(loss=self._confuse, sign={"x": 1, "others": 1}),
                "pulled": Objective(loss=self._pulled, sign={"x": 1}),
            }
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": self._predict,
            "per_example": self._per_example,
            "features": lambda z, batch: self.features(z, batch.x),
            "features_in_training": lambda z, batch: self._features(z, batch.x, _training(batch))[0],
        }

    def _build(self, seed: int) -> adaptation_nets.Nets:
        o, shape = self._options, self._shape
        takes, classes = TAKES[o.loss], shape.classes
        try:
            return adaptation_nets.build(o.model, shape.example, classes, o.hidden, takes, o.dropout, seed, o.weights)
        except ValueError as e:
            raise ValueError(f"task.name='domain_adaptation': {e}") from None

    def init(self, seed: int) -> Tree:
        """Return the nets' initial parameters, by name, and running statistics, if there are any.

        Those of x are the same whatever the adversary.
        """
        nets = self._build(seed)
        x = {f"{name}.{k}": p for name in OF_X for k, p in getattr(nets, name).named_parameters()}
        y = {} if nets.adversary is None else dict(nets.adversary.named_parameters())
        result = {"x": x, "y": y, BUFFERS: _counted(nets)}
        return {part: {k: p.detach() for k, p in result[part].items()} for part in self.parts}

    @property
    def source_share(self) -> float | None:
        """The share of all training examples that the loss takes for labelled; None where it does not matter."""
        return self._options.source_share if self._options.task_weight == "per_sample" else None

    def no_shift(self, kind: Shift) -> Tree:
        """Return the part that the objective "shifted" takes besides, where it leaves inputs as they are."""
        return no_shift(self._shape.example, kind)

    def blank(self, rows: int) -> Tensor:
        """Return so many inputs (rows, ...) that are all 0."""
        return torch.zeros(rows, *self._shape.example)

    def features(self, z: Tree, x: Tensor) -> Tensor:
        """Return the features (B, width) of inputs (B, ...), which heads and adversary take."""
        return self._features(z, x, OUTSIDE)[0]

    def _features(self, z: Tree, x: Tensor, way: Pass) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the features, and the running statistics after that by their names in z."""
        counted: dict[str, Tensor] = {}
        for name in ("features", "bottleneck"):
            seen = _of(name, z.get(BUFFERS, {}))
            x, new = called(getattr(self._nets, name), _of(name, z["x"]), seen, x, **way._asdict())
            counted |= {f"{name}.{n}": v for n, v in new.items()}
            if name == "features" and way.key is not None and self._options.fine_tune:
                x = x.detach() + self._options.feature_gradient * (
                    x - x.detach()
                )  # as it is, with so much of the gradient
        return x, counted

    def logits(self, z: Tree, features: Tensor, way: Pass = OUTSIDE) -> Tensor:
        """Return the head's outputs (B, classes)."""
        return called(self._nets.head, _of("head", z["x"]), {}, features, **way._asdict())[0]

    def judged(self, z: Tree, features: Tensor, logits: Tensor, way: Pass = OUTSIDE) -> Tensor:
        """Return the adversary's outputs (B, …)."""
        adversary, o = self._nets.adversary, self._options
        assert adversary is not None
        if TAKES[o.loss] == "products":
            features = adversaries.products(logits, features, detached=o.cdan_detach)
        return called(adversary, z["y"], {}, features, **way._asdict())[0]

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        o, target = self._options, _target(batch)
        features, counted = self._features(z, batch.x, Pass(batch.weight, key))
        aux = {BUFFERS: counted} if BUFFERS in z else {}
        logits = self.logits(z, features, Pass(batch.weight, rng.fold(key, "head")))
        value = self._task_loss(logits, batch, target)
        if self._nets.adversary is None:
            return value, aux
        judged = self.judged(z, features, logits, Pass(batch.weight, rng.fold(key, "adversary")))
        return value - o.nu * self._domain_loss(judged, logits, batch, target), aux

    def _reversed(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Mapping[str, Tensor], Tree]:
        """Return FedKA's disentangler: DANN by reversed gradients of weight ``ctx["alpha"]``, a loss each for x and y.

        The adversary's is the sum of both domains' means.
        """
        target = _target(batch)
        features, counted = self._features(z, batch.x, Pass(batch.weight, key))
        logits = self.logits(z, features, Pass(batch.weight, rng.fold(key, "head")))
        judged = self.judged(z, features, logits, Pass(batch.weight, rng.fold(key, "adversary")))
        each = adversaries.domain_entropy(judged, target)
        told = batch.only(~target).mean(each) + batch.only(target).mean(each)
        value = batch.only(~target).mean(cross_entropy(logits, batch.y.clamp(min=0)))
        return {"x": value - ctx["alpha"] * told, "y": told}, {BUFFERS: counted} if BUFFERS in z else {}

    def _mkmmd(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        """Return ``ctx["alpha"]`` times MK-MMD of the sources' features and ``ctx["others"]`` (B, width) of the targets' rows."""
        target, real = _target(batch), batch.weight > 0
        features, counted = self._features(z, batch.x, Pass(batch.weight * ~target, key))
        features = torch.where(target[:, None], ctx["others"], features)
        value = ctx["alpha"] * mk_mmd(features, real & ~target, real & target)
        return value, {BUFFERS: counted} if BUFFERS in z else {}

    def _voted(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        """Return ``ctx["alpha"]`` times the cross-entropy of the classes ``ctx["winner"]`` (B,)."""
        features, counted = self._features(z, batch.x, Pass(batch.weight, key))
        logits = self.logits(z, features, Pass(batch.weight, rng.fold(key, "head")))
        value = ctx["alpha"] * batch.mean(cross_entropy(logits, ctx["winner"]))
        return value, {BUFFERS: counted} if BUFFERS in z else {}

    def _labels(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        """Return the mean cross-entropy of the labelled rows."""
        batch = batch.only(~_target(batch))
        features, counted = self._features(z, batch.x, Pass(batch.weight, key))
        logits = self.logits(z, features, Pass(batch.weight, rng.fold(key, "head")))
        return batch.mean(cross_entropy(logits, batch.y.clamp(min=0))), {BUFFERS: counted} if BUFFERS in z else {}

    def _identify(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        """Return what FADA's domain identifier descends, of labelled rows and ``ctx["others"]`` (m, B, width) of targets."""
        return self._of_pair(z, batch, ctx["others"], ctx["real"], key, confused=False)[0], {}

    def _confuse(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        """Return what FADA's extractors descend, of labelled rows and the part ``z["others"]`` (m, B, width)."""
        value, counted = self._of_pair(z, batch, z["others"], ctx["real"], key, confused=True)
        return value, {BUFFERS: counted} if BUFFERS in z else {}

    def _of_pair(
        self, z: Tree, batch: Batch, others: Tensor, real: Tensor, key: Key, *, confused: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a source's rows and of features (m, B, width) of targets, of which those ``real`` (m, B) count."""
        batch = batch.only(~_target(batch))
        features, counted = self._features(z, batch.x, Pass(batch.weight, key))
        there = Batch({}, real.flatten())
        others = others.flatten(0, 1).to(features.dtype)
        said, of_others = (self.judged(z, f, f, Pass(b.weight, key)) for f, b in ((features, batch), (others, there)))
        return adversaries.of_pair(said, batch, of_others, there, confused=confused), counted

    def _pulled(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, Tree]:
        """Return ``ctx["loss"]`` (), with the gradient that it has where ``ctx["pull"]`` (B, width) is that of the features."""
        features, counted = self._features(z, batch.x, Pass(batch.weight, key))
        value = torch.where((batch.weight > 0)[:, None], ctx["pull"] * features, 0.0).sum()
        return ctx["loss"].to(value.dtype) + value - value.detach(), {BUFFERS: counted} if BUFFERS in z else {}

    def _task_loss(self, logits: Tensor, batch: Batch, target: Tensor) -> Tensor:
        each = cross_entropy(logits, batch.y.clamp(min=0))  # rows without labels do not count
        if self._options.task_weight == "per_client_mean":
            return batch.only(~target).mean(each)
        return batch.mean(torch.where(target, 0.0, each)) / self._options.source_share

    def _domain_loss(self, judged: Tensor, logits: Tensor, batch: Batch, target: Tensor) -> Tensor:
        o = self._options
        if o.loss == "cdan_e":
            return adversaries.cdan_e(judged, logits, batch, target)
        if o.loss == "mdd":
            share = None if o.task_weight == "per_client_mean" else o.source_share
            how = {"margin": o.mdd_margin, "reduction": o.mdd_reduction, "source_share": share}
            return adversaries.mdd(judged, logits, batch, target, **how)
        return adversaries.dann(judged, batch, target)

    def _predict(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        features = self.features(z, batch.x)
        logits = self.logits(z, features)
        if TAKES[self._options.loss] not in ("features", "products") or "y" not in z:
            return {"logits": logits}
        return {"logits": logits, "target": adversaries.target_logit(self.judged(z, features, logits))}

    def _per_example(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        logits = self.logits(z, self.features(z, batch.x))
        y = batch.y.clamp(min=0)
        return {"accuracy": (logits.argmax(1) == batch.y).float(), "loss": cross_entropy(logits, y)}

    def predicted(self, outputs: Tree) -> Tensor:
        """Return the class that the net says of each example (n,)."""
        return outputs["logits"].argmax(1)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy, mean cross-entropy and, where the adversary tells known domains apart, its accuracy."""
        right = outputs["logits"].argmax(1) == data["y"]
        result = {
            "accuracy": float(right.double().mean()),
            "loss": float(F.cross_entropy(outputs["logits"].double(), data["y"])),
        }
        if "target" in outputs and "target" in data:
            told = (outputs["target"] > 0) == data["target"]
            result["domain_accuracy"] = float(told.double().mean())
        return result


OF_X = ("features", "bottleneck", "head")
"""The nets whose parameters are the part x."""


def _counted(nets: adaptation_nets.Nets) -> dict[str, Tensor]:
    """Return the running statistics of the nets, by net and name."""
    return {f"{name}.{k}": v for name in OF_X for k, v in buffers(getattr(nets, name)).items()}


def _of(net: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of one net by their names there."""
    return {name.removeprefix(f"{net}."): p for name, p in parameters.items() if name.startswith(f"{net}.")}


def _training(batch: Batch) -> Pass:
    """Return a pass of training whose key is in the batch."""
    return Pass(batch.weight, batch.data["key"])


def _target(batch: Batch) -> Tensor:
    """Return which rows are of a target, (B,) bool; none where nothing says so."""
    target = batch.data.get("target")
    return torch.zeros_like(batch.weight, dtype=torch.bool) if target is None else target
