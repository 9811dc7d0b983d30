"""Clients at fault, whose code raises or whose values are not finite, and what a run does about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import multiplied_out
from fedfleet.simulator.arithmetic.tree import Tree

LOWER = "lower the learning rates, or clip gradients, as by algorithm.client_optimizer.clip_norm"
"""How divergence is mended."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is done: ``fail`` ends the run, ``drop_client`` goes on without the client, ``keep`` takes its values as they are.

    Attributes:
        on_client_error: where client code raises.
        non_finite: where what a client sends, or its own state, is NaN or infinite.
        client_timeout_s: seconds after which a client is taken to have raised, on an executor that can stop it; None for ever.

    """

    on_client_error: Literal["fail", "drop_client"] = "fail"
    non_finite: Literal["fail", "drop_client", "keep"] = "fail"
    client_timeout_s: float | None = None


class Dropped(NamedTuple):
    """A client left out of its block.

    Attributes:
        row: its position among the block's clients.
        client: who.
        why: one line.
        bit_exact: whether it is at fault each time. The bits of a NaN are; exceptions and timeouts may depend on the machine.
        traceback: of what client code raised; None where it did not raise.

    """

    row: int
    client: int
    why: str
    bit_exact: bool
    traceback: str | None = None

    def event(self) -> dict[str, Any]:
        """Return the line of ``events.jsonl``."""
        result = {"event": "client_dropped", "client": self.client, "why": self.why, "bit_exact": self.bit_exact}
        return result if self.traceback is None else {**result, "traceback": self.traceback}


class AtFault(Exception):
    """Clients of a block that are to be dropped."""

    def __init__(self, dropped: list[Dropped]):
        super().__init__(f"{len(dropped)} clients")
        self.dropped = dropped


def finite(values: Tree) -> bool:
    """Say whether all values are finite. Finite sums say so at once; an infinite one may have overflowed."""
    floats = [v for v in T.leaves(values) if v.is_floating_point()]
    if not floats or bool(torch.stack([v.sum(dtype=torch.float64) for v in floats]).isfinite().all()):
        return True
    return all(bool(torch.isfinite(v).all()) for v in floats)


def not_finite(sent: Mapping[str, Tree], client_state: Tree) -> dict[int, str]:
    """Return who of a block sends or keeps a value that is not finite: row -> the first place where. Leaves are (C, ...).

    Combinations are multiplied out one at a time: finite factors may have a product that is not.
    """
    result: dict[int, str] = {}
    places = [(f"it sends a value that is not finite in {slot!r}", values) for slot, values in sent.items()]
    places += [(f"its state is not finite in {path!r}", leaf) for path, leaf in T.named_leaves(client_state)]
    for what, values in places:
        for leaf in T.leaves(values):
            for row in _rows(multiplied_out(leaf)):
                result.setdefault(row, what)
    return result


def _rows(v: Tensor) -> list[int]:
    if not v.is_floating_point():
        return []
    return (~torch.isfinite(v).reshape(len(v), math.prod(v.shape[1:])).all(1)).nonzero().flatten().tolist()


class NotFinite(Exception):
    """Raised by a ``Watch`` at the step in question."""


class Watch:
    """Told of a client's values after each step, stops it where one that was finite is no more."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __call__(self, carry: Tree) -> None:
        """Look at the values. Raises NotFinite."""
        now = [finite(leaf) for leaf in T.leaves(carry)]
        if any(before and not after for before, after in zip(self._before, now, strict=False)):
            raise NotFinite
        self._before = now
