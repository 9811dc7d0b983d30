"""Torch's own losses: modules such as ``nn.CrossEntropyLoss()``, and functions of ``torch.nn.functional``.

They are taken apart into the loss l_i of each example and c_i, what it counts. A batch comes to what torch's reduction does:

    mean       sum_i c_i l_i / sum_i c_i; c_i is the sum of the class weights of the example's labels without ``ignore_index``
    sum        sum_i l_i, l_i the sum over the example's own values
    batchmean  the mean of such sums
    none       the mean over examples of the mean of each one's values

A batch of which nothing counts has a loss of 0, where torch's is NaN. Over clients, models count as the algorithm weighs clients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.overrides import TorchFunctionMode

from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.targets import IGNORED, Loss, each_example, like, summed


class Kind(NamedTuple):
    """Which labels a loss is of: the axis of the outputs that is that of classes, if there is one, or yes and no."""

    axis: int | None = None
    metrics: tuple[str, ...] = ()
    binary: bool = False
    of_indices: bool = False
    """Targets stay integers, and outputs keep their shape."""


CLASSES = Kind(1, ("accuracy",), of_indices=True)
YES_OR_NO = Kind(None, ("accuracy",), binary=True)
NUMBERS = Kind(None, ("mae", "r2"))
OTHERS = Kind()
KINDS = {
    "cross_entropy": CLASSES,
    "nll_loss": CLASSES,
    "multi_margin_loss": CLASSES,
    "binary_cross_entropy_with_logits": YES_OR_NO,
    "multilabel_soft_margin_loss": YES_OR_NO,
    "mse_loss": NUMBERS,
    "l1_loss": NUMBERS,
    "smooth_l1_loss": NUMBERS,
    "huber_loss": NUMBERS,
    "poisson_nll_loss": NUMBERS,
    "binary_cross_entropy": OTHERS,
    "kl_div": OTHERS,
    "soft_margin_loss": OTHERS,
    "hinge_embedding_loss": OTHERS,
    "multilabel_margin_loss": Kind(of_indices=True),
}
"""Functions of ``torch.nn.functional`` of outputs and targets."""
MODULES = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.MultiMarginLoss: "multi_margin_loss",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
    nn.MultiLabelSoftMarginLoss: "multilabel_soft_margin_loss",
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.HuberLoss: "huber_loss",
    nn.PoissonNLLLoss: "poisson_nll_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.KLDivLoss: "kl_div",
    nn.SoftMarginLoss: "soft_margin_loss",
    nn.HingeEmbeddingLoss: "hinge_embedding_loss",
    nn.MultiLabelMarginLoss: "multilabel_margin_loss",
}
OWN_NAMES = {getattr(F, name): name for name in KINDS}
REDUCTION = ("size_average", "reduce", "reduction")


def from_torch(f: Any) -> Loss | None:
    """Return one of torch's losses, with its options; None for anything else. Raises ConfigError for one of other inputs."""
    if isinstance(f, type) and issubclass(f, _Loss):
        f = f()
    if isinstance(f, _Loss):
        if type(f) in MODULES:
            name = MODULES[type(f)]
            names = [
                n for n in inspect.signature(getattr(F, name)).parameters if n not in ("input", "target", *REDUCTION)
            ]
            return _loss(name, {n: getattr(f, n) for n in names if hasattr(f, n)}, f.reduction)
        if type(f).__module__ == _Loss.__module__:
            raise ConfigError(
                f"loss={type(f).__name__}: it takes more than outputs and targets: give a function (outputs, y) -> (B, ...)"
            )
        return None
    function = f.func if isinstance(f, functools.partial) and not f.args else f
    if not callable(function) or getattr(function, "__hash__", None) is None or function not in OWN_NAMES:
        return None
    given = dict(f.keywords) if isinstance(f, functools.partial) else {}
    return _loss(OWN_NAMES[function], given, given.pop("reduction", "mean"))


class _Asked(TorchFunctionMode):
    """Notes which of torch's losses a function asks for, and whether it does anything else with outputs or targets."""

    def __init__(self, outputs: Tensor, y: Tensor):
        super().__init__()
        self.given, self.result = (outputs, y), torch.zeros(())
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.otherwise = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        of_loss = func in OWN_NAMES and len(args) == 2 and all(a is b for a, b in zip(args, self.given, strict=True))
        if of_loss:
            self.calls.append((OWN_NAMES[func], dict(options)))
            return self.result
        watched = (*self.given, self.result)
        self.otherwise |= any(x is one for x in (*args, *options.values()) for one in watched)
        return func(*args, **options)


def wrapped(f: Any) -> Loss | None:
    """Return the one loss of torch that a function ``(outputs, y)`` does nothing but call, with its options; None for others.

    It is asked with several labels: options that depend on them make it a function of one's own.
    """
    asked = []
    for y in ([0, 0], [1, 1, 0], [1]):
        target = torch.tensor(y)
        mode = _Asked(torch.zeros(len(y), 2), target)
        try:
            with mode:
                result = f(*mode.given)
        except Exception:
            return None
        if result is not mode.result or mode.otherwise or len(mode.calls) != 1:
            return None
        asked += mode.calls
    name, options = asked[0]
    if not all(other == name and _alike(options, given) for other, given in asked):
        return None
    defaults = {n: p.default for n, p in inspect.signature(getattr(F, name)).parameters.items()}
    if any(options.pop(n, None) is not None for n in REDUCTION[:2]):
        return None
    reduction = options.pop("reduction", "mean")
    given = {n: v for n, v in options.items() if isinstance(v, Tensor) or v != defaults[n]}
    return _loss(name, given, reduction)


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(v, other[n])
        if isinstance(v, Tensor) and isinstance(other[n], Tensor)
        else v is other[n] or v == other[n]
        for n, v in one.items()
    )


def _loss(name: str, options: Mapping[str, Any], reduction: str) -> Loss:
    kind, function = KINDS[name], getattr(F, name)
    plain = name == "cross_entropy" and options.get("weight") is None and not options.get("label_smoothing")
    weight, ignored = options.get("weight"), options.get("ignore_index", IGNORED)

    def values(outputs: Tensor, y: Tensor) -> Tensor:
        given = {k: v.to(outputs) if isinstance(v, Tensor) else v for k, v in options.items()}
        if plain and not y.is_floating_point():  # under vmap far cheaper than torch's own
            there = y != ignored
            return -F.log_softmax(outputs, 1).gather(1, torch.where(there, y, 0).unsqueeze(1)).squeeze(1) * there
        if kind.of_indices:
            return function(outputs, y, **given, reduction="none")
        outputs = like(outputs, y)
        return function(outputs, y.to(outputs.dtype), **given, reduction="none")

    def counts(y: Tensor) -> Tensor:
        there = y != ignored
        if weight is None:
            return summed(there.double())
        return summed(weight.to(y.device).double()[torch.where(there, y, 0)] * there)

    def each(outputs: Tensor, y: Tensor) -> Tensor:
        result = values(outputs, y)
        if in_all:
            return summed(result)
        if not of_labels or y.is_floating_point():
            return each_example(result)
        of = counts(y).to(result.dtype)
        return torch.where(of > 0, summed(result) / torch.where(of > 0, of, 1.0), 0.0)

    of_labels = name in ("cross_entropy", "nll_loss") and reduction == "mean"
    in_all = reduction in ("sum", "batchmean")
    return Loss(
        name,
        each,
        kind.axis,
        kind.metrics,
        kind.binary,
        soft=name == "cross_entropy",
        counts=counts if of_labels and (weight is not None or "ignore_index" in options) else None,
        weighted=of_labels and weight is not None,
        total=reduction == "sum",
        ignored=ignored,
    )
