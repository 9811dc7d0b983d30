"""Small networks, built from the shape of an example and the number of classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedfleet.tasks.pooling import MaxPool2
from fedfleet.tasks.pretrained import FixedNorm
from fedfleet.tasks.stateful import BatchNorm, inputs


class Net(nn.Sequential):
    """Layers one after another; integers are read as floats."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs (B, classes) for inputs (B, ...)."""
        return super().forward(input if input.is_floating_point() else input.to(torch.float32))


def logistic(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """Multinomial logistic regression."""
    return Net(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """Fully connected layers of the given widths, with ReLU between."""
    widths = (math.prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return Net(*layers, nn.Linear(widths[-1], classes))


def cnn(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """Two 3x3 convolutions (16, 32 channels), each with ReLU and 2x2 max pooling, then one linear layer."""
    channels, height, width = shape
    return Net(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), MaxPool2()),
        *(nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), classes)),
    )


def cnn_bn(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """The same with BatchNorm after each convolution."""
    channels, height, width = shape
    return Net(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), MaxPool2()),
        *(nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), classes)),
    )


def lenet(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """LeNet: two 5x5 convolutions (6, 16 channels) with ReLU and pooling, linear 120, 84, classes: 44,426 weights at 28x28."""
    channels, height, width = shape
    flat = 16 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return Net(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), MaxPool2()),
        *(nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def lenet_relu(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """LeNet with ReLU on the logits too, as in CDMA's AUC experiments on MNIST."""
    return Net(*lenet(shape, classes, hidden).children(), nn.ReLU())


def lenet_sigmoid(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """LeNet as in "Deep leakage from gradients": 5x5 convolutions (12 channels, strides 2, 2, 1) with sigmoid, one linear layer.

    Its 13,426 weights at 28x28 are drawn between -1/2 and 1/2, as there.
    """
    channels, height, width = shape
    flat = 12 * -(-height // 4) * -(-width // 4)
    net = Net(
        *(nn.Conv2d(channels, 12, 5, padding=2, stride=2), nn.Sigmoid()),
        *(nn.Conv2d(12, 12, 5, padding=2, stride=2), nn.Sigmoid()),
        *(nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()),
        *(nn.Flatten(), nn.Linear(flat, classes)),
    )
    for p in net.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    return net


def convnet(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """Three 3x3 convolutions (32, 64, 64), two poolings, linear 64, classes: CDMA's CIFAR-10 net, 122,570 weights at 3x32x32."""
    channels, height, width = shape
    flat = 64 * (((height - 2) // 2 - 2) // 2 - 2) * (((width - 2) // 2 - 2) // 2 - 2)
    return Net(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


def cnn5(shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]) -> nn.Module:
    """Two 5x5 convolutions (32, 64) with ReLU and pooling, linear 512, classes: FedOMG's net, 582,026 weights at 28x28."""
    channels, height, width = shape
    flat = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return Net(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), MaxPool2()),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), MaxPool2()),
        *(nn.Flatten(), nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, classes)),
    )


MODELS: dict[str, Callable[[tuple[int, ...], int, tuple[int, ...]], nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "cnn_bn": cnn_bn,
    "lenet": lenet,
    "lenet_relu": lenet_relu,
    "lenet_sigmoid": lenet_sigmoid,
    "convnet": convnet,
    "cnn5": cnn5,
}
POOLED = {"cnn": 4, "cnn_bn": 4, "lenet": 16, "lenet_relu": 16, "convnet": 18, "cnn5": 16}
"""The least height and width that a convolutional net with poolings can take."""
SMALLEST_SIDE = {**POOLED, "lenet_sigmoid": 4}
"""The same of all convolutional nets."""


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    hidden: tuple[int, ...],
    seed: int,
    init: Literal["drawn", "zero"] = "drawn",
) -> nn.Module:
    """Build a net with torch's default initialisation, drawn from ``seed`` alone, or with parameters of 0.

    Raises ValueError for an unknown name, images too small for a convolutional net, or 0 in more than one linear layer.
    """
    if name not in MODELS:
        raise ValueError(
            f"unknown model {name!r}: choose one of {', '.join(MODELS)}, or, for classification, bag, mobilenet_v2, resnet18, "
            f"resnet50, resnet101, module:name (such as torchvision.models:{name}) or transformers:PATH"
        )
    least = SMALLEST_SIDE.get(name, 0)
    if least and (len(shape) != 3 or min(shape[1:]) < least):
        raise ValueError(f"model {name!r} needs images of at least {least}x{least}, not {shape}: try model=mlp")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = MODELS[name](shape, classes, hidden)
    return net if init == "drawn" else _zero(name, net)


def _zero(name: str, net: nn.Module) -> nn.Module:
    """Return the net with all parameters 0, from where gradient steps would leave hidden units alike. Raises ValueError."""
    if not is_linear(net):
        raise ValueError(
            f"task.init='zero': task.model={name!r} has hidden layers, whose units would stay alike: choose logistic, or drawn"
        )
    for p in net.parameters():
        nn.init.zeros_(p)
    return net


def is_linear(net: nn.Module) -> bool:
    """Say whether all that a net learns is one linear layer."""
    return leaves(net)["head"] == {name for name, _ in net.named_parameters()}


def first_linear(net: nn.Module) -> str | None:
    """Return the name of the linear layer, with a bias, that takes a net's flattened inputs; None where there is no such."""
    layers = list(net.named_children()) if isinstance(net, nn.Sequential) else []
    match [layer for _, layer in layers[:2]]:
        case [nn.Flatten(), nn.Linear(bias=nn.Parameter())]:
            return layers[1][0]
    return None


NORMS = (BatchNorm, FixedNorm, nn.GroupNorm, nn.LayerNorm)


def leaves(net: nn.Module) -> dict[str, frozenset[str]]:
    """Return the names of a net's parameters by what they are: "head", the last layer of all if it is linear; "norm"."""
    layers = [(name, layer) for name, layer in net.named_modules() if not [*layer.children()]]
    trainable = [(name, layer) for name, layer in layers if [*layer.parameters(recurse=False)]]
    last = layers[-1:] if isinstance(layers[-1][1], nn.Linear) and layers[-1][0] else []
    norms = [(name, layer) for name, layer in trainable if isinstance(layer, NORMS)]
    names = lambda of: frozenset(f"{name}.{p}" for name, layer in of for p, _ in layer.named_parameters(recurse=False))  # noqa: E731
    return {"head": names(last), "norm": names(norms)}


def checked_leaves(net: nn.Module, shape: tuple[int, ...]) -> dict[str, frozenset[str]]:
    """Return the same of a net of somebody's own, whose last layer by name need not be the last that is applied."""
    result = leaves(net)
    trainable = {name for name, p in net.named_parameters() if p.requires_grad and not p.is_meta}
    if not result["head"] <= trainable:  # shared, not to be learnt, or without content
        return {**result, "head": frozenset()}
    if not result["head"]:
        return result
    name = next(iter(result["head"])).rpartition(".")[0]
    seen: list[Any] = []
    hook = net.get_submodule(name).register_forward_hook(lambda layer, x, y: seen.append((x[0], y)))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                out = net(*inputs(net, torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape)))
            except (RuntimeError, IndexError, TypeError, ValueError):  # it takes words
                seen.clear()
                out = net(*inputs(net, torch.zeros(2, *shape, dtype=torch.int64)))
        last = len(seen) == 1 and seen[0][0].dim() == 2 and seen[0][1] is out
    except Exception:  # what is wrong with it, those that run it say
        last = False
    finally:
        hook.remove()
    return result if last else {**result, "head": frozenset()}
