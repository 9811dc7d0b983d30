"""What a run promises those who take part, in the order in which it is kept."""

from __future__ import annotations

from typing import Any, Protocol

from fedfleet.middleware.context import Context
from fedfleet.middleware.privacy.of_clients import guaranteed, hidden
from fedfleet.middleware.privacy.of_examples import promised_to_examples
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

    def told(self) -> str:
        """Return what a plan says."""
        ...

    def said(self, state: Any) -> dict[str, Any]:
        """Return what ``summary.json`` says."""
        ...


def promised(
    clients: Privacy | None, examples: ExamplePrivacy | None, algorithm: Algorithm, about: Context
) -> tuple[Algorithm, tuple[Promise, ...]]:
    """Return an algorithm that keeps the promises that are configured, and these. Raises ConfigError."""
    found: list[Promise] = []
    if clients is not None:
        to_clients = guaranteed(clients, about)
        algorithm = hidden(algorithm, to_clients, about)
        found.append(to_clients)
    if examples is not None:  # nearer to the engine, since what hides clients may not tell who was heard
        algorithm, to_examples = promised_to_examples(examples, algorithm, about)
        found.append(to_examples)
    return algorithm, tuple(found)
