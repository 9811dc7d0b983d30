"""Optimisers of clients that last: a client keeps the state of its optimiser from one of its rounds to its next.

It is part of the client's own state (``Phase.client_state``), so a client that is not heard keeps it as it was. The model that a
round begins with is another one by then. A running direction or moments of the old one are used as they are, as codes do whose
clients own a ``torch.optim`` object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from fedfleet.algorithms.local import Training
from fedfleet.algorithms.wrapping import WrapperOptions
from fedfleet.simulator.author import (
    Algorithm,
    ConfigError,
    Exchanging,
    Key,
    Lasting,
    LocalWork,
    Message,
    Personal,
    Phase,
    Round,
    Tree,
    rng,
)

Fresh = Callable[[Mapping[str, Any]], Tree]


def persists(options: Any) -> str | None:
    """Return the key by which clients keep their optimiser's state; None where it starts afresh in every round."""
    of, key = (options.of, "algorithm.of") if isinstance(options, WrapperOptions) else (options, "algorithm")
    how = getattr(of, "client_optimizer", None)
    return f"{key}.client_optimizer.state" if getattr(how, "state", "reset") == "persist" else None


def reset(options: Any) -> Any:
    """Return the options with optimisers that start afresh in every round."""
    if isinstance(options, WrapperOptions):
        return options.model_copy(update={"of": reset(options.of)})
    return options.model_copy(
        update={"client_optimizer": options.client_optimizer.model_copy(update={"state": "reset"})}
    )


def lasting(options: Any, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm whose clients' optimisers last, if its options say so.

    Raises ConfigError where it has not one phase alone in which clients train.
    """
    key = persists(options)
    if key is None:
        return algorithm
    training = [p for p in algorithm.phases if isinstance(p.work, Training)]
    if len(training) != 1:
        raise ConfigError(
            f"{key}='persist': {len(training)} phases of the algorithm have work that says where its optimiser's state is, and "
            f"one is needed: make it by local_training, or leave it out"
        )
    (train,) = training
    fresh = _fresh(train)
    phases = {p.name: _phase(p, fresh) for p in algorithm.phases}

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        return algorithm.round(state, cast(Round, Exchanging(rnd, phases)))  # the rest of it is the round's own

    personal = algorithm.personal and _personal(algorithm.personal, train, fresh)
    return algorithm._replace(round=round, phases=tuple(phases.values()), personal=personal)


def _fresh(train: Phase) -> Fresh:
    """Return what makes the state of a client that has not trained yet."""

    def fresh(shared: Mapping[str, Any]) -> Lasting:
        mine = None if train.client_state is None else train.client_state(shared)
        return Lasting(mine, _local(train.work.client_init(shared, mine, None, rng.key(0))).optimizer)

    return fresh


def _phase(phase: Phase, fresh: Fresh) -> Phase:
    if not isinstance(phase.work, Training) and phase.client_state is None:
        return phase
    work = _within(phase.work, continues=isinstance(phase.work, Training), own=True)
    return replace(phase, work=work, client_state=fresh)


def _personal(personal: Personal, train: Phase, fresh: Fresh) -> Personal:
    """Return how clients' own models come about: where by a round's training, its optimiser goes on as in a round."""
    continues, own = personal.work.loops == train.work.loops, personal.client_state is not None
    if not continues and not own:
        return personal
    return personal._replace(work=_within(personal.work, continues=continues, own=own), client_state=fresh)


def _within(work: LocalWork, *, continues: bool, own: bool) -> LocalWork:
    """Return work whose state is part of a ``Lasting`` one.

    Args:
        work: an algorithm's.
        continues: whether its optimiser begins with the state that was kept, and leaves one.
        own: whether it has a state of its own.

    """

    def client_init(shared: Mapping[str, Any], client_state: Lasting, client_input: Tree, key: Key) -> Tree:
        carry = work.client_init(shared, client_state.client_state if own else None, client_input, key)
        if not continues:
            return carry
        local = _local(carry)._replace(optimizer=client_state.optimizer)
        return carry._replace(local=local) if hasattr(carry, "local") else local

    def client_final(
        shared: Mapping[str, Any], client_state: Lasting, client_input: Tree, carry: Any
    ) -> tuple[Message, Lasting]:
        message, mine = work.client_final(shared, client_state.client_state if own else None, client_input, carry)
        optimizer = _local(carry).optimizer if continues else client_state.optimizer
        return message, Lasting(mine if own else client_state.client_state, optimizer)

    return replace(work, client_init=client_init, client_final=client_final)


def _local(carry: Any) -> Any:
    return getattr(carry, "local", carry)
