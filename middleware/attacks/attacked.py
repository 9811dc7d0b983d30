"""An algorithm some of whose clients attack, by what each sends or by what they send together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from fedfleet.middleware.attacks.attackers import Attackers
from fedfleet.simulator.algorithm import Algorithm, Buffered, Cohort, Exchanging, Reduced, Round
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Mean
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.work import Message, Phase

Forge = Callable[[Mapping[str, Any], Key], Mapping[str, Any]]
"""A slot's floats of one client, and a key -> what is sent in their place; see ``Forgery``."""
Collude = Callable[[UploadMatrix, Tensor, Tree], UploadMatrix]
"""Uploads, which are the attackers' (S,), and the model they moved from, None where differences are sent -> other uploads."""


@dataclass(frozen=True)
class _Forgery:
    attackers: Attackers
    forge: Forge

    def by(self, clients: Tensor) -> Tensor:
        return self.attackers.among(clients)

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        return self.forge(moved, key)


def attacked(algorithm: Algorithm, attackers: Attackers, forge: Forge | None, collude: Collude | None) -> Algorithm:
    """Return an algorithm some of whose clients attack.

    In ``rounds.parquet`` is "attackers", their share of the answers of a round's exchanges. Where they collude, uploads whose mean
    is taken are kept, and it is taken of what the attackers have made of theirs.
    """
    phases = {p.name: p for p in algorithm.phases}
    if forge is not None:
        phases = {name: replace(p, forgery=_Forgery(attackers, forge)) for name, p in phases.items()}
    if collude is not None:
        phases = {name: _kept(p) for name, p in phases.items()}

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        turn = _Attacked(rnd, phases, attackers, collude, algorithm)
        state, metrics = algorithm.round(state, cast(Round, turn))  # the rest of it is the round's own
        return state, {**metrics, "attackers": turn.theirs / max(1, turn.heard)}

    return algorithm._replace(round=round, phases=tuple(phases.values()))


def _kept(phase: Phase) -> Phase:
    slot = phase.model or phase.difference
    return phase if slot is None else replace(phase, reduce={**phase.reduce, slot: CollectUploads()})


class _Attacked(Exchanging):
    """A round that counts attackers' answers, and lets them collude."""

    def __init__(
        self,
        rnd: Round,
        phases: Mapping[str, Phase],
        attackers: Attackers,
        collude: Collude | None,
        algorithm: Algorithm,
    ):
        super().__init__(rnd, phases)
        self._attackers, self._collude = attackers, collude
        self._averaged = {
            p.name: isinstance(p.reduce.get(p.model or p.difference or ""), Mean) for p in algorithm.phases
        }
        self.theirs = self.heard = 0

    def _count(self, result: Reduced) -> Tensor:
        theirs = self._attackers.among(result.received)
        self.theirs, self.heard = self.theirs + int(theirs.sum()), self.heard + len(theirs)
        return theirs

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        result = super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps)
        theirs, slot = self._count(result), phase.model or phase.difference
        if self._collude is None or slot is None:
            return result
        sent = self._collude(result[slot], theirs, shared.send[slot] if phase.model else None)
        return result._replace(values={**result.values, slot: sent.mean() if self._averaged[phase.name] else sent})

    def buffered(self, phase: Phase, **given: Any) -> list[Buffered]:
        result = super().buffered(phase, **given)
        for part in result:
            self._count(part.reduced)
        return result
