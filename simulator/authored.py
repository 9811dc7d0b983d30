"""Checks of what an author's functions return, which say what to return in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.errors import of_kind
from fedfleet.simulator.work import Message


def pair(found: Any, whose: str, wanted: str) -> tuple[Any, Any]:
    """Return the two things that a function returned. Raises ValueError where it returned anything else."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"{whose} returned {of_kind(found)}: return {wanted}")
    return found


def sent(found: Any) -> tuple[Message, Any]:
    """Return the message and the next state that ``client_final`` returned. Raises ValueError for anything else."""
    message, state = pair(found, "client_final", "(Message(send=…), the client's next state, or None)")
    if not isinstance(message, Message):
        raise ValueError(f"client_final returned {of_kind(message)} as its message: return Message(send={{…}})")
    return message, state


def state(found: Any) -> Any:
    """Return the state that ``Phase.client_state`` made. Raises ValueError where a leaf of it is no tensor."""
    for leaf in T.leaves(found):
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"Phase.client_state made {of_kind(leaf)}: a client's state is a tree of tensors, as torch.zeros(())"
            )
    return found


def direction(given: Any, z: Any) -> Any:
    """Return the direction of a step. Raises ValueError where it is all that ``ops.grad`` returned."""
    if isinstance(given, tuple) and isinstance(z, Mapping):
        raise ValueError("ops.grad returns (direction, aux), and ops.step takes the first: direction, _ = ops.grad(…)")
    return given


def asked(shared: Any, cohort: Any) -> None:
    """Raise ValueError where ``rnd.map_reduce`` is not called with a message and a cohort."""
    if not isinstance(shared, Message):
        raise ValueError(f"rnd.map_reduce: shared is {of_kind(shared)}: give Message(send={{…}})")
    if not hasattr(cohort, "clients"):
        raise ValueError(f"rnd.map_reduce: cohort is {of_kind(cohort)}: give rnd.invite(size)")
