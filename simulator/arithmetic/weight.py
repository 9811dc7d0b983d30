"""Parameters that stand in for tensors inside a loss, and hand the products with them to whoever computes these.

A network's parameter is replaced by a ``Weight``. Where the network calls ``F.linear`` or ``F.conv2d`` on it, its ``Multiplied``
computes the product for all lanes at once. Any other use of the parameter raises ``NotLinear``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedfleet.simulator.arithmetic import vmap_internals
from fedfleet.simulator.arithmetic.convolution import Geometry
from fedfleet.simulator.arithmetic.factored import METADATA, named


class NotLinear(Exception):
    """A parameter is used in another way than as the weight of a linear layer or a convolution."""

    def __init__(self, index: int, operation: str):
        super().__init__(operation)
        self.index, self.operation = index, operation


class Multiplied:
    """What a network multiplies its inputs with.

    Attributes:
        index: which leaf of ``z`` the parameter is.
        shell: a tensor of the parameter's shape, dtype and device that takes no memory.
        lanes: how many ``vmap`` runs side by side.
        tap: a zero that every product of a trained parameter depends on, so that the backward pass comes by.

    """

    def __init__(self, index: int, shell: Tensor, lanes: int, trained: bool):
        self.index, self.shell, self.lanes = index, shell, lanes
        self.tap = torch.zeros((), dtype=shell.dtype, device=shell.device, requires_grad=trained)

    def product(self, x: Tensor, geometry: Geometry | None) -> Tensor:
        """Return the products with the inputs of all lanes (lanes, ...), convolutions where there is a geometry."""
        raise NotImplementedError


class Weight(Tensor):
    """A parameter inside a loss: a tensor by its shape, a layer by its content."""

    layer: Multiplied

    @staticmethod
    def of(layer: Multiplied) -> Weight:
        """Stand in for a parameter."""
        new = layer.shell.as_subclass(Weight)
        new.layer = layer
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = named(func), kwargs or {}
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "linear":
            return _linear(*args, **kwargs)
        if name == "conv2d":
            return _conv2d(*args, **kwargs)
        raise NotLinear(_among(args, kwargs).layer.index, name)


def _among(*given: Any) -> Weight:
    """Return a parameter among arguments, also one in a list of them."""
    return next(a for a in tree_leaves(given) if isinstance(a, Weight))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_bias(bias)
    out = _product(weight, input, None)
    return out if bias is None else out + bias


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    _check_bias(bias)
    if input.dim() != 4:
        raise NotLinear(_among(weight, input).layer.index, "conv2d of one image")
    if isinstance(padding, str):
        raise NotLinear(_among(weight, input).layer.index, f"conv2d with padding={padding!r}")
    out = _product(weight, input, Geometry(_two(stride), _two(padding), _two(dilation), groups))
    return out if bias is None else out + bias[:, None, None]


def _two(x: Any) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else tuple(x)


def _check_bias(bias: Tensor | None) -> None:
    if isinstance(bias, Weight):
        raise NotLinear(bias.layer.index, "use as a bias")


def _product(weight: Tensor, input: Tensor, geometry: Geometry | None) -> Tensor:
    if not isinstance(weight, Weight) or isinstance(input, Weight):
        raise NotLinear(_among(input, weight).layer.index, "use as an input")
    layer = weight.layer
    if vmap_internals.differentiated():
        raise NotLinear(layer.index, "use under torch.func's derivatives")
    x, batched = vmap_internals.lower(input)
    with vmap_internals.beneath():
        if not batched:  # inputs that all lanes share
            x = x.expand(layer.lanes, *x.shape)
        out = layer.product(x, geometry)
    return vmap_internals.lift(out)
