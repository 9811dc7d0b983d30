"""Metrics by name, of all examples of a split: ``(loss, outputs, y) -> number``; NaN where there is none, as AUC of one class.

accuracy            of labels
f1                  of labels, the mean over classes (macro); of a single yes or no its own
auc                 of labels, each class against the rest
mse, rmse, mae, r2  of numbers
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfleet.tasks.targets import IGNORED, Loss, each_example, hard, hits, like

Metric = Callable[[Loss, Tensor, Tensor], float]


def flat(loss: Loss, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs (m, C) and labels (m,) that count; of yes or no, outputs and labels (B, ...) alike."""
    if loss.axis is None:
        return like(outputs, y).double(), y
    y = hard(loss, y)
    kept = y.flatten() != IGNORED
    outputs = outputs.movedim(loss.axis, -1)
    return outputs.reshape(-1, outputs.shape[-1])[kept].double(), y.flatten()[kept]


def _accuracy(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    right, y = hits(loss, outputs, y).double(), hard(loss, y)
    return float(right[y != IGNORED].mean() if loss.axis is not None else right.mean())


def _difference(outputs: Tensor, y: Tensor) -> Tensor:
    return like(outputs, y).double() - y.double()


def _mse(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    return float(_difference(outputs, y).square().mean())


def _rmse(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    return math.sqrt(_mse(loss, outputs, y))


def _mae(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    return float(_difference(outputs, y).abs().mean())


def rows(values: Tensor) -> Any:
    """Return numbers as scikit-learn wants them, (m,) or (m, n)."""
    return (values if values.dim() == 1 else values.flatten(1)).numpy()


def _r2(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    from sklearn.metrics import r2_score

    return _or_nan(lambda: r2_score(rows(y.double()), rows(like(outputs, y).double())))


def _f1(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    from sklearn.metrics import f1_score

    score: Any = partial(f1_score, zero_division=0)  # pyright: ignore[reportArgumentType]
    outputs, y = flat(loss, outputs, y)
    if loss.axis is not None:
        return _or_nan(lambda: score(y.numpy(), outputs.argmax(1).numpy(), average="macro"))
    guess, true = rows((outputs > 0).long()), rows((y > 0.5).long())
    return _or_nan(lambda: score(true, guess, average="binary" if true.ndim == 1 else "macro"))


def _auc(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    outputs, y = flat(loss, outputs, y)
    if loss.axis is None:
        return _or_nan(lambda: roc_auc_score(rows((y > 0.5).long()), rows(outputs)))
    likely, true = outputs.softmax(1).numpy(), y.numpy()
    if likely.shape[1] == 2:
        return _or_nan(lambda: roc_auc_score(true, likely[:, 1]))
    return _or_nan(lambda: roc_auc_score(true, likely, multi_class="ovr", labels=np.arange(likely.shape[1])))


def _or_nan(compute: Callable[[], Any]) -> float:
    try:
        with warnings.catch_warnings(action="ignore"):
            return float(compute())
    except ValueError:  # as where all examples are of one class
        return math.nan


OF_LABELS: dict[str, Metric] = {"accuracy": _accuracy, "f1": _f1, "auc": _auc}
OF_NUMBERS: dict[str, Metric] = {"mse": _mse, "rmse": _rmse, "mae": _mae, "r2": _r2}


def mean_loss(loss: Loss, outputs: Tensor, y: Tensor) -> float:
    """Return the mean loss of the examples."""
    with torch.no_grad():
        return loss.mean(outputs, y)


def alone(name: str, loss: Loss, outputs: Tensor, y: Tensor) -> Tensor | None:
    """Return a metric of each example (B,), where it is a mean over examples; None for others."""
    if name == "accuracy":
        right = hits(loss, outputs, y)
        if loss.axis is None or right.dim() == 1:
            return each_example(right)
        counted = (hard(loss, y) != IGNORED).to(right.dtype).flatten(1)
        return (right.flatten(1) * counted).sum(1) / counted.sum(1).clamp(min=1)
    away = like(outputs, y) - y if name in ("mse", "mae") else None
    return None if away is None else each_example(away.square() if name == "mse" else away.abs())
