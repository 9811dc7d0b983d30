"""Losses by name, of each example, and what metrics may be said of them.

    cross_entropy        outputs (B, C, ...), labels (B, ...) int64: one label an example, or one a pixel
    token_cross_entropy  outputs (B, T, V), labels (B, T) int64: one label a token
    bce_with_logits      outputs and labels of one shape (B, ...), labels 0 or 1, or between: one yes or no each
    mse, mae, huber      outputs and targets of one shape (B, ...)

An example's loss is the mean over its labels or targets; a label -100 counts for nothing. Outputs (B, 1) go with targets (B,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfleet.simulator.author import Batch

IGNORED = -100
Each = Callable[[Tensor, Tensor], Tensor]


class Loss(NamedTuple):
    """A loss: of each example (B,), which axis of the outputs is that of classes, what is measured if nothing is said."""

    name: str
    each: Each
    axis: int | None = None
    metrics: tuple[str, ...] = ()
    binary: bool = False
    own: Each | None = None
    """An author's function, of which only outputs and targets tell what it is of."""
    soft: bool = False
    """Targets may be probabilities of the classes, of the outputs' shape."""
    counts: Callable[[Tensor], Tensor] | None = None
    """How much each example counts in a mean (B,), by the labels; None: 1."""
    weighted: bool = False
    """Examples count by the weights of their classes."""
    total: bool = False
    """A batch's loss is the sum over examples, in the place of their mean."""
    ignored: int = IGNORED
    """The label that counts for nothing."""

    def of_batch(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of the rows of a batch that count."""
        each, counts = self.each(outputs, batch.y), self._counts(batch.y)
        if self.total:
            return batch.mean(each) * batch.count()
        if counts is None:
            return batch.mean(each)
        counts = counts.to(each.dtype)
        of = batch.mean(counts)
        return torch.where(of > 0, batch.mean(each * counts) / torch.where(of > 0, of, 1.0), 0.0)

    def mean(self, outputs: Tensor, y: Tensor) -> float:
        """Return the mean loss of examples."""
        each = self.each(outputs, y).double()  # after it, as it is in training: a loss may hold weights of float32
        counts = self._counts(y)
        if counts is None:
            return float(each.mean())
        return float((each * counts.double()).sum() / counts.double().sum())

    def _counts(self, y: Tensor) -> Tensor | None:
        """Return how much each example counts; None where all count 1, as those do whose targets are probabilities."""
        return None if self.counts is None or (self.soft and y.is_floating_point()) else self.counts(y)

    def misfit(self, outputs: Tensor, y: Tensor) -> str | None:
        """Return what is wrong, and the mend, with outputs and labels or targets of the same few examples; None if they fit."""
        have, got = f"outputs of shape {tuple(outputs.shape)}", f"{_called(y)} of shape {tuple(y.shape)}"
        if self.own is not None:
            return self._of_ones_own(self.own, outputs, y)
        if self.soft and y.is_floating_point() and outputs.shape == y.shape:
            return None
        if self.axis is None:
            wanted = like(outputs, y)
            if wanted.shape == y.shape:
                return None
            classes = (
                ", and cross_entropy takes labels of classes"
                if outputs.dim() == y.dim() + 1 and got.startswith("l")
                else ""
            )
            return f"it has {have} for {got}: {self.name} wants both alike{classes}"
        if y.is_floating_point():
            return f"{self.name} is of labels, and the data have {got}: choose mse, or give integers from 0"
        wanted = outputs.movedim(self.axis, -1).shape[:-1] if outputs.dim() > 1 else ()
        if wanted == y.shape:
            most = outputs.shape[self.axis] - 1  # labels beyond it are refused once all are known
            self.each(outputs, y.clamp(0, most))  # with options of its own, such as weights of as many classes
            return None
        shape = ", ".join(map(str, y.shape))
        fix = f"(examples, classes{', …' * (y.dim() > 1)})" if self.axis == 1 else "(examples, tokens, words)"
        return f"it has {have} for {got}: {self.name} of labels ({shape}) wants {fix}"

    def astray(self, outputs: Tensor, y: Tensor) -> str | None:
        """Return which of all labels (n, ...) there cannot be, with outputs of this shape, and the mend; None if there is none."""
        if self.axis is not None and not y.is_floating_point():
            most = outputs.shape[self.axis]
            bad = ((y < 0) | (y >= most)) & (y != self.ignored)
            if bad.any():
                top, few = int(y[bad].max()), "1 output" if most == 1 else f"{most} outputs"
                if int(y[bad].min()) < 0:
                    return (
                        f"there is a label {int(y[bad].min())}, and labels go from 0 to {most - 1}: number them from 0"
                    )
                binary = ", or take loss=bce_with_logits" if (most, top) == (1, 1) else ""
                return f"there is a label {top}, and the net has {few}: end it in {top + 1} or more{binary}"
        elif self.binary:
            bad = (y < 0) | (y > 1)
            if bad.any():
                return f"there is a label {float(y[bad][0]):g}: {self.name} takes labels from 0 to 1"
        if y.is_floating_point() and not y.isfinite().all():
            row = int((~y.isfinite()).reshape(len(y), -1).any(1).long().argmax())
            return f"row {row} has a target that is no finite number: mend it, or leave the row out"
        return None

    def _of_ones_own(self, f: Callable[[Tensor, Tensor], Any], outputs: Tensor, y: Tensor) -> str | None:
        with torch.enable_grad():
            result = f(outputs.detach().clone().requires_grad_().clone(), y)
        if isinstance(result, Tensor) and result.is_floating_point() and not result.requires_grad:
            return f"loss={self.name} has no gradient by the outputs: make it of them without detach, no_grad, argmax or rounding"
        if isinstance(result, Tensor) and result.dim() == 0 and result.is_floating_point():
            tried, why = [y, *made_up(outputs, y)], "which is not the mean over them"
            try:
                if all(torch.allclose(f(outputs, t), self.each(outputs, t).mean(), 1e-4, 1e-6) for t in tried):
                    return None
            except RuntimeError:  # of vmap, which does not map all of torch
                why = "and cannot be asked for each alone"
            return (
                f"loss={self.name} gives one number for {len(y)} examples, {why}: return the loss of each, as by "
                f"reduction='none'"
            )
        if (
            not isinstance(result, Tensor)
            or result.dim() == 0
            or len(result) != len(y)
            or not result.is_floating_point()
        ):
            what = (
                f"a tensor of shape {tuple(result.shape)}"
                if isinstance(result, Tensor)
                else f"a {type(result).__name__}"
            )
            return (
                f"loss={self.name} gives {what} for {len(y)} examples: return the loss of each, as by reduction='none'"
            )
        return None


def _called(y: Tensor) -> str:
    return "targets" if y.is_floating_point() else "labels"


def like(outputs: Tensor, y: Tensor) -> Tensor:
    """Return outputs (B, ..., 1) without the last axis, where targets have none."""
    return outputs.squeeze(-1) if outputs.dim() == y.dim() + 1 and outputs.shape[-1] == 1 else outputs


def each_example(values: Tensor) -> Tensor:
    """Return the mean (B,) of the values (B, ...) of each example."""
    return values if values.dim() < 2 else values.flatten(1).mean(1)


def summed(values: Tensor) -> Tensor:
    """Return the sum (B,) of the values (B, ...) of each example."""
    return values if values.dim() < 2 else values.flatten(1).sum(1)


def _entropy(outputs: Tensor, y: Tensor, axis: int) -> Tensor:
    result = -F.log_softmax(outputs, dim=axis).gather(axis, y.clamp(min=0).unsqueeze(axis)).squeeze(axis)
    if y.dim() == 1:
        return result * (y != IGNORED)
    counted = (y != IGNORED).to(result.dtype).flatten(1)
    return (result.flatten(1) * counted).sum(1) / counted.sum(1).clamp(min=1)


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return _entropy(outputs, y, 1)


def _tokens(outputs: Tensor, y: Tensor) -> Tensor:
    return _entropy(outputs, y, -1)


def _bce(outputs: Tensor, y: Tensor) -> Tensor:
    outputs = like(outputs, y)
    return each_example(F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none"))


def _mse(outputs: Tensor, y: Tensor) -> Tensor:
    return each_example((like(outputs, y) - y).square())


def _mae(outputs: Tensor, y: Tensor) -> Tensor:
    return each_example((like(outputs, y) - y).abs())


def _huber(outputs: Tensor, y: Tensor) -> Tensor:
    outputs = like(outputs, y)
    return each_example(F.huber_loss(outputs, y.to(outputs.dtype), reduction="none"))


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, 1, ("accuracy",)),
        Loss("token_cross_entropy", _tokens, -1, ("accuracy",)),
        Loss("bce_with_logits", _bce, None, ("accuracy",), binary=True),
        Loss("mse", _mse, None, ("mae", "r2")),
        Loss("mae", _mae, None, ("mse", "r2")),
        Loss("huber", _huber, None, ("mae", "r2")),
    )
}


def own_loss(f: Each) -> Loss:
    """Return the loss that a function of one's own, ``(outputs, y) -> (B, ...)``, is.

    One that gives the mean over a batch as one number is called with each example alone, as a batch of one.
    """

    def each(outputs: Tensor, y: Tensor) -> Tensor:
        result = f(outputs, y)
        if isinstance(result, Tensor) and result.dim() == 0:
            return torch.func.vmap(lambda o, t: f(o[None], t[None]))(outputs, y)
        return each_example(result) if isinstance(result, Tensor) else result

    return Loss(getattr(f, "__name__", type(f).__name__), each, own=f)


def made_up(outputs: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Yield labels other than those of the first examples, which may be of one class: each class in turn, if there are classes."""
    if not y.is_floating_point() and outputs.dim() == y.dim() + 1:
        yield (torch.arange(y.numel()) % outputs.shape[1]).view(y.shape).to(y)


def guessed(loss: Loss, outputs: Tensor, y: Tensor) -> Loss:
    """Return what tells classes and numbers apart for metrics: the loss, or of one's own what outputs and labels look like."""
    if loss.own is None:
        return loss
    return LOSSES["cross_entropy" if not y.is_floating_point() and outputs.dim() == y.dim() + 1 else "mse"]


def hits(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return 1 where an output (B, ...) is right, 0 where it is wrong."""
    if loss.axis is None:
        return ((like(outputs, y) > 0) == (y > 0.5)).to(torch.float32)
    return (outputs.argmax(loss.axis) == hard(loss, y)).to(torch.float32)


def hard(loss: Loss, y: Tensor) -> Tensor:
    """Return labels, of probabilities of the classes the likeliest, with ``IGNORED`` where one counts for nothing."""
    if loss.axis is None:
        return y
    return y.argmax(loss.axis) if y.is_floating_point() else y.masked_fill(y == loss.ignored, IGNORED)
