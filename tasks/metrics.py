"""Metrics to measure: ours by name, those of torchmetrics and scikit-learn by theirs, functions of one's own.

    torchmetrics:F1Score       a class of torchmetrics: one update with all examples of a split, and compute
    sklearn:balanced_accuracy_score    a function (y_true, y_pred or y_score, ...) of sklearn.metrics, of all of them
    module:name                a function (outputs, y, ...) -> number of one's own

A library's metric is given what it asks for: probabilities, or of scikit-learn's that take ``y_pred`` the likeliest labels; of
numbers the outputs; and of ``task``, ``num_classes``, ``num_labels``, ``labels``, ``multi_class`` what it names and is not given.
Nothing is averaged over batches, and nothing outlives a call. Labels of -100 are left out.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.named import called, found, is_path
from fedfleet.simulator.registry import Options
from fedfleet.tasks.measures import OF_LABELS, OF_NUMBERS, Metric, flat, rows
from fedfleet.tasks.targets import Loss, like

LIBRARIES = {"torchmetrics": "'fedfleet[metrics]'", "sklearn": "scikit-learn"}
"""Top-level modules whose metrics are known, and what installs them."""
LIKELY = ("log_loss", "d2_log_loss_score")
"""Functions of scikit-learn whose ``y_pred`` are probabilities."""
SCORES = ("y_score", "y_prob", "y_proba", "pred_decision")
TRIED = 64  # made-up examples, at most


class MetricOptions(Options):
    """A metric with arguments."""

    name: str = Field(examples=["torchmetrics:F1Score"])
    """torchmetrics:CLASS, sklearn:FUNCTION, or module:name of ``(outputs, y, …) -> number``."""
    arguments: dict[str, Any] | None = None
    """What it is called with."""
    label: str | None = None
    """What it is called among the metrics, ``eval/<label>``; its own name if not given. Less is better of what ends in _loss."""


class Told(NamedTuple):
    """Predictions and what is true of so many examples, as libraries want them.

    ``scores`` (m, C) probabilities of classes, or of yes (m,) or (m, L), or numbers as ``true``; ``kind`` multiclass, binary,
    multilabel or numbers.
    """

    kind: str
    scores: Tensor
    true: Tensor

    @property
    def classes(self) -> int:
        """Return the number of classes, or of labels."""
        return self.scores.shape[1] if self.scores.dim() > 1 else 2

    @property
    def few(self) -> bool:
        """Say whether there are too few examples for every metric to have a value: some class is not there."""
        if self.kind == "numbers":
            return len(self.true) < 2
        each = self.true.flatten(1).unbind(1) if self.kind == "multilabel" else [self.true]
        return any(len(labels.unique()) < (self.classes if self.kind == "multiclass" else 2) for labels in each)


def told(loss: Loss, outputs: Tensor, y: Tensor) -> Told:
    """Return what libraries are told of outputs and labels or targets."""
    if loss.axis is not None:
        outputs, y = flat(loss, outputs, y)
        return Told("multiclass", outputs.softmax(1), y)
    scores = like(outputs, y).double()
    if not loss.binary:
        return Told("numbers", scores, y.double())
    scores, yes = (scores, y) if y.dim() == 1 else (scores.flatten(1), y.flatten(1))
    return Told("binary" if y.dim() == 1 else "multilabel", scores.sigmoid(), (yes > 0.5).long())


def made_up(like_this: Told) -> Told:
    """Return a few predictions of the same kind, in which every class is there, if there are not too many."""
    n, shape = max(4, min(2 * like_this.classes, TRIED)), like_this.scores.shape[1:]
    order = torch.arange(n)
    spread = (torch.arange(n * math.prod(shape), dtype=torch.float64).view(n, *shape) * 0.618) % 1
    if like_this.kind == "multiclass":
        true = order % like_this.classes
        scores = spread.clone()
        scores[order, true] += (order % 3 > 0).double()
        return Told("multiclass", scores / scores.sum(1, keepdim=True), true)
    if like_this.kind == "numbers":
        return Told("numbers", 1 + spread, 1 + (spread + spread.square()) / 2)
    true = ((order.view(-1, *(1 for _ in shape)) + torch.arange(math.prod(shape)).view(shape)) % 2).expand(n, *shape)
    return Told(like_this.kind, 0.3 * spread + 0.5 * true, true.contiguous())


class Library(NamedTuple):
    """A metric of a library, as a ``Metric``: what messages call it and its arguments, and what it is."""

    said: str
    key: str
    make: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self, loss: Loss, outputs: Tensor, y: Tensor) -> float:
        """Return the metric of all examples; NaN where it has none, since a class is not among them."""
        return self.of(told(loss, outputs, y))

    def of(self, x: Told) -> float:
        """Return the metric of what is told. Raises ConfigError where it takes no such thing, or is not one number."""
        try:
            with warnings.catch_warnings(action="ignore"):
                value = self._torchmetrics(x) if isinstance(self.make, type) else self._sklearn(x)
        except ConfigError:
            raise
        except Exception as e:
            if x.few:
                return math.nan
            raise ConfigError(
                f"{self.said}: of {x.kind} it fails ({type(e).__name__}: {one_line(e)[:200]}): give it other arguments, or "
                f"leave it out"
            ) from None
        number = value.numel() == 1 if isinstance(value, Tensor) else np.ndim(value) == 0
        if not number or isinstance(value, str | bytes | dict):
            raise ConfigError(
                f"{self.said}: it gives a {type(value).__name__}, and a metric is one number: give it other arguments, such as "
                f"average: macro, or leave it out"
            )
        return float(value)

    def higher_is_better(self, x: Told) -> bool | None:
        """Return what torchmetrics says of it; None where it says nothing."""
        return self._made(x).higher_is_better if isinstance(self.make, type) else None

    def _made(self, x: Told) -> Any:
        offered: dict[str, Any] = {} if x.kind == "numbers" else {"task": x.kind}
        offered |= {"multiclass": {"num_classes": x.classes}, "multilabel": {"num_labels": x.classes}}.get(x.kind, {})
        made = called(self.said, self.key, self.make, self.arguments, **offered)
        self._check_used(type(made))
        return made.set_dtype(torch.float64)

    def _check_used(self, made: type) -> None:
        """Refuse what torchmetrics would drop: its classes take arguments of every kind. Raises ConfigError."""
        if made is self.make:  # named by itself, and not by a ``task``
            return
        known, taken = inspect.signature(self.make.__new__).parameters, inspect.signature(made).parameters
        if dropped := [key for key in self.arguments if key in known and key not in {"task", *taken}]:
            raise ConfigError(
                f"{self.key}.{dropped[0]}={self.arguments[dropped[0]]!r}: {made.__name__}, which it is here, takes none, and "
                f"torchmetrics would drop it unsaid: leave it out, or name a metric of sklearn"
            )

    def _torchmetrics(self, x: Told) -> Any:
        made = self._made(x)
        scores = x.scores
        if x.kind == "multiclass" and x.classes == 2 and type(made).__name__.startswith("Binary"):
            scores = scores[:, 1]
        made.update(scores, x.true)
        return made.compute()

    def _sklearn(self, x: Told) -> Any:
        _, second, *others = inspect.signature(self.make).parameters
        scored = second in SCORES or getattr(self.make, "__name__", "") in LIKELY
        scores = x.scores
        offered: dict[str, Any] = {}
        if x.kind == "multiclass" and not scored:
            scores = scores.argmax(1)
        elif x.kind == "multiclass":
            offered = {"labels": np.arange(x.classes)} if "labels" in others else {}
            if x.classes == 2:
                scores = scores[:, 1]
            elif "multi_class" in others:
                offered["multi_class"] = "ovr"
        elif x.kind != "numbers" and not scored:
            scores = (scores > 0.5).long()
        given = partial(self.make, rows(x.true), rows(scores))
        return called(self.said, self.key, given, self.arguments, **offered)


def is_library(name: str) -> bool:
    """Say whether a metric is named as a library's."""
    return is_path(name) and name.partition(":")[0].partition(".")[0] in LIBRARIES


def of_library(said: str, key: str, name: str, arguments: Mapping[str, Any]) -> Library:
    """Return the metric that ``torchmetrics:CLASS`` or ``sklearn:FUNCTION`` is. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    top = module.partition(".")[0]
    try:
        library: Any = importlib.import_module("sklearn.metrics" if module == "sklearn" else module)
    except ImportError as e:
        if e.name not in (None, top):
            raise ConfigError(
                f"{said}: there is no module {e.name!r}: leave it out, or name one that there is"
            ) from None
        raise ConfigError(f"{said}: {top} is not installed: pip install {LIBRARIES[top]}, or leave it out") from None
    result: Any = library
    for part in attribute.split("."):
        result = getattr(result, part, None)
    fits = _is_metric if top == "torchmetrics" else _is_function
    if not fits(result):
        there = [n for n in dir(library) if fits(getattr(library, n, None))]
        near = difflib.get_close_matches(attribute, there, n=1, cutoff=0.4)
        hint = f"did you mean {module}:{near[0]}?" if near else "look it up there, or leave it out"
        what = "a class with update and compute" if top == "torchmetrics" else "a function of y_true and predictions"
        raise ConfigError(f"{said}: {library.__name__} has no such metric, {what}: {hint}")
    return Library(said, key, result, arguments)


def _is_metric(x: Any) -> bool:
    return isinstance(x, type) and all(callable(getattr(x, name, None)) for name in ("update", "compute", "set_dtype"))


def _is_function(x: Any) -> bool:
    if not inspect.isfunction(x):
        return False
    first, second = [*inspect.signature(x).parameters, "", ""][:2]
    return (first, second) in [("y1", "y2"), *(("y_true", name) for name in ("y_pred", *SCORES))]


def named_by_path(metrics: Iterable[str | MetricOptions] | None) -> dict[str, str]:
    """Return what metrics are named by a path to code of one's own, by key."""
    every = {f"metrics.{i}": m if isinstance(m, str) else m.name for i, m in enumerate(metrics or ())}
    return {key: name for key, name in every.items() if is_path(name) and not is_library(name)}


def chosen(given: Iterable[Any], loss: Loss, key: str, taken: Iterable[str] = ("loss",)) -> dict[str, Metric]:
    """Return metrics by what they are called.

    Each is a name, a mapping of that and ``arguments``, a function, or a pair of what it is called and one of these. ``key`` begins
    messages, ``taken`` are metrics that there are anyhow. Raises ConfigError.
    """
    metrics: dict[str, Metric] = {}
    for i, each in enumerate([given] if isinstance(given, str) else given):
        called_as, f = each if isinstance(each, tuple) else (None, each)
        arguments: Mapping[str, Any] = {}
        if isinstance(f, Mapping):
            try:
                f = MetricOptions(**f)
            except (TypeError, ValueError) as e:
                raise ConfigError(
                    f"{key}metrics[{i}]={each!r}: {one_line(e)}: give name, arguments and label"
                ) from None
        if isinstance(f, MetricOptions):
            called_as, arguments, f = called_as or f.label, f.arguments or {}, f.name
        name, metric = _one(f, arguments, loss, key, i)
        name = called_as or name
        if name in metrics or name in taken:
            raise ConfigError(
                f"{key}metrics: {name!r} is there twice: leave one out, or give it a label ({', '.join(taken)} is always measured)"
            )
        metrics[name] = metric
    return metrics


def _one(f: Any, arguments: Mapping[str, Any], loss: Loss, key: str, i: int) -> tuple[str, Metric]:
    """Return a metric and what it is called if nothing is said. Raises ConfigError."""
    said, of = f"{key}metrics={f!r}", f"{key}metrics.{i}.arguments"
    if isinstance(f, str) and is_library(f):
        return f.rpartition(":")[2].rpartition(".")[2], of_library(said, of, f, arguments)
    if isinstance(f, str) and is_path(f):
        f = found(f"{key}metrics.{i}", f)
    if not isinstance(f, str):
        if not callable(f):
            raise ConfigError(f"{said}: give a name or a function (outputs, y) -> number")
        return getattr(f, "__name__", str(f)), _own(f, said, of, arguments)
    numbers = loss.axis is None and not loss.binary
    known = {**OF_LABELS, **OF_NUMBERS} if loss.own is not None else OF_NUMBERS if numbers else OF_LABELS
    if f not in known:
        near = difflib.get_close_matches(f, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{said}: none that goes with loss={loss.name}; {hint}choose among {', '.join(known)}, torchmetrics:CLASS, "
            f"sklearn:FUNCTION, or a function (outputs, y) -> number"
        )
    if arguments:
        raise ConfigError(
            f"{of}={dict(arguments)!r}: {f} takes none: leave them out, or name one of sklearn or torchmetrics"
        )
    return f, known[f]


def _own(f: Callable[..., Any], said: str, key: str, arguments: Mapping[str, Any]) -> Metric:
    if not arguments:
        return lambda loss, outputs, y: f(outputs, y)
    return lambda loss, outputs, y: called(said, key, partial(f, outputs, y), arguments)
