"""Nets whose layers keep count of something, draw, or are one call of torch's: BatchNorm, Dropout, LSTM as pure functions.

``prepared`` puts layers of ours in the place of torch's, ``called`` runs such a net. What BatchNorm counts comes in as a tree and
goes out as another; Dropout draws from a key. Rows of weight 0, which are padding, enter no statistic. Other buffers, and
parameters that are not to be learnt (``requires_grad`` false), are constants of the net: they travel nowhere.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedfleet.simulator.author import ConfigError, Key, Tree, rng
from fedfleet.tasks.recurrent import Cell, Recurrent

_placed: WeakKeyDictionary[nn.Module, dict[torch.device, dict[str, Tensor]]] = WeakKeyDictionary()
"""What nets have beside what is learnt, by the device that it was copied to."""


class Pass(NamedTuple):
    """A forward pass in training: weights of the rows (B,), a key, what layers have counted so far, how often each has drawn."""

    weight: Tensor
    key: Key
    counted: dict[str, Tensor]
    drawn: dict[str, int]

    def draw(self, place: str) -> Key:
        """Return the key that the layer at a place draws from now: another one at each of its calls."""
        times = self.drawn[place] = self.drawn.get(place, -1) + 1
        key = rng.fold(self.key, place)
        return rng.fold(key, times) if times else key


class _Under(threading.local):
    way: Pass | None = None


_under = _Under()


def under_way() -> Pass | None:
    """Return the pass of training that the layer asking is in; None outside training."""
    return _under.way


class BatchNorm(nn.Module):
    """torch.nn.BatchNorm1d, 2d and 3d: normalises by the statistics of the real rows, or by running ones outside training.

    A batch of one value a channel has no variance: it becomes the bias, where torch refuses it. One without any real row leaves
    the running statistics as they are.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, like: nn.modules.batchnorm._BatchNorm, place: str):
        super().__init__()
        if like.momentum is None or not like.track_running_stats:
            raise ConfigError(f"net: {place}: give BatchNorm a momentum, and let it track running statistics")
        self.place, self.eps, self.momentum = place, like.eps, like.momentum
        self.counts = (
            like.training
        )  # one whose author has put it into eval mode alone goes by what it has counted before
        self.weight, self.bias = like.weight, like.bias
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, ...) normalised channel by channel."""
        way = under_way() if self.counts else None
        mean, var = self.running_mean, self.running_var
        if way is not None:
            mean, var, count = _moments(x, way.weight)
            unbiased = var * count / (count - 1).clamp(min=1)
            step = self.momentum * (way.weight > 0).any().to(x.dtype)  # of no rows nothing is learnt
            for name, new in (("running_mean", mean), ("running_var", unbiased)):
                at = f"{self.place}.{name}"
                before = way.counted[at] if at in way.counted else getattr(self, name)  # of an earlier call of the pass
                way.counted[at] = torch.lerp(before, new.detach(), step)
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        shift = (0 if self.bias is None else self.bias) - mean * scale
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        return x * scale.view(shape) + shift.view(shape)


def _moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance (C,) of x (B, C, ...) over real rows, and the number of values a channel."""
    each = x.flatten(2) if x.dim() > 2 else x[..., None]
    count = (weight.sum() * each.shape[2]).clamp(min=1)
    real = (weight > 0).view(-1, 1, 1)
    mean = torch.where(real, each, 0.0).sum((0, 2)) / count
    away = torch.where(real, each - mean.view(1, -1, 1), 0.0)
    return mean, away.square().sum((0, 2)) / count, count


class Dropout(nn.Module):
    """torch.nn.Dropout, and with ``channels`` Dropout1d, 2d and 3d, drawing from the key of the pass."""

    def __init__(self, p: float, place: str, channels: bool = False):
        super().__init__()
        self.p, self.place, self.channels = p, place, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return x with entries, or channels (B, C, ...), zeroed and the others scaled up, as it is outside training."""
        way = under_way()
        if way is None or self.p == 0:
            return x
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.channels else tuple(x.shape)
        kept = rng.bernoulli(way.draw(self.place), 1 - self.p, shape)
        return torch.where(kept, x, 0.0) / max(1 - self.p, torch.finfo(x.dtype).tiny)


class Embedding(nn.Embedding):
    """torch.nn.Embedding whose row of padding learns nothing for many clients at once, too, and whose gradient is dense.

    torch.func.vmap forgets ``padding_idx`` where autograd runs beneath it, and knows no sparse gradients.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the numbers (...), (..., D)."""
        found = F.embedding(input, self.weight, None, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        if self.padding_idx is None:
            return found
        return torch.where((input == self.padding_idx)[..., None], found.detach(), found)


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps functions that change the gradients of one tensor."""


def check_hooks(net: nn.Module) -> None:
    """Refuse a net with functions on its parameters, which no copy of a parameter has. Raises ConfigError."""
    for name, p in net.named_parameters():
        if any(getattr(p, where, None) for where in HOOKS):
            raise ConfigError(
                f"net {type(net).__name__}: {name} has a hook, which would be left out where clients have weights of their own: "
                f"multiply by a mask in forward, or set requires_grad=False for what is not to be learnt"
            )


def prepared(net: nn.Module) -> nn.Module:
    """Replace a net's layers of BatchNorm, Dropout, LSTM and the like, under the same names. Raises ConfigError."""
    check_hooks(net)
    if not net.training:
        net.train()
    return _replaced(net, "", {})


def _replaced(layer: nn.Module, place: str, known: dict[int, nn.Module]) -> nn.Module:
    """Return what stands in the place of a layer; one that is there twice is replaced once."""
    if id(layer) not in known:
        known[id(layer)] = layer
        known[id(layer)] = _ours(layer, place)
        for name, below in layer._modules.items():
            if below is not None and known[id(layer)] is layer:
                layer._modules[name] = _replaced(below, f"{place}.{name}" if place else name, known)
    return known[id(layer)]


def _ours(layer: nn.Module, place: str) -> nn.Module:
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return BatchNorm(layer, place)
    if isinstance(layer, nn.Dropout):
        return Dropout(layer.p, place)
    if isinstance(layer, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        return Dropout(layer.p, place, channels=True)
    if isinstance(layer, nn.RNNBase):
        return Recurrent(layer, Dropout(layer.dropout, place))
    if type(layer) is nn.Embedding and (layer.padding_idx is not None or layer.sparse):
        made = Embedding.__new__(Embedding)
        made.__dict__.update(layer.__dict__)
        return made
    if type(layer) in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        return Cell(layer)  # pyright: ignore[reportArgumentType]
    return layer


def learnt(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a net that are learnt, by name."""
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}


def hollow(net: nn.Module) -> nn.Module:
    """Return a net whose own parameters are NaN: it is given others, and one that takes them from elsewhere is found out."""
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.fill_(torch.nan)
    return net


def buffers(net: nn.Module) -> dict[str, Tensor]:
    """Return what a prepared net's layers keep count of, by name."""
    layers = ((name, layer) for name, layer in net.named_modules() if isinstance(layer, BatchNorm) and layer.counts)
    return {f"{name}.{b}": value.detach() for name, layer in layers for b, value in layer.named_buffers()}


def called(
    net: nn.Module,
    parameters: Mapping[str, Tensor],
    counted: Mapping[str, Tensor],
    x: Any,
    *,
    weight: Tensor | None = None,
    key: Key | None = None,
) -> tuple[Any, Tree]:
    """Return a prepared net's outputs, (B, ...) as a rule, and its buffers after that.

    Args:
        net: the net.
        parameters, counted: its parameters and buffers by name.
        x: inputs (B, ...), or whatever the net takes; of one that takes a mask as well, tokens (B, L) and -1 after their end.
        weight: (B,), 0 on padded rows; given, with ``key``, the pass is one of training.
        key: what Dropout draws from.

    """
    given = _everywhere(net, {**_constants(net, parameters), **parameters, **counted})
    if weight is None or key is None:
        with _as_measured(net), _plainly():
            return functional_call(net, given, inputs(net, x), tie_weights=False), counted
    with _training(Pass(weight, key, {}, {})) as way, _plainly():
        outputs = functional_call(net, given, inputs(net, x), tie_weights=False)
    return outputs, {name: way.counted.get(name, old) for name, old in counted.items()}


def _everywhere(net: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name, those that several layers share by the name that each of these has for them.

    A layer that is there under two names has one of them: torch's own ``tie_weights`` gives it both, and after the call puts the
    client's tensor back for the second.
    """
    first: dict[int, str] = {}
    found = dict(given)
    for place, layer in net.named_modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                here = f"{place}.{name}" if place else name
                known = first.setdefault(id(tensor), here)
                if known in given:
                    found[here] = given[known]
    return found


def inputs(net: nn.Module, x: Any) -> tuple[Any, ...]:
    """Return what a net is called with for examples ``x``.

    One whose ``forward(self, tokens, mask)`` asks for a mask gets tokens (B, L) int64, 0 after the end of a text, and where there
    are tokens (B, L) bool; any other gets ``x`` as it is. Raises TypeError for a mask of what are no tokens.
    """
    if not takes_mask(type(net)):
        return (x,)
    if x.is_floating_point():
        raise TypeError(f"a mask is for texts, and examples are {x.dtype}")
    return x.clamp(min=0), x >= 0


@functools.cache
def takes_mask(kind: type[nn.Module]) -> bool:
    """Say whether nets of a class are called with a mask: whether it is what their forward cannot do without besides tokens."""
    asked = [*inspect.signature(kind.forward).parameters.values()][2:3]
    return bool(asked) and asked[0].name == "mask" and asked[0].default is inspect.Parameter.empty


@contextmanager
def weighing(weight: Tensor | None) -> Iterator[None]:
    """Let rows count by these weights (B,) in the layers that are called in training: for nets that add rows on the way."""
    way = under_way()
    if way is None or weight is None:
        yield
        return
    with _training(way._replace(weight=weight)):
        yield


@contextmanager
def _training(way: Pass) -> Iterator[Pass]:
    before, _under.way = _under.way, way
    try:
        yield way
    finally:
        _under.way = before


def _constants(net: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a net has beside its parameters and counts where the parameters are, if the net is elsewhere."""
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    if device.type == "cpu":
        return {}
    placed = _placed.setdefault(net, {})
    if device not in placed:  # once, for a base beside adapters is large
        kept = [*net.named_buffers(), *((name, p) for name, p in net.named_parameters() if not p.requires_grad)]
        placed[device] = {name: value.detach().to(device) for name, value in kept if value.device != device}
    return placed[device]


@contextmanager
def _as_measured(net: nn.Module) -> Iterator[None]:
    """Have the net in its eval mode."""
    training = [layer for layer in net.modules() if layer.training]
    try:
        for layer in training:
            layer.training = False
        yield
    finally:
        for layer in training:
            layer.training = True


FUSED = torch.backends.cuda
"""Where torch keeps which kernels attention may take, those of the CPU too."""


@contextmanager
def _plainly() -> Iterator[None]:
    """Have attention computed by plain operations: torch's fused kernels, and its shortcut for transformers, know no ``vmap``."""
    mha = torch.backends.mha
    before = (
        FUSED.flash_sdp_enabled(),
        FUSED.mem_efficient_sdp_enabled(),
        FUSED.cudnn_sdp_enabled(),
        mha.get_fastpath_enabled(),
    )
    turn = FUSED.enable_flash_sdp, FUSED.enable_mem_efficient_sdp, FUSED.enable_cudnn_sdp, mha.set_fastpath_enabled
    try:
        for each in turn:
            each(False)
        yield
    finally:
        for each, was in zip(turn, before, strict=True):
            each(was)
