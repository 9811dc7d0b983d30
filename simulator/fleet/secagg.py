"""Secure aggregation as it happens: who is still there at each of its exchanges, whether the sum can be told, bytes and time.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, Figure 4, without the check of
consistency that an active server asks for; with k neighbours Bell et al., "Secure single-server aggregation with
(poly)logarithmic overhead", CCS 2020, Algorithm 2. Everybody holds a part of its own secrets too, as in the first paper.

    paper    here          who
    U1       advertised    is there when asked, and sends two public keys
    U2       shared        sends each neighbour parts of two secrets
    U3       masked        is heard: its masked message came, and is part of the sum
    U4, U5   unmasking     sends what the masks are rebuilt from, a part for each of U2 among its neighbours and itself

A secret is lost where fewer than t of those who hold its parts are left, and with it the exchange, whose sum nobody can unmask.
Bytes are those that the papers count: keys and parts of 256 bits, no names, tags or lists of who has gone. A client sends and gets

    2 K + 2 (n - 1) A + n A  and  2 (n - 1) K + 2 (n - 1) A     besides its masked message, where everybody stays

which is 2 n K + (5 n - 4) A of Bonawitz et al., Section 7.1; with k neighbours n is k + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.availability import Availability
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.policies import rounded_up
from fedfleet.simulator.fleet.responses import Federation, Outcome, Responses, respond
from fedfleet.simulator.secure import Secure

KEY_BYTES, PART_BYTES = 32, 32
"""A public key, K, and a part of a secret, A: 256 bits each, as in Section 7.1 of Bonawitz et al."""


class Neighbours(NamedTuple):
    """Who of a cohort (S,) agrees on masks with whom: all with all, or those at the positions ``ring`` (S, k).

    Rows of clients that did not advertise keys mean nothing. ``size`` is k + 1, or n, all who did.
    """

    ring: Tensor | None
    size: int

    def among(self, who: Tensor) -> Tensor:
        """Return how many of ``who`` (S,) bool each client's neighbourhood has, itself with them (S,)."""
        if self.ring is None:
            return who.sum().expand(len(who))
        return who[self.ring].sum(1) + who.to(torch.int64)


def neighbours(advertised: Tensor, k: int | None, key: Key) -> Neighbours:
    """Return the neighbours of those who advertised keys (S,) bool: the k nearest on a ring in random order, or all."""
    there = advertised.nonzero().flatten()
    n = len(there)
    if k is None or k >= n - 1:
        return Neighbours(None, n)
    order = there[rng.permutation(key, n)]
    steps = torch.cat([torch.arange(1, k // 2 + 1), -torch.arange(1, k // 2 + 1)])
    ring = torch.zeros(len(advertised), k, dtype=torch.int64)
    ring[order] = order[(torch.arange(n).unsqueeze(1) + steps) % n]
    return Neighbours(ring, k + 1)


def needed(threshold: float, size: int) -> int:
    """Return how many parts rebuild a secret of a neighbourhood of that size, t: two at least, or one client would be seen."""
    return max(2, rounded_up(threshold * size))


class Secured(NamedTuple):
    """How an exchange went: who (S,) bool got how far, the neighbours, t, why it is aborted, and bytes besides the message's.

    ``asked`` is how many were sent the work. ``bytes_up`` of an exchange that is aborted for want of parts has the masked messages
    too, which no client is asked to compute then.
    """

    advertised: Tensor
    shared: Tensor
    masked: Tensor
    unmasking: Tensor
    neighbours: Neighbours
    threshold: int
    aborted: str | None
    asked: int
    bytes_up: int
    bytes_down: int

    @property
    def rebuilt(self) -> int:
        """Return how many clients' masks had to be taken out of the sum though nothing of theirs is in it."""
        return int((self.shared & ~self.masked).sum())


@dataclass(frozen=True)
class _Among:
    """The availability of those who have got so far, some of whom go after a moment; of one cohort, in its order."""

    base: Availability
    there: Tensor
    goes: Tensor
    after_s: float

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return who of the cohort is online."""
        gone = self.goes & (seconds > self.after_s)
        return self.base.online(key, clients, seconds) & self.there & ~gone


class _Cohort(NamedTuple):
    """The clients of an exchange, and what their draws depend on."""

    secure: Secure
    federation: Federation
    clients: Tensor
    key: Key
    own: Key

    def goes(self, at: str) -> Tensor:
        """Return who drops out before a message that is its due."""
        rate = self.secure.dropout.get(at, 0.0)
        return rng.bernoulli(rng.fold(self.own, "dropout", at, self.clients), rate)

    def message(self, at: str, who: Tensor, from_s: float, down: float, up: float) -> tuple[Tensor, float]:
        """Return who (S,) of ``who`` answers a message of such bytes, and how long the server waits for them."""
        f, zero = self.federation, torch.zeros_like(self.clients)
        draws = rng.fold(self.own, "exchange", at)
        seconds = f.devices.times(draws, self.clients, Load(zero, zero, down, up)).fixed
        left = who & ~self.goes(at) & f.online(self.key, self.clients, from_s + seconds)
        if f.hazard:
            u = rng.uniform(rng.fold(draws, "failure", self.clients), (), torch.float64)
            left &= -torch.log1p(-u) / f.hazard >= seconds
        return left, float(seconds[who].max()) if bool(who.any()) else 0.0


def exchange(
    secure: Secure | None,
    federation: Federation,
    clients: Tensor,
    copies: Tensor,
    load: Load,
    at_s: float,
    key: Key,
    count_key: Key,
) -> tuple[Responses, Secured | None]:
    """Resolve a phase as ``wait_for`` does; with ``secure`` with two exchanges before the work, and one after.

    Who has gone before the work is sent counts as offline, and if the exchange is aborted by then all others as failed.
    """
    if secure is None:
        return respond(federation, clients, copies, load, at_s, key, count_key), None
    cohort = _Cohort(secure, federation, clients, key, rng.fold(key, copies))
    online = federation.online(key, clients, torch.full((len(clients),), at_s, dtype=torch.float64))
    advertised, first_s = cohort.message("keys", online, at_s, 0.0, 2 * KEY_BYTES)
    near = neighbours(advertised, secure.neighbours, rng.fold(key, "neighbours"))
    t, others = needed(secure.threshold, near.size), max(0, near.size - 1)
    down, up = 2 * KEY_BYTES * others, 2 * PART_BYTES * others
    shared, second_s = cohort.message("shares", advertised, at_s + first_s, down, up)
    before_s, sent, nobody = first_s + second_s, near.among(advertised), torch.zeros_like(shared)
    went = Secured(
        advertised=advertised,
        shared=shared,
        masked=nobody,
        unmasking=nobody,
        neighbours=near,
        threshold=t,
        aborted=_lost(near, shared, shared, t, "sharing keys"),
        asked=0,
        bytes_up=2 * KEY_BYTES * int(advertised.sum()) + 2 * PART_BYTES * _others(sent, shared),
        bytes_down=2 * KEY_BYTES * _others(sent, advertised),
    )
    if went.aborted:
        outcome = torch.where(online, int(Outcome.FAILED), int(Outcome.UNAVAILABLE)).to(torch.int8)
        return Responses(outcome, torch.where(online, before_s, 0.0), before_s, load.steps), went
    there = _Among(federation, shared, cohort.goes("masked"), at_s + before_s)
    left, work = replace(federation, availability=there), _masking(secure, load, others)
    answers = respond(left, clients, copies, work, at_s + before_s, key, count_key)
    masked, close_s = answers.outcome == Outcome.COMPLETED, before_s + answers.duration_s
    seconds = torch.where(answers.outcome == Outcome.UNAVAILABLE, 0.0, before_s + answers.seconds)
    answers, ever = answers._replace(seconds=seconds, duration_s=close_s), near.among(shared)
    went = went._replace(
        masked=masked,
        aborted=_lost(near, shared, masked, t, "masked messages"),
        asked=int(shared.sum()),
        bytes_down=went.bytes_down + 2 * PART_BYTES * _others(ever, shared),
    )
    if not went.aborted:
        unmasking, last_s = cohort.message("unmasking", masked, at_s + close_s, 0.0, PART_BYTES * near.size)
        answers = answers._replace(duration_s=close_s + last_s)
        parts = PART_BYTES * int(ever[unmasking].sum())
        aborted = _lost(near, shared, unmasking, t, "unmasking")
        went = went._replace(unmasking=unmasking, aborted=aborted, bytes_up=went.bytes_up + parts)
    if went.aborted:
        messages = int(masked.sum()) * secure.message_bytes
        went = went._replace(bytes_up=went.bytes_up + messages)
    return answers, went


def _others(count: Tensor, who: Tensor) -> int:
    """Return how many messages some clients have for, or from, the neighbours that were counted with them."""
    return int((count - 1)[who].sum())


def _lost(near: Neighbours, of: Tensor, left: Tensor, t: int, stage: str) -> str | None:
    """Say which secrets cannot be rebuilt by those who are left; None where all can."""
    lost = of & (near.among(left) < t)
    if int(left.sum()) >= t and not bool(lost.any()):
        return None
    return (
        f"secure aggregation is aborted after {stage}, as of {int(lost.sum())} clients' secrets fewer than {t} parts are left "
        f"(lower secure_aggregation.threshold)"
    )


def _masking(secure: Secure, load: Load, others: int) -> Load:
    """Return the work with the masks of so many others and one's own, which takes operations; the message at its width."""
    load = load._replace(bytes_up=float(secure.message_bytes))
    if not load.flop:
        return load
    more = secure.mask_flop * secure.numbers * (others + 1) / load.flop
    return load._replace(examples=load.examples.to(torch.float64) + more)
