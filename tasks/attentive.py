"""Classification by a net of convolutions with an attention highlighter: StableFDG's net, which any algorithm may train.

Park, Han, Kim, Wang, Brinton & Moon, "StableFDG: style and attention based learning for federated domain generalization", NeurIPS
2023, and its released code. Of the last block's maps x_p at places p, queries and keys of unit norm are made:

    m      the mean over places of the queries; in training, of the mean with those of a partner of the same class
    a_p    softmax over places of m · k_p
    the classifier is given (mean_p x_p, sum_p a_p x_p), twice as many numbers as channels

    released code                          here
    mean over a query's places of scores   the same, taken of the queries, as scores are linear in them
    partner                                the next example of the class in the batch, after the last the first; of a single one
                                           itself (in its Office-Home runs one of a batch drawn class by class)
    maps divided by 49, and added          their mean, whatever the number of places
    values, a 1 x 1 layer of the scores    not there: nothing depends on them
    blocks 1 to 4 of a ResNet              the same; of a small net what a pooling ends, and convolutions after the last one
    the layer after the last block         the first linear layer of ``model``, for so many inputs instead of all maps

With ``attention: false`` it is ``model`` of the task "classification", with the same names and initial parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree, rng
from fedfleet.tasks.losses import cross_entropy, scored
from fedfleet.tasks.models import POOLED
from fedfleet.tasks.options import DataShape, Width
from fedfleet.tasks.photographs import PhotographOptions, made
from fedfleet.tasks.pooling import MaxPool2
from fedfleet.tasks.pretrained import RESNETS
from fedfleet.tasks.stateful import buffers, called, prepared, under_way, weighing
from fedfleet.tasks.styles import Change, explored, shared, styles, with_room


class AttentiveOptions(PhotographOptions):
    """Options of a net with an attention highlighter."""

    model: str = "cnn"
    """One of cnn, cnn_bn, lenet, lenet_relu, convnet, cnn5; or torchvision's resnet18, resnet50, resnet101."""
    attention: bool = True
    """Give the classifier means over places and means by attention, instead of all maps."""
    dims: Width = 30
    """Of queries and keys."""

    @model_validator(mode="after")
    def _has_maps(self) -> AttentiveOptions:
        if self.model not in POOLED and self.model not in RESNETS:
            raise ValueError(
                f"model={self.model} has no blocks of convolutions, whose maps have styles and places: choose one of "
                f"{', '.join((*POOLED, *RESNETS))}"
            )
        return self


class Highlighter(nn.Module):
    """Queries and keys of places."""

    def __init__(self, channels: int, dims: int):
        super().__init__()
        self.queries, self.keys = nn.Conv2d(channels, dims, 1), nn.Conv2d(channels, dims, 1)

    def forward(self, maps: Tensor, partner: Tensor | None) -> Tensor:
        """Return means over places, and by attention (B, 2 C), of maps (B, C, H, W) of examples with partners (B,), or without."""
        mean = F.normalize(self.queries(maps).flatten(2), dim=1).mean(2)
        if partner is not None:
            mean = (mean + mean.index_select(0, partner)) / 2
        scores = (mean[:, :, None] * F.normalize(self.keys(maps).flatten(2), dim=1)).sum(1)
        places = maps.flatten(2)
        return torch.cat([places.mean(2), (places * scores.softmax(1)[:, None]).sum(2)], dim=1)


def next_of_class(y: Tensor, real: Tensor) -> Tensor:
    """Return for each row the next one (B,) that is ``real`` (B,) and has the same label y (B,), after the last the first."""
    row = torch.arange(len(y), device=y.device)
    far = (row - row[:, None] - 1) % len(y)  # 0 for the next, the most for a row itself
    return torch.where((y == y[:, None]) & real, far, len(y)).argmin(1)


class Given(NamedTuple):
    """The input of the net.

    Attributes:
        x: inputs (B, ...).
        y: their labels (B,) in training.
        change: what is done to styles.
        maps: return the maps of the first block instead.

    """

    x: Tensor
    y: Tensor | None = None
    change: Change | None = None
    maps: bool = False


class Found(NamedTuple):
    """Logits (E, classes), labels (E,) and weights (E,), which say what counts, of a batch and the copies made of it."""

    logits: Tensor
    y: Tensor | None
    weight: Tensor | None


class Net(nn.Module):
    """The layers of a net of convolutions, in blocks, under their own names."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        for name, layer in plain.named_children():
            self.add_module(name, layer)
        cut = _resnet() if _is_resnet(self) else _by_poolings(self)
        self.blocks, self.head = cut
        self.flat = nn.Flatten() if _is_resnet(self) else nn.Identity()  # which torchvision's have no layer for
        self.highlight: Highlighter | None = None

    def channels(self, block: int) -> int:
        """Return how many channels the maps of a block have."""
        layers = (m for n in self.blocks[block] for m in self.get_submodule(n).modules())
        return [m.out_channels for m in layers if isinstance(m, nn.Conv2d)][-1]

    def attend(self, dims: int) -> None:
        """Put a highlighter in the place of what lies between the maps and the first linear layer; both are drawn anew."""
        while not isinstance(old := self.get_submodule(self.head[0]), nn.Linear):
            self.head = self.head[1:]
        width = self.channels(-1)
        self.highlight = Highlighter(width, dims)
        self.set_submodule(self.head[0], nn.Linear(2 * width, old.out_features))

    def forward(self, given: Given) -> Any:
        """Return what becomes of the inputs, a ``Found``; in training, copies may come with them."""
        way, change, y = under_way(), given.change, given.y
        maps, weight = as_floats(given.x), None if way is None else way.weight
        rows, of = None, None
        for i, block in enumerate(self.blocks):
            maps = self._through(block, maps, weight)
            if given.maps:
                return maps
            if way is None or change is None or y is None or weight is None:
                continue
            key = rng.fold(way.key, "styles", i)
            if i == 0 and change.share > 0:
                maps = shared(rng.fold(key, "share"), maps, weight, change)
            if i + 1 < len(self.blocks) and change.explore > 0:
                if rows is None or of is None:
                    rows, of = with_room(rng.fold(way.key, "copies"), maps, y, weight, self.classes, change.copies)
                rows = explored(key, rows if i == 0 else rows._replace(maps=maps), of, change)
                maps, y, weight = rows.maps, rows.y, rows.weight
        if self.highlight is not None:
            partner = None if y is None or weight is None else next_of_class(y, weight > 0)
            maps = self.highlight(maps, partner)
        return Found(self._through(self.head, maps, weight), y, weight)

    @property
    def classes(self) -> int:
        """The number of classes."""
        layers = [m for n in self.head if isinstance(m := self.get_submodule(n), nn.Linear)]
        return layers[-1].out_features

    def _through(self, names: list[str], x: Tensor, weight: Tensor | None) -> Tensor:
        with weighing(weight):
            for name in names:
                x = self.get_submodule(name)(x)
        return x


def _by_poolings(net: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Return the names of the layers of each block, and of those from the first that flattens on."""
    blocks: list[list[str]] = [[]]
    head: list[str] = []
    for name, layer in net.named_children():
        if head or isinstance(layer, nn.Flatten):
            head.append(name)
            continue
        blocks[-1].append(name)
        if isinstance(layer, MaxPool2):
            blocks.append([])
    return [block for block in blocks if block], head


def _is_resnet(net: nn.Module) -> bool:
    return any(name == "1.layer4" for name, _ in net.named_modules())


def _resnet() -> tuple[list[list[str]], list[str]]:
    """Return the same of one of torchvision's ResNets, behind the layer that normalises its images."""
    first = ["0", *(f"1.{name}" for name in ("conv1", "bn1", "relu", "maxpool", "layer1"))]
    return [first, ["1.layer2"], ["1.layer3"], ["1.layer4"]], ["1.avgpool", "flat", "1.fc"]


def as_floats(x: Tensor) -> Tensor:
    """Return inputs that may be integers as floats."""
    return x if x.is_floating_point() else x.to(torch.float32)


class Attentive:
    """A net with a highlighter, cross-entropy, accuracy.

    Objectives: "train"; and "stablefdg", the same of the batch and its copies, with styles changed as ``ctx`` says, the
    entries of a ``Change``.
    Functions: "predict", logits (B, classes); "per_example", accuracy and loss (B,); "styles" (B, ``style_width``), of the maps
    of the first block, means and then deviations, as they are outside training.
    """

    def __init__(self, options: AttentiveOptions, shape: DataShape):
        self._options, self._shape = options, shape
        self._net = self._build(0)
        self.parts = ("x", BUFFERS) if buffers(self._net) else ("x",)
        self.style_width = 2 * self._net.channels(0)
        self.objectives = {
            "train": Objective(loss=lambda z, batch, ctx, key: self._loss(z, batch, None, key), sign={"x": 1}),
            "stablefdg": Objective(loss=self._stablefdg, sign={"x": 1}),
        }
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": lambda z, batch: self.logits(z, batch.x),
            "per_example": lambda z, batch: scored(self.logits(z, batch.x), batch.y),
            "styles": lambda z, batch: self.styles(z, batch.x),
        }

    def _build(self, seed: int) -> Net:
        o, shape = self._options, self._shape
        net = Net(made(o, shape.example, shape.classes, seed))
        if o.attention:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(~seed)  # or they would begin with the numbers of the first layers
                net.attend(o.dims)
        prepared(net)
        return net

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters, and what its layers keep count of, by name."""
        net = self._build(seed)
        z = {"x": {name: p.detach() for name, p in net.named_parameters()}}
        return z | ({BUFFERS: buffers(net)} if BUFFERS in self.parts else {})

    def logits(self, z: Tree, x: Tensor) -> Tensor:
        """Return the net's outputs (B, classes) for inputs (B, ...), as they are outside training."""
        return called(self._net, z["x"], z.get(BUFFERS, {}), Given(x))[0].logits

    def styles(self, z: Tree, x: Tensor) -> Tensor:
        """Return the styles (B, ``style_width``) of inputs (B, ...) after the first block."""
        return styles(called(self._net, z["x"], z.get(BUFFERS, {}), Given(x, maps=True))[0])

    def _stablefdg(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        return self._loss(z, batch, Change(**ctx), key)

    def _loss(self, z: Tree, batch: Batch, change: Change | None, key: Key) -> tuple[Tensor, dict[str, Any]]:
        given = Given(batch.x, batch.y, change)
        result, new = called(self._net, z["x"], z.get(BUFFERS, {}), given, weight=batch.weight, key=key)
        return Batch({}, result.weight).mean(cross_entropy(result.logits, result.y)), {BUFFERS: new} if new else {}

    def probabilities(self, outputs: Tree) -> Tensor:
        """Return how likely each class is (n, classes)."""
        return outputs.softmax(1)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy and mean cross-entropy."""
        right = outputs.argmax(1) == data["y"]
        return {"accuracy": float(right.double().mean()), "loss": float(F.cross_entropy(outputs.double(), data["y"]))}
