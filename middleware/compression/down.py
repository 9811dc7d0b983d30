"""An algorithm whose server's messages pass transforms on their way to clients, whatever the algorithm.

Of a slot x_t that the server sends in exchange t of a phase, clients get y_t, and go on from there:

    without a memory    y_t = C(x_t)
    with one            y_t = y_{t-1} + C(x_t - y_{t-1}),  y_0 = x_0

The memory is that of Gruntkowska, Tyurin & Richtarik, "EF21-P and friends: improved theoretical communication complexity for
distributed optimization with bidirectional compression", ICML 2023, Algorithm 1: what is lost is sent later, since it is still
missing from y. What a client's model moved by, z_i - y_t, counts from the server's own model: the server has x_t + (z_i - y_t), as
in their algorithm, so that what is lost on the way down is not lost to the server.

With a memory, a client that answered in exchange s has y_s, and is sent the s + 1st to the t-th difference, or y_t itself where
that is less; one that has not answered yet is sent y_t. The server knows of no others that they have received anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Algorithm, Around, Buffered, Cohort, Reduced, Round, beneath
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.uplink import SERVERS, coded, compressible
from fedfleet.simulator.work import Message, Phase, Slots, Transform


class Received(NamedTuple):
    """What clients have of a phase: exchanges so far, y of the last, and by whom (n,) rising which was answered last (n,)."""

    exchanges: int
    slots: Slots
    clients: Tensor
    last: Tensor

    @staticmethod
    def nothing() -> Received:
        """Return what they have before the first exchange."""
        none = torch.zeros(0, dtype=torch.int64)
        return Received(0, {}, none, none)

    def missed(self, clients: Tensor) -> Tensor:
        """Return how many differences clients (S,) have yet to be sent, with this exchange's; 0 for those that have nothing."""
        if not len(self.clients):
            return torch.zeros_like(clients)
        place = torch.searchsorted(self.clients, clients).clamp(max=len(self.clients) - 1)
        return torch.where(self.clients[place] == clients, self.exchanges - self.last[place], 0)

    def after(self, slots: Slots, heard: Tensor) -> Received:
        """Return what they have after an exchange of which clients (R,) have answered."""
        everybody, place = torch.cat([self.clients, heard]).unique(return_inverse=True)
        last = torch.full_like(everybody, self.exchanges)
        old = ~torch.isin(self.clients, heard)
        last[place[: len(self.clients)][old]] = self.last[old]
        return Received(self.exchanges + 1, slots, everybody, last)


class Sending(NamedTuple):
    """An algorithm's state, the key of what transforms draw, and by phase what clients have received."""

    state: Any
    key: Key
    phases: Mapping[str, Received]


def downward(algorithm: Algorithm, down: tuple[Transform, ...], *, memory: bool) -> Algorithm:
    """Return an algorithm whose server's messages pass ``down``; with a ``memory`` the differences of what they make of them."""

    def init(z: Tree, key: Key, problem: Any) -> Sending:
        return Sending(algorithm.init(z, key, problem), rng.fold(key, "down"), {})

    def round(at: Sending, rnd: Round) -> tuple[Sending, Mapping[str, float]]:
        turn = _Coding(rnd, down, memory, at)
        state, metrics = algorithm.round(at.state, cast(Round, turn))  # the rest of it is the round's own
        return turn.at._replace(state=state), metrics

    return beneath(algorithm, lambda at: at.state)._replace(init=init, round=round)


class _Coding(Around):
    """A round whose messages to clients are coded."""

    def __init__(self, rnd: Round, down: tuple[Transform, ...], memory: bool, at: Sending):
        super().__init__(rnd)
        self._down, self._memory, self.at = down, memory, at

    def map_reduce(self, phase: Phase, *, shared: Message, cohort: Cohort, **given: Any) -> Reduced:
        """Do as the round does, with what clients receive of a message."""
        before = self.at.phases.get(phase.name, Received.nothing())
        message, slots = self._coded(shared, before, cohort.clients, (phase.name, before.exchanges))
        if message.size is None:  # all of it goes, to those in this exchange alone: nobody else has anything to add to
            before = Received.nothing()._replace(exchanges=before.exchanges)
        result = self._round.map_reduce(phase, shared=message, cohort=cohort, **given)
        after = (
            before.after(slots, result.received) if self._memory else before._replace(exchanges=before.exchanges + 1)
        )
        self.at = self.at._replace(phases={**self.at.phases, phase.name: after})
        return result

    def buffered(self, phase: Phase, *, messages: Mapping[int, Message], **given: Any) -> list[Buffered]:
        """Do as the round does, with what clients receive of the messages of each version: always the same of one."""
        nothing, nobody = Received.nothing(), torch.zeros(0, dtype=torch.int64)
        sent = {v: self._coded(m, nothing, nobody, (phase.name, v))[0] for v, m in messages.items()}
        return self._round.buffered(phase, messages=sent, **given)

    def _coded(
        self, shared: Message, before: Received, clients: Tensor, draws: tuple[str, int]
    ) -> tuple[Message, Slots]:
        """Return the message as clients (S,) have it, and of each slot the floats that transforms have made."""
        given = {slot: leaves for slot, tree in shared.send.items() if (leaves := compressible(tree))}
        floats, size = T.count(dict(shared.send)), T.num_bytes(dict(shared.send))
        whole = floats - T.count(given), size - T.num_bytes(given)  # what goes as it is
        if self._memory and not _same(given, before.slots):
            return Message(
                shared.send, shared.config, shared.known
            ), given  # nobody has anything to add a difference to
        wanted = T.sub(given, before.slots) if self._memory else given
        made, _, numbers, bits, _ = coded(self._down, 0, wanted, {}, None, rng.fold(self.at.key, *draws))
        made = T.add(before.slots, made) if self._memory else made
        numbers, of_bytes = numbers, -(-bits // 8)
        sizes = numbers + whole[0], of_bytes + whole[1]
        if self._memory:
            missed = before.missed(clients)
            there = (missed > 0) & (missed * of_bytes + whole[1] < size)
            sizes = (
                torch.where(there, missed * numbers + whole[0], floats),
                torch.where(there, missed * of_bytes + whole[1], size),
            )
        send = {slot: _put(tree, made.get(slot, {})) for slot, tree in shared.send.items()}
        own = {slot: shared.send[slot] for slot in made}
        return Message(send, shared.config, {**shared.known, SERVERS: own}, sizes), made


def _same(a: Slots, b: Slots) -> bool:
    """Say whether slots are of the same shapes."""
    return T.structure(a) == T.structure(b) and all(
        x.shape == y.shape for x, y in zip(T.leaves(a), T.leaves(b), strict=True)
    )


def _put(tree: Tree, made: Mapping[str, Tensor]) -> Tree:
    """Return a slot with the floats that have been made of its own."""
    return T.unflatten(tree, [made.get(name, leaf) for name, leaf in T.named_leaves(tree)])
