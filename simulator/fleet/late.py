"""Late work that the server keeps for a later round."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.work import Message


class Assignment(NamedTuple):
    """What clients of one phase were asked to do: everything their work depends on, so that it can be done any time later.

    Attributes:
        phase, round: where and when they were invited.
        shared: what they were sent.
        clients, copies: (C,) int64.
        key: of the clients' own draws.
        steps: replaces the steps of the plans.
        limit: (C,) steps after which each stops, or None.
        client_input: a row a client, or None.
        seconds: (C,) float64 from the invitation to the answer.
        num_examples: (C,) int64.
        weights: (C,) float64 by which the server counts each answer, or None.
        asked_s: the moment of the invitation on the virtual clock.

    """

    phase: str
    round: int
    shared: Message
    clients: Tensor
    copies: Tensor
    key: Key
    steps: int | None
    limit: Tensor | None
    client_input: Tree
    seconds: Tensor
    num_examples: Tensor
    asked_s: float
    weights: Tensor | None = None

    def take(self, rows: Tensor) -> Assignment:
        """Return the assignment of some of the clients, given by their positions (R,)."""
        mine = ("clients", "copies", "limit", "client_input", "seconds", "num_examples", "weights")
        given = ((name, getattr(self, name)) for name in mine)
        return self._replace(**{name: None if v is None else T.index(v, rows) for name, v in given})


class Late:
    """Assignments whose answers are under way; changes of a round are committed with it."""

    def __init__(self) -> None:
        self.committed: tuple[Assignment, ...] = ()
        self._now: tuple[Assignment, ...] = ()

    def add(self, work: Assignment) -> None:
        """Keep late work."""
        if len(work.clients):
            self._now += (work,)

    def arrived(self, phase: str, before: int, until_s: float) -> list[Assignment]:
        """Take out what earlier rounds than ``before`` asked for in this phase and has come in by ``until_s``."""
        result, left = [], []
        for work in self._now:
            here = work.asked_s + work.seconds <= until_s
            if work.phase != phase or work.round >= before or not bool(here.any()):
                left.append(work)
                continue
            result.append(work.take(here.nonzero().flatten()))
            if not bool(here.all()):
                left.append(work.take((~here).nonzero().flatten()))
        self._now = tuple(left)
        return result

    def commit(self) -> None:
        """Accept the round."""
        self.committed = self._now

    def discard(self) -> None:
        """Forget the round."""
        self._now = self.committed

    def __len__(self) -> int:
        return sum(len(work.clients) for work in self._now)
