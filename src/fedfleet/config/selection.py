"""What a user may write under ``selection``: whom the server invites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import Field

from fedfleet.algorithms.options import CohortOptions, Options
from fedfleet.simulator.fleet import selection as models
from fedfleet.simulator.fleet.policies import rounded_up


def asked(cohort: CohortOptions) -> int:
    """Return how many clients a phase invites, those that are selected over the number included."""
    return rounded_up(cohort.invite * cohort.over_select)


class Uniform(Options):
    """Every client alike."""


class Poisson(Options):
    """Each client for itself, ``cohort.invite`` of them in the mean."""


class ByExamples(Options):
    """In proportion to the clients' numbers of examples."""


class RoundRobin(Options):
    """One after the other in a random order."""


class PowerOfChoice(Options):
    """Of several candidates, those with the largest loss when last heard (Cho et al. 2020, rpow-d)."""

    factor: float = Field(default=2.0, ge=1)
    """Candidates drawn for each client invited, d / m."""


class Oort(Options):
    """Clients with much loss to offer and quick devices, and some never heard (after Lai et al. 2021, simplified)."""

    explore: float = Field(default=0.9, ge=0, le=1)
    """Share of the cohort that was never heard before, in the first round."""
    explore_least: float = Field(default=0.2, ge=0, le=1)
    decay: float = Field(default=0.98, gt=0, le=1)
    """Factor of that share a round, down to ``explore_least``."""
    penalty: float = Field(default=2.0, ge=0)
    """Exponent of (T / seconds) for clients slower than T, alpha."""
    pace: float = Field(default=0.5, gt=0, le=1)
    """Quantile of the seconds seen that makes T."""
    cutoff: float = Field(default=0.95, gt=0, le=1)


class Kind(NamedTuple):
    """A kind of selection: its options, how it is built from them and the seed, and whether it looks at every client."""

    options: type[Options]
    build: Callable[[Any, int], models.Selection]
    scans: bool = False


SELECTIONS: dict[str, Kind] = {
    "uniform": Kind(Uniform, lambda given, seed: models.Uniform()),
    "poisson": Kind(Poisson, lambda given, seed: models.Poisson(), scans=True),
    "examples": Kind(ByExamples, lambda given, seed: models.ByExamples(), scans=True),
    "round_robin": Kind(RoundRobin, lambda given, seed: models.RoundRobin(seed), scans=True),
    "power_of_choice": Kind(PowerOfChoice, lambda given, seed: models.PowerOfChoice(given.factor), scans=True),
    "oort": Kind(Oort, lambda given, seed: models.Oort(**given.model_dump())),
}
SCANNED = 10_000_000
"""Clients up to which a selection may look at all of them in each round."""
