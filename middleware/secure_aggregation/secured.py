"""An algorithm whose server sees the sum of a cohort's messages alone, whatever the algorithm.

Clients send integers (``simulator/secure.py``), whose sum the server turns back into the mean, or the total, that the algorithm's
own phase declares. Integers are added exactly, so the sum is that of masked messages whose masks have been taken off, which
``execute`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedfleet.middleware.secure_aggregation.masks import unmasked
from fedfleet.simulator.algorithm import Algorithm, Cohort, Exchanging, Reduced, Round, positions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Mean, Rows, Total
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.uplink import alike
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.fleet.secagg import Secured
from fedfleet.simulator.secure import CLIPPED, COUNTED, ROUNDED, WEIGHT, Secure
from fedfleet.simulator.work import Message, Phase

MOST, NEARLY_ALL = 0.5, 0.99
"""Shares of numbers that are cut to their range, and of those that are not 0 that are rounded to 0, of which a run warns."""
SUM_LOST = "secure_sum_lost"
Sent = Mapping[str, Mapping[str, Tree]]
"""Phase -> slot -> a tree of the shapes and types that a client sends."""


@dataclass(frozen=True)
class Each:
    """Every client's integers, stacked, for whoever masks them in earnest."""

    fills = True

    def block(self, values: Tree, rows: Rows) -> Tree:
        """Return those of a block."""
        return values

    def unfilled(self, partial: Tree, clients: int) -> Tree:
        """Return the first so many."""
        return T.index(partial, slice(clients))

    def merge(self, a: Tree, b: Tree) -> Tree:
        """Put the later below the earlier."""
        return T.concat([a, b])

    def final(self, partial: Tree) -> Tree:
        """Return all."""
        return partial


def secured(algorithm: Algorithm, how: Mapping[str, Secure], sent: Sent) -> Algorithm:
    """Return an algorithm each of whose phases is added up as ``how`` says, by name; of what clients were seen to send.

    In ``rounds.parquet`` are "secure_clipped", the share of numbers (and weights) that were out of range, and "secure_rebuilt", the
    clients of a round whose masks had to be taken out of the sum.
    """
    phases = {p.name: _summed(p, how[p.name]) for p in algorithm.phases}

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        turn = _Secured(rnd, phases, sent)
        state, metrics = algorithm.round(state, cast(Round, turn))  # the rest of it is the round's own
        told = {"secure_clipped": turn.clipped / max(1.0, turn.numbers), "secure_rebuilt": float(turn.rebuilt)}
        return state, {**metrics, **told}

    return algorithm._replace(round=round, phases=tuple(phases.values()))


def _summed(phase: Phase, secure: Secure) -> Phase:
    how: Any = Each() if secure.execute else Total()
    slots = [*secure.clip, *([WEIGHT] if secure.weighted else ())]
    return replace(phase, secure=secure, reduce={**dict.fromkeys(slots, how), **dict.fromkeys(COUNTED, Total())})


class _Sum(NamedTuple):
    """Sums of integers by slot, float64, and the number of clients in them."""

    values: Mapping[str, Tree]
    clients: int


class _Secured(Exchanging):
    """A round whose exchanges tell sums alone."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase], sent: Sent):
        super().__init__(rnd, phases)
        self._sent = sent
        self.clipped, self.numbers, self.rebuilt = 0.0, 0.0, 0

    def buffered(self, phase: Phase, **given: Any) -> Any:
        """Raises FedfleetError: there is no cohort to agree on masks."""
        raise FedfleetError("answers are asked for one by one, and secure aggregation adds up those of a cohort")

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Do as the round does, and turn sums of integers back. Raises FedfleetError where more would be seen than sums."""
        secure = self._phases[phase.name].secure
        assert secure is not None
        result = super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps)
        if result.config:
            raise FedfleetError(
                f"clients tell {', '.join(result.config)} one by one, and the server is to see sums alone"
            )
        heard = len(result.received)
        if heard > secure.most:
            raise FedfleetError(
                f"{heard} clients in a sum whose modulus has room for {secure.most}: set secure_aggregation.most_clients={heard}"
            )
        went: Secured = cast(Any, self._round).records[-1].secured
        self.rebuilt += went.rebuilt
        self.clipped += float(result[CLIPPED])
        self.numbers += heard * secure.numbers
        rounded, nonzero = result[ROUNDED].tolist()
        self._tell(float(result[CLIPPED]) / (heard * secure.numbers), rounded / nonzero if nonzero else 0.0)
        values = dict(result.values)
        if secure.execute:
            for counted in COUNTED:
                del values[counted]
            values = _executed(values, secure, went, positions(result.received, cohort.clients), self.key)
        came = opened(values, heard, secure, phase.reduce, shared, self._sent[phase.name])
        return result._replace(values=came)

    def _tell(self, clipped: float, rounded: float) -> None:
        """Put into the record that little of what clients send is in the sum: the shares that were cut off, and rounded to 0."""
        result = (
            {"clipped": clipped} if clipped > MOST else {"rounded_to_zero": rounded} if rounded > NEARLY_ALL else {}
        )
        if result:
            cast(Any, self._round).records[-1].events.append({"event": SUM_LOST, **result, "bit_exact": True})


def sum_lost(event: Mapping[str, Any]) -> str:
    """Return in words what such an event says, and the fix."""
    what, key = (
        f"secure_aggregation: of the numbers that clients send in phase {event['phase']!r}",
        "secure_aggregation",
    )
    if "clipped" in event:
        return f"{what}, {event['clipped']:.0%} are outside of the range and cut to it: raise {key}.clip"
    return (
        f"{what}, {event['rounded_to_zero']:.1%} are rounded to 0: lower {key}.clip to their size, or raise {key}.bits"
    )


def opened(
    sums: Mapping[str, Tree],
    clients: int,
    secure: Secure,
    reduce: Mapping[str, Any],
    shared: Message,
    sent: Mapping[str, Tree] | None = None,
) -> dict[str, Tree]:
    """Return what the reductions of slots would, of the sums of integers of so many clients that were sent ``shared``.

    ``sent`` has the shapes and types that a client sends; without, those of the sums as float32, or of what was sent alike.
    """
    total = _Sum({s: _centred(v, _bits(secure, s)) for s, v in sums.items() if s not in COUNTED}, clients)
    known = {**shared.known, **shared.send}
    like = sent or {s: known[s] if alike(v, known.get(s)) else T.map(Tensor.float, v) for s, v in total.values.items()}
    return {slot: _decoded(slot, r, total, secure, known.get(slot), like[slot]) for slot, r in reduce.items()}


def _decoded(slot: str, reduction: Any, total: _Sum, secure: Secure, origin: Tree, like: Tree) -> Tree:
    """Return what a slot's reduction would, of the sums of integers."""
    origin = origin if alike(like, origin) else None
    if isinstance(reduction, Mean):
        starts, scale = 1.0, secure.step(slot) / total.clients
        if slot in secure.weighted:
            weight = float(total.values[WEIGHT])
            if not weight:
                raise ValueError("the weights of all heard clients are zero, so their mean does not exist")
            scale = secure.step(slot) * secure.weight_bound / weight
    else:
        starts, scale = float(total.clients), secure.step(slot)
    moved = T.map(lambda q: q * scale, total.values[slot])
    if origin is not None:
        moved = T.map(lambda d, o: o.to(torch.float64) * starts + d, moved, origin)
    return T.map(lambda d, x: d.to(x.dtype), moved, like)


def _bits(secure: Secure, slot: str) -> int:
    """Return the bits of the modulus of a slot's numbers."""
    return secure.weight_bits if slot == WEIGHT else secure.modulus_bits


def _centred(sums: Tree, bits: int) -> Tree:
    """Return the numbers that sums are mod R, of least absolute value."""
    half = 1 << (bits - 1)
    return T.map(lambda q: (((q.to(torch.int64) + half) & (2 * half - 1)) - half).to(torch.float64), sums)


def _executed(
    values: Mapping[str, Tree], secure: Secure, went: Secured, places: Tensor, key: Tensor
) -> dict[str, Tree]:
    """Mask what each client sends, leaves (R, ...), add it up, and take the masks off; ``places`` (R,) are those in the cohort."""
    leaves = T.leaves(dict(values))
    moduli = [torch.full_like(x[0], 1 << _bits(secure, s)) for s, v in values.items() for x in T.leaves(v)]
    mod = torch.cat([m.reshape(-1) for m in moduli]).to(torch.int64)
    whole = torch.cat([x.reshape(len(places), -1) for x in leaves], 1).to(torch.int64) & (mod - 1)
    rows = {place: whole[i] for i, place in enumerate(places.tolist())}
    assert set(rows) == set(went.masked.nonzero().flatten().tolist())
    result = unmasked(rows, went, mod, rng.fold(key, "secrets"))
    parts = result.split([x[0].numel() for x in leaves])
    return T.unflatten(dict(values), [p.reshape(x.shape[1:]) for p, x in zip(parts, leaves, strict=True)])
