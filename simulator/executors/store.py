"""Ray's object store, and what is said where it is full."""

from __future__ import annotations

from typing import Any

from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.cluster import ray
from fedfleet.simulator.executors.pool import NO_ROOM, why


def put(value: Any) -> Any:
    """Put a value into the object store; return Ray's reference. Raises FedfleetError where there is no room."""
    try:
        return ray.put(value)
    except NO_ROOM as e:
        raise full(e) from e


def full(error: Exception) -> FedfleetError:
    """Return what a user is told of a store without room."""
    return FedfleetError(
        f"executor: {why(error)}, and so is the disk it spills to: free some space, lower cohort.size, or take a smaller model"
    )
