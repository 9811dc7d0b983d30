"""Learning rates that fall within a round, with a client's epochs (``lr_schedule.by: epoch``).

In round t, a loop of E epochs has in its epoch e the rate of time t E + e. So the rate is a function of the round and the epoch:
whoever was away goes on where all others are. The server sends the share of the round's first rate that each epoch has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from fedfleet.algorithms.local import Training
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    Cohort,
    ConfigError,
    Exchanging,
    Key,
    LocalLoop,
    Message,
    Ops,
    Phase,
    Reduced,
    Round,
    StepInfo,
    T,
    Tree,
)


def name_of(loop: int, epoch: int) -> str:
    """Return the name of the number that clients are sent: the share of the round's first rate that an epoch of a loop has."""
    return f"lr_share_{loop}_{epoch}"


def by_epoch(options: Any, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm whose clients' rates fall with their epochs, if its options say so.

    Raises ConfigError where its rates are of rounds alone.
    """
    schedule = getattr(options, "lr_schedule", None)
    if schedule is None or schedule.by == "round":
        return algorithm
    training = [p for p in algorithm.phases if isinstance(p.work, Training)]
    if len(training) != 1 or not options.rates_by_epoch:
        raise ConfigError(
            "algorithm.lr_schedule.by='epoch': the algorithm has rates of rounds alone: choose round, or fedavg"
        )
    (train,) = training
    loops = train.work.loops
    if any(loop.batches.epochs is None for loop in loops):
        raise ConfigError("algorithm.lr_schedule.by='epoch': clients also work for steps: give epochs, or choose round")
    phases = {p.name: p for p in algorithm.phases}
    falling = tuple(_falling(i, loop) for i, loop in enumerate(loops))
    phases[train.name] = replace(train, work=replace(train.work, loops=falling))

    def told(shared: Message, t: int) -> Message:
        first = schedule.at(t * options.epochs, options.epochs)
        shares = {
            name_of(i, e): schedule.at(t * _epochs(loop) + e, _epochs(loop)) / first
            if first
            else 1.0  # all that follow are 0, too
            for i, loop in enumerate(loops)
            for e in range(_epochs(loop))
        }
        return replace(shared, config={**shared.config, **shares})

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        return algorithm.round(state, cast(Round, _Telling(rnd, phases, train.name, told)))

    personal = algorithm.personal
    if personal is not None and personal.work.loops == loops:
        message = personal.message
        personal = personal._replace(
            work=replace(personal.work, loops=falling), message=lambda state, t: told(message(state, t), t)
        )
    return algorithm._replace(round=round, phases=tuple(phases.values()), personal=personal)


def _epochs(loop: LocalLoop) -> int:
    return loop.batches.epochs or 1


def _falling(place: int, loop: LocalLoop) -> LocalLoop:
    """Return a loop whose steps see the rates of their epoch."""

    def step(ops: Ops, shared: Mapping[str, Any], carry: Tree, batch: Batch, at: StepInfo, key: Key) -> Tree:
        like = T.leaves(carry)[0]
        numbers = (shared[name_of(place, e)] for e in range(_epochs(loop)))
        shares = torch.stack([torch.as_tensor(s, dtype=like.dtype, device=like.device) for s in numbers])
        share = shares.index_select(0, at.epoch.reshape(1)).squeeze(0)
        return loop.step(ops, {**shared, "lr": T.scale(share, shared["lr"])}, carry, batch, at, key)

    return replace(loop, step=step)


class _Telling(Exchanging):
    """A round in which the clients that train are told the rates of their epochs."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase], name: str, told: Any):
        super().__init__(rnd, phases)
        self._name, self._told = name, told

    def _sent(self, phase: Phase, shared: Message) -> Message:
        """Return what a phase's clients are sent: in training the rates of their epochs, too."""
        return self._told(shared, self._round.index) if phase.name == self._name else shared

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Do as the round does, with the phase of that name."""
        shared = self._sent(phase, shared)
        return super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps)

    def chances(self, phase: Phase, *, shared: Message, **given: Any) -> Any:
        """Do as the round does, of the same message as will be sent."""
        return self._round.chances(phase, shared=self._sent(phase, shared), **given)

    def buffered(self, phase: Phase, *, messages: Mapping[int, Message], **given: Any) -> Any:
        """Do as the round does, with the phase of that name."""
        return super().buffered(phase, messages={t: self._told(m, t) for t, m in messages.items()}, **given)
