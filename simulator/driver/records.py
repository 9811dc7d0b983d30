"""The account of a phase: who was invited, what became of them, what travelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.task import BlockResult
from fedfleet.simulator.errors import FedfleetError, one_line
from fedfleet.simulator.fleet.responses import Outcome, Responses
from fedfleet.simulator.fleet.secagg import Secured
from fedfleet.simulator.work import Message

SCALAR_BYTES = 8  # a config scalar travels as a float64
OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome)


def numbers(metrics: Mapping[str, Any], whose: str) -> dict[str, float]:
    """Return metrics as floats. Raises FedfleetError naming one that is none."""
    result = {}
    if not isinstance(metrics, Mapping):
        raise FedfleetError(f"{whose}: they are {one_line(metrics)[:80]}: return a mapping, {{name: number}}")
    for name, value in metrics.items():
        try:
            if isinstance(value, str):
                raise ValueError("text")
            result[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise FedfleetError(f"{whose}: {name!r} is {one_line(what)[:80]}: give one number a name") from None
    return result


@dataclass
class PhaseRecord:
    """A row of ``phases.parquet`` and its outcomes.

    ``counts`` has a key an outcome, "invited", "merged_stale" (late updates of earlier rounds used in this phase),
    "client_steps", and floats and bytes each way; ``bytes_down_each`` is one client's, on average. ``events`` are what
    happened that should not have, one a line of ``events.jsonl``; with one that says ``bit_exact: false`` the run is not
    reproducible to the bit. ``secured`` is how the exchange went where the server saw a sum alone. ``in_vain`` are answers
    that came and were too few, so that nobody has computed them, and ``each`` the floats and bytes of one answer, where
    some were computed.
    """

    phase: str
    attempt: int
    clients: Tensor
    responses: Responses
    started_s: float
    counts: dict[str, int] = field(default_factory=dict)
    train_loss: float | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    bytes_down_each: float = 0.0
    secured: Secured | None = None
    in_vain: int = 0
    each: tuple[int, int] | None = None

    def invited(self, shared: Message, client_input: Tree = None, online: int | None = None) -> None:
        """Count the outcomes and what was sent to those online: the shared message and their rows of the client_input."""
        size = len(self.clients)
        if (secured := self.secured) is not None:
            online = secured.asked
        outcomes = self._outcomes()
        online = size - outcomes["unavailable"] if online is None else online
        floats, each = message_size(shared, client_input, size)

        def total(of: int | Tensor) -> int:
            if isinstance(of, Tensor):
                return int(of[self.responses.outcome != Outcome.UNAVAILABLE].sum())
            return online * of

        # The mean of nobody is 0.
        self.bytes_down_each = float(each.double().mean().nan_to_num() if isinstance(each, Tensor) else each)
        self.counts = outcomes | {
            "invited": size,
            **dict.fromkeys(("merged_stale", "client_steps", "floats_up", "bytes_up"), 0),
            "floats_down": total(floats),
            "bytes_down": total(each),
        }
        if secured is not None:
            self.counts["bytes_up"] += secured.bytes_up
            self.counts["bytes_down"] += secured.bytes_down

    def _outcomes(self) -> dict[str, int]:
        return dict(zip(OUTCOMES, self.responses.outcome.bincount(minlength=len(OUTCOMES)).tolist(), strict=True))

    def befell(self, rows: Tensor, outcome: Outcome) -> None:
        """Change the outcome of some of the invited clients, given by their positions."""
        if len(rows):
            self.responses.outcome[rows] = int(outcome)
            self.counts |= self._outcomes()

    def handed_back(self, shared: Message, clients: int) -> None:
        """Count what was sent to so many clients after they had been heard."""
        floats, each = message_size(shared, None, clients)
        self.counts["floats_down"] += int(torch.as_tensor(floats).expand(clients).sum())
        self.counts["bytes_down"] += int(torch.as_tensor(each).expand(clients).sum())

    def received(self, results: Sequence[BlockResult], answers: int) -> None:
        """Count what came back from so many clients, and average the training loss."""
        floats, of_bytes = (sum(getattr(r, name) for r in results) for name in ("floats_up", "bytes_up"))
        self._sent(floats, of_bytes)
        if answers:
            self.each = floats // answers, of_bytes // answers
        self.counts["client_steps"] += sum(r.steps for r in results)
        measured = sum(r.measured for r in results)
        self.train_loss = sum(loss for r in results for loss in r.loss) / measured if measured else None
        for r in results:
            if r.splits:
                self.events.append({"event": "out_of_memory", "splits": r.splits, "bit_exact": False})
            self.events += [d.event() for d in r.dropped]

    def came_in_vain(self, each: tuple[int, int]) -> None:
        """Count answers that nobody has computed, of which each would have sent so many floats and bytes."""
        floats, of_bytes = each
        counted = self.secured is not None and self.secured.aborted  # masked messages are then among the bytes already
        self._sent(self.in_vain * floats, 0 if counted else self.in_vain * of_bytes)

    def _sent(self, floats: int, of_bytes: int) -> None:
        self.counts["floats_up"] += floats
        self.counts["bytes_up"] += of_bytes


def message_size(shared: Message, client_input: Tree, size: int) -> tuple[int | Tensor, int | Tensor]:
    """Return (floats, bytes) sent to each of ``size`` clients, or to each of them in their order (size,)."""
    each = max(1, size)  # of nobody there is nothing to divide
    own = (0, 0) if client_input is None else (T.count(client_input) // each, T.num_bytes(client_input) // each)
    floats, of_bytes = shared.size or (T.count(dict(shared.send)), T.num_bytes(dict(shared.send)))
    return floats + own[0], of_bytes + own[1] + SCALAR_BYTES * len(shared.config)
