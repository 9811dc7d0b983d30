"""The loss of a task that was made in Python, where it is one of torch's, as the record of a run has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedfleet.report.tables import Run, mapping
from fedfleet.report.words import joined

TENSORS = ("weight", "pos_weight")
"""Options of torch's losses that are tensors there, also those of one number."""
TORCHS = re.compile(r"torch\.nn\.functional\.([a-z0-9_]+)")


class OwnLoss(NamedTuple):
    """One of torch's losses: the function's name, its options that are given, and whether it is summed over a batch.

    ``of_indices`` says that labels are numbers of classes. Options that are tensors of few numbers are lists of these; of larger
    ones the record has a digest alone.
    """

    name: str
    options: Mapping[str, Any]
    summed: bool
    of_indices: bool

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
    """Return the loss of a run's own task; None for one of the user's own, and where there is none on record."""
    how = mapping(mapping(mapping(run.summary.get("own")).get("task")).get("options"))
    name, options = TORCHS.fullmatch(str(how.get("function"))), mapping(how.get("options"))
    if name is None:
        return None
    usual = {"ignore_index": -100, "label_smoothing": 0.0}
    given = {
        k: v for k, v in options.items() if k.isidentifier() and v is not None and (k not in usual or v != usual[k])
    }
    return OwnLoss(name[1], given, bool(how.get("in_all")), bool(mapping(how.get("kind")).get("of_indices")))
