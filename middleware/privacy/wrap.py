"""Wrap an algorithm in the differential privacy that is configured: of clients first, then of examples."""

from __future__ import annotations

from typing import Any, Protocol

from fedfleet.middleware.context import Context
from fedfleet.middleware.privacy.client_dp import client_dp, hidden
from fedfleet.middleware.privacy.example_dp import example_dp
from fedfleet.middleware.privacy.options import ExamplePrivacy, Privacy
from fedfleet.simulator.algorithm import Algorithm


class Promise(Protocol):
    """A promise of (epsilon, delta)-differential privacy, and what of it is spent; ``state`` is the algorithm's.

    ``key`` is its section in a configuration and in ``summary.json``, ``column`` what evaluations call what is spent.
    """

    key: str
    column: str

    @property
    def budget(self) -> float | None:
        """Epsilon that is not to be exceeded."""
        ...

    def epsilon(self, state: Any) -> float:
        """Return what has been spent."""
        ...

    def allows(self, state: Any) -> bool:
        """Say whether another round stays within the budget."""
        ...

    def plan_text(self) -> str:
        """Return what a plan says."""
        ...

    def summary(self, state: Any) -> dict[str, Any]:
        """Return what ``summary.json`` says."""
        ...


def promised(
    clients: Privacy | None, examples: ExamplePrivacy | None, algorithm: Algorithm, about: Context
) -> tuple[Algorithm, tuple[Promise, ...]]:
    """Return an algorithm that keeps the promises that are configured, and these. Raises ConfigError."""
    result: list[Promise] = []
    if clients is not None:
        to_clients = client_dp(clients, about)
        algorithm = hidden(algorithm, to_clients, about)
        result.append(to_clients)
    if examples is not None:  # nearer to the engine, since what hides clients may not tell who was heard
        algorithm, to_examples = example_dp(examples, algorithm, about)
        result.append(to_examples)
    return algorithm, tuple(result)
