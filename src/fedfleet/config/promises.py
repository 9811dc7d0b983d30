"""What a run promises those who take part, in the order in which it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fedfleet.config.example_guarantee import promised_to_examples
from fedfleet.config.guarantee import guaranteed, hidden
from fedfleet.config.schema import Config
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.driver.transformed import Seen


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
    config: Config, algorithm: Algorithm, task: Task, problem: Problem, seen: Callable[[Algorithm], Seen]
) -> tuple[Algorithm, tuple[Promise, ...]]:
    """Return an algorithm that keeps the promises that are configured, and these. Raises ConfigError."""
    found: list[Promise] = []
    if config.privacy is not None:
        to_clients = guaranteed(config, algorithm, task, problem.clients)
        algorithm = hidden(algorithm, to_clients, seen, config.algorithm.name)
        found.append(to_clients)
    if config.example_privacy is not None:  # nearer to the engine, since what hides clients may not tell who was heard
        algorithm, to_examples = promised_to_examples(config, algorithm, task, problem, seen)
        found.append(to_examples)
    return algorithm, tuple(found)
