"""Nets whose layers keep count of something, draw, or are one call of torch's: BatchNorm, Dropout, LSTM as pure functions.

``prepared`` has layers computed by classes of ours, ``called`` runs such a net. What BatchNorm counts comes in as a tree and
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
from torch.nn.parameter import is_lazy

from fedfleet.simulator.author import ConfigError, Key, Tree, rng
from fedfleet.tasks.recurrent import Cell, Layers

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


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d: normalises by the statistics of the real rows, or by running ones outside training.

    One that is in eval mode alone goes by what it has counted before. A batch of one value a channel has no variance: it becomes
    the bias, where torch refuses it. One without any real row leaves the running statistics as they are.
    """

    _place: str

    def forward(self, input: Tensor) -> Tensor:
        """Return the input (B, C, ...) normalised channel by channel."""
        way = under_way() if self.training else None
        mean, var = self.running_mean, self.running_var
        assert mean is not None  # `_swap` has seen to it
        assert var is not None
        if way is not None:
            assert self.momentum is not None
            mean, var, count = _moments(input, way.weight)
            unbiased = var * count / (count - 1).clamp(min=1)
            step = self.momentum * (way.weight > 0).any().to(input.dtype)  # of no rows nothing is learnt
            for name, new in (("running_mean", mean), ("running_var", unbiased)):
                at = f"{self._place}.{name}"
                before = way.counted[at] if at in way.counted else getattr(self, name)  # of an earlier call of the pass
                way.counted[at] = torch.lerp(before, new.detach(), step)
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        shift = (0 if self.bias is None else self.bias) - mean * scale
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        return input * scale.view(shape) + shift.view(shape)


def _moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance (C,) of x (B, C, ...) over real rows, and the number of values a channel."""
    each = x.flatten(2) if x.dim() > 2 else x[..., None]
    count = (weight.sum() * each.shape[2]).clamp(min=1)
    real = (weight > 0).view(-1, 1, 1)
    mean = torch.where(real, each, 0.0).sum((0, 2)) / count
    away = torch.where(real, each - mean.view(1, -1, 1), 0.0)
    return mean, away.square().sum((0, 2)) / count, count


def dropped(x: Tensor, p: float, place: str, shape: tuple[int, ...]) -> Tensor:
    """Return x with entries zeroed and the others scaled up, as it is outside training; masks are of ``shape``."""
    way = under_way()
    if way is None or p == 0:
        return x
    kept = rng.bernoulli(way.draw(place), 1 - p, shape)
    return torch.where(kept, x, 0.0) / max(1 - p, torch.finfo(x.dtype).tiny)


class Dropout(nn.Dropout):
    """torch.nn.Dropout, drawing from the key of the pass."""

    _place: str

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with entries zeroed in training."""
        return dropped(input, self.p, self._place, tuple(input.shape)) if self.training else input


class ChannelDropout(nn.modules.dropout._DropoutNd):
    """torch.nn.Dropout1d, 2d and 3d, drawing from the key of the pass."""

    _place: str

    def forward(self, input: Tensor) -> Tensor:
        """Return the input (B, C, ...) with channels zeroed in training."""
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
        return dropped(input, self.p, self._place, shape) if self.training else input


class Recurrent(Layers):
    """torch.nn.RNN, LSTM and GRU, whose dropout draws from the key of the pass."""

    _place: str

    def between(self, x: Tensor) -> Tensor:
        """Return what the next layer is given of the outputs of one."""
        return dropped(x, self.dropout, self._place, tuple(x.shape)) if self.training else x


class Embedding(nn.Embedding):
    """torch.nn.Embedding whose row of padding learns nothing for many clients at once, too.

    torch.func.vmap forgets ``padding_idx`` where autograd runs beneath it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the numbers (...), (..., D)."""
        result = F.embedding(input, self.weight, None, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        if self.padding_idx is None:
            return result
        return torch.where((input == self.padding_idx)[..., None], result.detach(), result)


OURS: dict[type, type[nn.Module]] = {
    nn.modules.batchnorm._BatchNorm: BatchNorm,
    nn.SyncBatchNorm: type("SyncBatchNorm", (BatchNorm, nn.SyncBatchNorm), {}),
    nn.Dropout: Dropout,
    nn.Embedding: Embedding,
    **{kind: type(kind.__name__, (ChannelDropout, kind), {}) for kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)},
    **{kind: type(kind.__name__, (Recurrent, kind), {}) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
    **{kind: type(kind.__name__, (Cell, kind), {}) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)},
}
"""What computes a layer here, by the class of torch's that would."""


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps functions that change the gradients of one tensor."""


def check_parameters(net: nn.Module) -> None:
    """Refuse parameters with functions or memory that no copy of theirs has. Raises ConfigError."""
    said, at = f"net {type(net).__name__}", dict[int, str]()
    for name, p in net.named_parameters():
        if any(getattr(p, where, None) for where in HOOKS):
            raise ConfigError(
                f"{said}: {name} has a hook, which would be left out where clients have weights of their own: "
                f"multiply by a mask in forward, or set requires_grad=False for what is not to be learnt"
            )
        if is_lazy(p) or p.is_meta or not p.numel():
            continue
        if (other := at.setdefault(p.data_ptr(), name)) != name:
            raise ConfigError(
                f"{said}: {name} lies in the memory of {other}, and clients' weights are apart: make both one parameter, as by "
                f"b.weight = a.weight in the place of b.weight.data = a.weight.data"
            )


def prepared(net: nn.Module) -> nn.Module:
    """Have BatchNorm, Dropout, LSTM and the like in a net computed by the classes above. Raises ConfigError.

    Each layer stays what it is, with its name, hooks, flags and attributes, and of a class of somebody's own its ``forward``.
    """
    check_parameters(net)
    if not net.training:
        net.train()
    for place, layer in net.named_modules():
        _swap(layer, place)
    return net


def _swap(layer: nn.Module, place: str) -> None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        layer.sparse = False  # the same gradient, which vmap knows
    kind = type(layer)
    theirs = next((base for base in kind.__mro__ if base in OURS), None)
    if theirs is None or issubclass(kind, OURS[theirs]):
        return
    norm = layer if isinstance(layer, nn.modules.batchnorm._BatchNorm) else None
    if norm is not None and (norm.running_mean is None or (norm.momentum is None and norm.training)):
        raise ConfigError(f"net: {place}: give BatchNorm a momentum, and let it track running statistics")
    # A class of somebody's own comes before ours, and ours before torch's, where super() looks for what is next.
    layer.__class__ = OURS[theirs] if kind is theirs else type(kind.__name__, (kind, OURS[theirs]), {})
    layer.__dict__["_place"] = place


def trainable(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a net that are learnt, by name."""
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}


def hollow(net: nn.Module) -> nn.Module:
    """Return a net whose own parameters are NaN: it is given others, and one that takes them from elsewhere is found out."""
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.fill_(torch.nan)
    return net


COUNTED = ("running_mean", "running_var")


def buffers(net: nn.Module) -> dict[str, Tensor]:
    """Return what a prepared net's layers keep count of, by name."""
    layers = ((name, layer) for name, layer in net.named_modules() if isinstance(layer, BatchNorm) and layer.training)
    return {f"{name}.{b}": getattr(layer, b).detach() for name, layer in layers for b in COUNTED}


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
    result = dict(given)
    for place, layer in net.named_modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                here = f"{place}.{name}" if place else name
                known = first.setdefault(id(tensor), here)
                if known in given:
                    result[here] = given[known]
    return result


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
