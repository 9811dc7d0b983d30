"""Classification by cross-entropy: z = {"x": parameters of the net}, and "b" where its layers keep count of something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree
from fedfleet.tasks.alike import alike, head_moments
from fedfleet.tasks.bag import bag
from fedfleet.tasks.body_and_head import BodyAndHead
from fedfleet.tasks.losses import cross_entropy, scored
from fedfleet.tasks.making import Model, maker, own_model
from fedfleet.tasks.metrics import MetricOptions, chosen, named_by_path
from fedfleet.tasks.mixstyle import MixStyleOptions, with_mixstyle
from fedfleet.tasks.models import POOLED, checked_leaves, is_linear, leaves
from fedfleet.tasks.options import AdapterOptions, DataShape, ModelOptions, Net
from fedfleet.tasks.own_heads import own_heads, with_residual
from fedfleet.tasks.photographs import PhotographOptions, made
from fedfleet.tasks.pretrained import Norm
from fedfleet.tasks.shifted import Shift, no_shift, shifted
from fedfleet.tasks.stateful import buffers, called, hollow, prepared, trainable
from fedfleet.tasks.targets import LOSSES
from fedfleet.tasks.transformer import is_transformer


class ClassificationOptions(PhotographOptions):
    """Which net, a small one or one of torchvision's for photographs, and what is done to its features in training."""

    texts: ClassVar[bool] = True
    model: Model = "mlp"
    """One of logistic, mlp, cnn, cnn_bn, lenet, lenet_relu, lenet_sigmoid, convnet, cnn5; bag, for texts, the mean of the vectors
    of its words, of width ``hidden``; torchvision's mobilenet_v2, resnet18, resnet50, resnet101; torchvision:NAME of any of its
    nets, with random weights and as many outputs as there are classes (``num_classes``), if nothing is said; module:name of a
    function or class of your own that makes a net; or transformers:PATH of a configuration, or a folder with weights, of Hugging
    Face's."""
    arguments: dict[str, Any] | None = None
    """What one's own is called with; ``seed``, ``shape`` (of an example), ``classes`` and of texts ``words`` it is told besides,
    if it names them. Of a transformer, what is other than its configuration says."""
    source: str | None = None
    """Digest of the code of one's own, or of a transformer's configuration; a run says here what it was."""
    norm: Norm = "batch"
    """What torchvision's nets and those by module:name normalise by: BatchNorm; GroupNorm in its place, with its scales and shifts;
    frozen: BatchNorm with the statistics that it comes with, in training too."""
    metrics: list[str | MetricOptions] = Field(default=[])
    """Measured beside accuracy and loss: f1, auc; torchmetrics:CLASS, sklearn:FUNCTION; module:name of ``(outputs, y) -> number``;
    or mappings of such a name and ``arguments``."""
    mixstyle: MixStyleOptions | None = None
    """Mix styles of images within a batch (small nets with convolutions only)."""
    adapters: AdapterOptions | None = None
    """Leave the net's weights as they are, and learn small matrices beside them (LoRA)."""

    @property
    def normalised(self) -> bool:
        """Whether ``norm`` is of the net."""
        return super().normalised or bool(own_model(self.model))

    def net(self) -> Net:
        """Return the net that they name."""
        return Net(self.model, self.adapters, self._paths())

    def _paths(self) -> dict[str, str]:
        return {**own_model(self.model), **named_by_path(self.metrics)}

    @model_validator(mode="after")
    def _applies(self) -> ClassificationOptions:
        own = bool(own_model(self.model)) or is_transformer(self.model)
        if own:
            for key, default in (("hidden", (64,)), ("init", "drawn")):
                if (value := getattr(self, key)) != default:
                    raise ValueError(
                        f"{key}={value!r} is not for model={self.model}: give it in arguments, or leave it out"
                    )
        for key in ("arguments", "source"):
            if getattr(self, key) is not None and not (own or (key == "source" and self._paths())):
                raise ValueError(
                    f"{key} is for a net of your own, module:name, or transformers:PATH, and model={self.model} is none: leave "
                    f"it out"
                )
        if self.mixstyle is not None and self.model not in POOLED:
            raise ValueError(
                f"mixstyle is for small nets with convolutions, which model={self.model} is not: choose "
                f"{', '.join(POOLED)}, or leave mixstyle out"
            )
        return self


def _built_in(options: ModelOptions, shape: DataShape, seed: int) -> nn.Module:
    """Return a net of our own or of torchvision's."""
    o = options if isinstance(options, ClassificationOptions) else ClassificationOptions(**options.model_dump())
    if (o.model == "bag") != bool(shape.words):
        what, instead = ("no text", "bag, module:name or transformers:PATH") if shape.words else ("text alone", "mlp")
        raise ValueError(f"model {o.model!r} takes {what}: choose {instead}")
    if o.model == "bag":
        return bag(shape.words, shape.classes, o.hidden, seed, o.init)
    return made(o, shape.example, shape.classes, seed)


class Classification:
    """A net, cross-entropy, accuracy. Functions: "predict", logits (B, classes); "per_example", accuracy and loss (B,).

    ``leaves`` says which parameters are the "head", the last layer, where that is linear, and which are of a "norm"alisation.
    A net with such a head has besides the objectives of ``own_heads.py`` and ``alike.py``: of methods with clients' own heads,
    and of those that want features or gradients to be alike; and the functions "features", what the head is given (B, width),
    "with_residual", as "per_example" of the head in the part "p" added to the net's own, and "head_moments", sums over the batch of
    an example's gradient by the head, and of its square.
    """

    def __init__(self, options: ModelOptions, shape: DataShape):
        self._options, self._shape = options, shape
        o = options if isinstance(options, ClassificationOptions) else ClassificationOptions(**options.model_dump())
        self.make = maker(o.model, o.arguments, o.adapters, shape, "classify", partial(_built_in, o, shape), o.norm)
        self.loss = LOSSES["cross_entropy"]
        self.chosen = chosen(o.metrics, self.loss, "task.", taken=("accuracy", "loss"))
        self._net = self._build(0)
        self.parts = ("x", BUFFERS) if buffers(self._net) else ("x",)
        self.leaves = leaves(self._net) if self.make is None else checked_leaves(self._net, shape.example)
        if self.make is not None:
            hollow(self._net)
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
            self.functions |= {"head_moments": partial(head_moments, net)}

    def _build(self, seed: int) -> nn.Module:
        net = prepared(self._torch(seed))
        mixstyle = getattr(self._options, "mixstyle", None)
        return net if mixstyle is None else with_mixstyle(net, mixstyle)

    def _torch(self, seed: int) -> nn.Module:
        """Return the net with torch's own layers, drawn from the seed."""
        return _built_in(self._options, self._shape, seed) if self.make is None else self.make(seed)

    def net(self) -> nn.Module:
        """Return the net as it is made, with torch's own layers."""
        return self._torch(0)

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters, and what its layers keep count of, by name."""
        net = self._build(seed)
        z = {"x": trainable(net)}
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

    def model_metrics(self, z: Tree) -> dict[str, float]:
        """Return of a line in the plane its distance from the origin, |b| / |w| of the difference of its two logits."""
        if self._shape[:2] != ((2,), 2) or not is_linear(self._net):
            return {}
        head = {name.rpartition(".")[2]: z["x"][name].double() for name in self.leaves["head"]}
        weight, bias = (head[name].diff(dim=0) for name in ("weight", "bias"))
        return {"boundary_distance": float(bias.abs() / weight.norm())}

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy, mean cross-entropy, and what else was asked for."""
        right, y = outputs.argmax(1) == data["y"], data["y"]
        result = {"accuracy": float(right.double().mean()), "loss": float(F.cross_entropy(outputs.double(), y))}
        return result | {name: metric(self.loss, outputs, y) for name, metric in self.chosen.items()}
