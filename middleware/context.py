"""The run as features see it, beside their own options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.facts import Break
from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm, Problem, Task


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A section that names a model of the fleet.

    Attributes:
        name: its kind.
        own: whether it is an author's own, of which nothing more is known.
        follows: what of clients it goes by, such as "labels"; None where that is chance and time alone.
        clocked: whether it goes by the clock, hence by how long clients took that were asked before.
        fails: whether clients with more to do fail more often.

    """

    name: str
    own: bool = False
    follows: str | None = None
    clocked: bool = False
    fails: bool = False


@dataclass(frozen=True, kw_only=True)
class Context:
    """A run, as features see it.

    Attributes:
        name: the algorithm's, as messages have it.
        rounds: T.
        cohort: whom the server invites and waits for.
        invited: clients that a phase invites, those that are selected over the number included.
        selection: how they are selected.
        availability, devices: models of who is online, and how fast.
        task, problem: what is learnt, and the federation.
        max_examples: of a client, the most.
        domains: how many there are.
        tried: what a trial of an algorithm on two clients shows.
        breaks: what of the run takes facts away.
        aborts: why a round may be aborted although clients have answered, where another feature makes it so.

    """

    name: str
    rounds: int
    cohort: CohortOptions
    invited: int
    selection: str
    availability: Kind
    devices: Kind
    task: Task
    problem: Problem
    max_examples: int
    domains: int
    tried: Callable[[Algorithm], Seen]
    breaks: tuple[Break, ...] = ()
    aborts: str | None = None
