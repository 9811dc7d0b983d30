"""An algorithm whose clients' messages pass transforms on their way, whatever the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm, Exchanging, Round
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.uplink import Remembering, nothing_owed
from fedfleet.simulator.work import Transform


def transformed(algorithm: Algorithm, up: tuple[Transform, ...], seen: Seen) -> Algorithm:
    """Return an algorithm whose clients' messages pass ``up``, after what the algorithm itself has on their way.

    Where a transform has feedback, what a client owes is part of its state, a memory of its own for each phase that was seen.
    """
    phases = {p.name: replace(p, uplink=(*p.uplink, *up)) for p in algorithm.phases}
    personal = algorithm.personal
    if any(t.error_feedback for p in phases.values() for t in p.uplink):
        nothing = {name: nothing_owed(p.uplink, seen.sent[name]) for name, p in phases.items() if name in seen.sent}
        memory = {name: owed for name, owed in nothing.items() if any(owed.values())}
        phases = {name: replace(p, client_state=_remembering(p.client_state, memory)) for name, p in phases.items()}
        if personal is not None and personal.client_state is not None:
            personal = personal._replace(client_state=_remembering(personal.client_state, memory))

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        return algorithm.round(state, cast(Round, Exchanging(rnd, phases)))  # the rest of it is the round's own

    return algorithm._replace(round=round, phases=tuple(phases.values()), personal=personal)


def _remembering(
    client_state: Callable[[Mapping[str, Any]], Tree] | None, memory: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Tree]:
    return lambda shared: Remembering(None if client_state is None else client_state(shared), memory)
