"""The loss of a task with a net of one's own, where it is one of torch's or has a name, as the record of a run has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedfleet.report.tables import Run, mapping
from fedfleet.report.words import joined

TENSORS = ("weight", "pos_weight")
"""Options of torch's losses that are tensors there, also those of one number."""
TORCHS = re.compile(r"torch\.nn\.functional[.:]([a-z0-9_]+)")
CLASS = re.compile(r"torch\.nn:([A-Za-z0-9]+)")
"""A loss of torch's in a configuration, with the options that it has if none are given."""
CLASSES = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "PoissonNLLLoss": "poisson_nll_loss",
    "BCELoss": "binary_cross_entropy",
    "KLDivLoss": "kl_div",
    "SoftMarginLoss": "soft_margin_loss",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
}
"""Torch's losses and their functions, as of ``tasks/torch_losses.py``."""
OF_INDICES = ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss")
TOKENS = "token_cross_entropy"
NAMED = {
    "cross_entropy": "cross_entropy",
    TOKENS: "cross_entropy",
    "bce_with_logits": "binary_cross_entropy_with_logits",
    "mse": "mse_loss",
    "mae": "l1_loss",
    "huber": "huber_loss",
}
"""Losses by name, and what torch calls them."""


class OwnLoss(NamedTuple):
    """One of torch's losses: the function's name, its options that are given, and whether it is summed over a batch.

    ``of_indices`` says that labels are numbers of classes, ``of_tokens`` that each example has several, over which its loss is the
    mean. Options that are tensors of few numbers are lists of these; of larger ones the record has a digest alone.
    """

    name: str
    options: Mapping[str, Any]
    summed: bool
    of_indices: bool
    of_tokens: bool = False

    def told(self) -> str:
        """Return it in words: "cross_entropy (label smoothing 0.1, class weights)"."""
        given = [
            f"{k.replace('_', ' ')} {_words(v)}" if _plain(v) else f"with {k.replace('_', ' ')}"
            for k, v in self.options.items()
        ]
        given += ["summed over a batch"] * self.summed
        return f"{self.name} ({', '.join(given)})" if given else self.name

    @property
    def tensors(self) -> list[str]:
        """Options that are large tensors, of which the record has no numbers."""
        return [key for key, value in self.options.items() if not _plain(value)]

    def code(self) -> str:
        """Return it in Python, of ``net(x)``, ``y`` and options that are tensors by their names."""
        if self.of_tokens:
            each = f'nn.functional.{self.name}(net(x).movedim(-1, 1), y, reduction="none")'
            return f"({each}.sum(1) / (y != -100).sum(1).clamp(min=1)).mean()"
        both = "net(x), y" if self.of_indices else "net(x).view_as(y), y.float()"
        given = {**self.options, **({"reduction": "sum"} if self.summed else {})}
        said = [f"{key}={key if key in self.tensors else _code(key, value)}" for key, value in given.items()]
        return f"nn.functional.{self.name}({', '.join([both, *said])})"


def _plain(value: Any) -> bool:
    return all(isinstance(each, int | float) for each in (value if isinstance(value, list) else [value]))


def _words(value: Any) -> str:
    return joined([f"{each:g}" for each in value]) if isinstance(value, list) else f"{value}"


def _code(key: str, value: Any) -> str:
    return f"torch.tensor({value})" if isinstance(value, list) or key in TENSORS else repr(value)


def read(run: Run) -> OwnLoss | None:
    """Return the loss of a run's own net; None for one of the user's own, and where there is none on record."""
    how = _recorded(run)
    name, options = TORCHS.fullmatch(str(how.get("function"))), mapping(how.get("options"))
    if name is None:
        return _by_name(_name(run, how))
    usual = {"ignore_index": -100, "label_smoothing": 0.0}
    given = {
        k: v for k, v in options.items() if k.isidentifier() and v is not None and (k not in usual or v != usual[k])
    }
    return OwnLoss(name[1], given, bool(how.get("in_all")), bool(mapping(how.get("kind")).get("of_indices")))


def told(run: Run) -> str | None:
    """Return the loss of a run's own net in words; None where there is none on record."""
    if (known := read(run)) is not None:
        return known.told()
    name = _recorded(run).get("name")
    return f"{name}, of one's own" if name else None


def _recorded(run: Run) -> Mapping[str, Any]:
    return mapping(mapping(mapping(run.summary.get("own")).get("task")).get("options"))


def _name(run: Run, how: Mapping[str, Any]) -> str:
    """Return what a loss is chosen by: in Python, or in the configuration."""
    if how:
        return str(mapping(how.get("loss")).get("name"))
    return str(run.get("task", "loss")) if run.get("task", "name") == "module" else ""


def _by_name(name: str) -> OwnLoss | None:
    of_torch, of = TORCHS.fullmatch(name), CLASS.fullmatch(name)
    function = CLASSES.get(of[1]) if of else of_torch[1] if of_torch else NAMED.get(name)
    if function is None or function not in CLASSES.values():
        return None
    return OwnLoss(function, {}, summed=False, of_indices=function in OF_INDICES, of_tokens=name == TOKENS)
