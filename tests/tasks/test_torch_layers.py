"""Layers of torch's, each called twice in a pass: gradients and what is counted are torch's, for one client or many."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

import fedfleet
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.work import BUFFERS, Batch
from fedfleet.tasks import from_module
from fedfleet.tasks.stateful import called, prepared

ROWS, CLIENTS = 4, 2


class Functional(nn.Module):
    """Calls a function of ``torch.nn.functional`` with a weight of its own."""

    def __init__(self, weight: Tensor, call: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.weight, self.call = nn.Parameter(weight), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x, x, x, need_weights=False)


IMAGE, SIGNAL, STEPS, ROW, WORDS = (4, 6, 6), (4, 8), (5, 6), (6,), None
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "Linear": (lambda: nn.Linear(6, 3), ROW),
    "weight_norm": (lambda: weight_norm(nn.Linear(6, 3)), ROW),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 3, padding=1), SIGNAL),
    "Conv2d": (lambda: nn.Conv2d(4, 2, 3, groups=2), IMAGE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2), IMAGE),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), ROW),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4, momentum=0.3, affine=False), IMAGE),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(6), ROW),
    "RMSNorm": (lambda: nn.RMSNorm(6), ROW),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "PReLU": (lambda: nn.PReLU(4), IMAGE),
    "Hardswish": (nn.Hardswish, IMAGE),
    "GELU": (nn.GELU, ROW),
    "Softmax": (lambda: nn.Softmax(1), ROW),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(2), IMAGE),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), SIGNAL),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "Unfold": (lambda: nn.Unfold(2), IMAGE),
    "LSTM": (lambda: nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True), STEPS),
    "GRU": (lambda: nn.GRU(6, 4, batch_first=True), STEPS),
    "MultiheadAttention": (lambda: Attention(6, 2, batch_first=True), STEPS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), STEPS),
    "Embedding": (lambda: nn.Embedding(7, 3), WORDS),
    "Embedding padded": (lambda: nn.Embedding(7, 3, padding_idx=0), WORDS),
    "Embedding padded at the end": (lambda: nn.Embedding(7, 3, padding_idx=-1), WORDS),
    "Embedding sparse": (lambda: nn.Embedding(7, 3, padding_idx=2, sparse=True), WORDS),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(7, 3), WORDS),
    "EmbeddingBag sparse": (lambda: nn.EmbeddingBag(7, 3, padding_idx=1, mode="sum", sparse=True), WORDS),
    "Bilinear": (lambda: Functional(torch.randn(2, 6, 6), lambda x, w: F.bilinear(x, x, w)), ROW),
    "Conv2d one by one": (
        lambda: Functional(torch.randn(2, 4, 3, 3), lambda x, w: torch.stack([F.conv2d(one, w) for one in x])),
        IMAGE,
    ),
}


class Doubled(nn.Module):
    """Twice the weight it is given."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def first(y: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a layer returns, its output changed."""
    return (change(y[0]), *y[1:]) if isinstance(y, tuple) else change(y)


def own(layer: nn.Module) -> nn.Module:
    """A layer of a class of somebody's own, whose forward goes on from torch's."""

    class Own(type(layer)):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        def forward(self, *x: Any) -> Any:
            return first(super().forward(*x), torch.tanh)

    layer.__class__ = Own
    return layer


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda layer, x: (x[0] * 2, *x[1:]) if x[0].is_floating_point() else None)
    layer.register_forward_hook(lambda layer, x, y: first(y, lambda out: out * 3))
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    name = next(name for name, _ in layer.named_parameters() if "weight" in name)
    return register_parametrization(layer, name, Doubled())


class Stilled(nn.Module):
    """A layer that its net puts into eval mode as it calls it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        self.layer.eval()
        return self.layer(x)


class Keeping(Stilled):
    """A layer that its net leaves in eval mode when it is put into training mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.layer.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def counted(layer: nn.BatchNorm1d | nn.SyncBatchNorm) -> nn.Module:
    """A layer that has counted something."""
    with torch.no_grad():
        assert layer.running_mean is not None
        layer.running_mean.fill_(0.3)
    return layer


OURS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "BatchNorm1d": (lambda: counted(nn.BatchNorm1d(6)), ROW),
    "SyncBatchNorm": (lambda: counted(nn.SyncBatchNorm(6)), ROW),
    "Dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), ROW),
    "Dropout1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Dropout1d(0.5)), SIGNAL),
    "LSTM": (lambda: nn.LSTM(6, 4, 2, batch_first=True, dropout=0.5), STEPS),
    "GRUCell": (lambda: nn.GRUCell(6, 4), ROW),
    "Embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), WORDS),
}
"""Layers that are computed here in another way than by torch."""
DRAWING = ("Dropout", "Dropout1d", "LSTM")
STILL: dict[str, Callable[[nn.Module], nn.Module]] = {"eval": nn.Module.eval, "stilled": Stilled, "kept": Keeping}
ALIVE = {"own": own, "hooked": hooked, "parametrized": parametrized}
WAYS = {
    f"{name} {way}": (lambda make=make, change=change: change(make()), shape)
    for name, (make, shape) in OURS.items()
    for way, change in (STILL if name in DRAWING else STILL | ALIVE).items()
}
FORGOTTEN = {
    "F.embedding": lambda: Functional(torch.randn(7, 3), lambda x, w: F.embedding(x, w, padding_idx=0)),
}
"""What torch does otherwise for many at once than for one, in the forward of a net of one's own: refused."""


class Twice(nn.Module):
    """A layer called twice, and a linear one after it."""

    def __init__(self, layer: nn.Module, x: Tensor):
        super().__init__()
        self.layer = layer
        self.last = nn.Linear(self.features(copy.deepcopy(layer), x).shape[1], 3)

    @staticmethod
    def features(layer: nn.Module, x: Tensor) -> Tensor:
        other = x.flip(1) if x.dtype == torch.int64 else x * 2 - 1
        one, two = ((y[0] if isinstance(y, tuple) else y) for y in (layer(x), layer(other)))
        return torch.cat([one.flatten(1), two.flatten(1)], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(self.layer, x))


def examples(shape: tuple[int, ...] | None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if shape is None:
        return torch.randint(0, 7, (ROWS, 5), generator=generator)
    return torch.randn(ROWS, *shape, generator=generator)


def torchs(net: Twice, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a net by torch alone, and its buffers after that."""
    net = copy.deepcopy(net)
    if isinstance(net.layer, Keeping):  # else it would be out of eval mode
        net.train()
    F.cross_entropy(net(x), y).backward()
    found = {name: p.grad for name, p in net.named_parameters()}
    return {name: g.to_dense() if g.is_sparse else g for name, g in found.items() if g is not None}, dict(
        net.named_buffers()
    )


def test_every_layer_called_twice_computes_what_torch_does_for_one_client_and_for_many(subtests: pytest.Subtests):
    y = torch.tensor([0, 2, 1, 1])
    for name, (make, shape) in (LAYERS | WAYS).items():
        with subtests.test(name):
            torch.manual_seed(1)
            x = examples(shape)
            nets = [Twice(make(), x) for _ in range(CLIENTS)]
            task = from_module(nets[0])
            ops, z = EngineOps(task.objectives, task.functions), task.init(0)

            def gradient(z: Any, key: Tensor, x: Tensor = x, ops: Any = ops) -> Any:
                return ops.grad("train", z, Batch({"x": x, "y": y}, torch.ones(ROWS)), key)

            several = [{**z, "x": {n: p.detach().clone() for n, p in net.named_parameters()}} for net in nets]
            keys = torch.arange(CLIENTS)
            with torch.no_grad():
                many = torch.func.vmap(gradient, randomness="error")(T.map(lambda *p: torch.stack(p), *several), keys)
                alone = [gradient(each, key) for each, key in zip(several, keys, strict=True)]
            for i, net in enumerate(nets):
                wanted, counted = torchs(net, x, y)
                for directions, aux in (alone[i], T.index(many, i)):
                    for n, g in wanted.items():
                        torch.testing.assert_close(directions["x"][n], g, rtol=1e-4, atol=1e-5, msg=f"{name}: {n}")
                    for n, b in aux.get(BUFFERS, {}).items():
                        torch.testing.assert_close(b, counted[n], rtol=1e-5, atol=1e-6, msg=f"{name}: {n}")


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_gradient_that_is_another_for_many_is_refused_before_the_run(name: str):
    x = torch.arange(200).view(40, 5) % 6 + 1  # of which none is padding
    data = fedfleet.data.from_arrays(x, torch.arange(40) % 3, client=torch.arange(40) // 8, test=0.2)
    net = from_module(Twice(FORGOTTEN[name](), x[:ROWS]))
    with pytest.raises(fedfleet.ConfigError, match=r"padding_idx.*executor\.inner=serial"):
        fedfleet.Experiment(fedfleet.load({"executor.inner": "batched", "cohort.size": 2}), task=net, data=data)
    fedfleet.Experiment(fedfleet.load({"executor.inner": "serial", "cohort.size": 2}), task=net, data=data)


def test_a_dropout_draws_anew_wherever_it_is_called():
    class Dropping(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.drop, self.times = nn.Dropout(0.5), times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = self.drop(x)
            return x

    x, key = torch.ones(20_000, 1), rng.key(3)
    once, kept = (called(prepared(Dropping(n)), {}, {}, x, weight=torch.ones(len(x)), key=key)[0] > 0 for n in (1, 3))
    assert float(kept.float().mean()) == pytest.approx(0.125, abs=0.01)
    assert bool((once >= kept).all())  # the first mask is that of a layer called once


@pytest.mark.parametrize("where", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(where: str):
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        getattr(net[0].weight, where)(lambda g: None)
        return net

    for given in (make, make()):
        with pytest.raises(fedfleet.ConfigError, match=r"^net Sequential: 0\.weight has a hook"):
            from_module(given)
