"""Options of ``selection``: whom the server invites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet import selection as models
from fedfleet.simulator.fleet.policies import rounded_up
from fedfleet.simulator.registry import Entry, Options, Registry


def asked(cohort: CohortOptions) -> int:
    """Return how many clients a phase invites, those that are selected over the number included."""
    return rounded_up(cohort.size * cohort.over_select)


class Selection(Options):
    """A kind of selection."""

    scans: ClassVar[bool] = False
    """Whether it looks at every client in each round."""
    looks: ClassVar[bool] = False
    """Whether it looks at clients' losses."""
    even: ClassVar[bool] = False
    """Whether it asks all clients equally often."""
    sizes: ClassVar[bool] = False
    """Whether whom it asks tells how much they hold."""

    def check(self, invited: int, clients: int) -> None:
        """Refuse cohorts that it cannot draw of so many clients. Raises ConfigError."""


class Uniform(Selection):
    """Every client alike."""

    even: ClassVar[bool] = True


class Poisson(Selection):
    """Each client for itself, ``cohort.size`` of them in the mean."""

    scans: ClassVar[bool] = True
    even: ClassVar[bool] = True


class ByExamples(Selection):
    """In proportion to the clients' numbers of examples."""

    scans: ClassVar[bool] = True
    sizes: ClassVar[bool] = True


class RoundRobin(Selection):
    """One after the other in a random order."""

    scans: ClassVar[bool] = True
    even: ClassVar[bool] = True


class PowerOfChoice(Selection):
    """Of several candidates, those with the largest loss when last heard (Cho et al. 2020, rpow-d)."""

    scans: ClassVar[bool] = True
    looks: ClassVar[bool] = True

    factor: float = Field(default=2.0, ge=1)
    """Candidates drawn for each client invited, d / m."""


class Oort(Selection):
    """Clients with much loss to offer and quick devices, and some never heard (after Lai et al. 2021, simplified)."""

    looks: ClassVar[bool] = True
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


class Tifl(Selection):
    """Some of one tier of clients that are as fast (Chai et al. 2020, TiFL, as FLGo has it)."""

    scans: ClassVar[bool] = True
    looks: ClassVar[bool] = True

    tiers: int = Field(default=5, ge=1)
    """Tiers of as many clients each, T."""
    interval: int = Field(default=10, ge=1)
    """Cohorts after which tiers of larger loss get larger chances, I."""
    credits: int | None = Field(default=None, ge=1)
    """Cohorts that a tier may be drawn for until all have been for as many; null: any."""

    def check(self, invited: int, clients: int) -> None:
        """Refuse cohorts that are larger than a tier. Raises ConfigError."""
        if self.tiers * invited > clients:
            raise ConfigError(
                f"selection.tiers={self.tiers}: a tier of {clients:,} clients is smaller than a cohort of {invited:,}: lower it, "
                f"or cohort.size"
            )


ROWS: dict[str, Entry[Callable[[Any, int], models.Selection]]] = {
    "uniform": Entry(Uniform, lambda given, seed: models.Uniform()),
    "poisson": Entry(Poisson, lambda given, seed: models.Poisson()),
    "examples": Entry(ByExamples, lambda given, seed: models.ByExamples()),
    "round_robin": Entry(RoundRobin, lambda given, seed: models.RoundRobin(seed)),
    "power_of_choice": Entry(PowerOfChoice, lambda given, seed: models.PowerOfChoice(given.factor)),
    "oort": Entry(Oort, lambda given, seed: models.Oort(**given.model_dump(exclude={"kind"}))),
    "tifl": Entry(Tifl, lambda given, seed: models.Tifl(seed, given.tiers, given.interval, given.credits)),
}
SELECTIONS = Registry("selection", ROWS, default="uniform", group="fedfleet.selections")
SCANNED = 10_000_000
"""Clients up to which a selection may look at all of them in each round."""
