"""Corrections for unequal participation: what is said of them before a run."""

from __future__ import annotations

from typing import Any, cast

import torch

from fedfleet.algorithms.options import ByName
from fedfleet.config.schema import Config
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Chances, chances, in_round
from fedfleet.simulator.fleet.online.labels import calibration_clients
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.population import Population

KEY = "algorithm.correction"
ALIKE = ("always", "bernoulli", "random_rate")
"""Models of availability under which all clients are heard equally often."""
VISITS = 5  # of a client, below which what it remembers is rarely of use


def correction(config: Config) -> Any:
    """Return the correction that an algorithm has; None for none."""
    found: Any = getattr(config.algorithm, "correction", None)
    return found if isinstance(found, ByName) and getattr(found, "kind", "none") != "none" else None


def advice(config: Config, algorithm: Algorithm, federation: Federation, population: Population) -> list[str]:
    """Return a line for what of a correction will rarely do. Raises ConfigError for clients that are never online."""
    how, clients = correction(config), population.size
    found = [] if algorithm.chances is None else _chances(config, federation, population)
    if algorithm.domains is not None and how is None and (kind := config.availability.kind) not in ALIKE:
        found.append(
            f"{KEY}=none: with availability.kind={kind!r} some clients may be heard more often than others; lambda then follows "
            f"who is heard, not only which domains are hard: known_p would correct both, and for afl memory"
        )
    if how is None or algorithm.domains is not None:
        return found
    invited, rounds = min(config.cohort.invite, clients), config.rounds
    if how.kind == "mifa" and how.start == "wait" and clients > invited * rounds:
        raise ConfigError(
            f"{KEY}.start='wait': the model waits until all {clients:,} clients have been heard, and {rounds:,} rounds of "
            f"{invited:,} are fewer: choose zeros or heard, or raise rounds"
        )
    if how.remembers and (visits := _online(federation, population) * invited * rounds / clients) < VISITS:
        found.append(
            f"{KEY}={how.kind!r}: clients remember what they last sent, and each is heard about {visits:.2g} times: known_p or "
            f"fedau with count=invitations do without"
        )
    if how.kind == "fedau" and how.count == "intervals" and 2 * invited <= clients:
        found.append(
            f"{KEY}.count='intervals': with {invited:,} of {clients:,} clients invited, steps are about {invited / clients:.2g} of "
            f"fedavg's until clients have been heard twice: invitations would start at once"
        )
    return found


def _online(federation: Federation, population: Population) -> float:
    """Return the share of invitations that find a client online; 1 where the model does not tell."""
    model = in_round(federation.availability, 0)
    return float(model.long_run(calibration_clients(population)).mean()) if isinstance(model, Chances) else 1.0


def _chances(config: Config, federation: Federation, population: Population) -> list[str]:
    """Return a line about clients that are online less often than the cap allows for. Raises ConfigError."""
    ids = calibration_clients(population)
    none = torch.zeros(len(ids), dtype=torch.float64)
    chances(federation.availability, ids, none, none, round=0)  # what cannot be divided by is said before the work
    p = cast(Chances, in_round(federation.availability, 0)).long_run(ids)
    cap = getattr(correction(config), "cap", torch.inf)
    rare = int((p * cap < 1).sum())
    if not rare:
        return []
    return [
        f"{KEY}.cap={cap:g}: {rare:,} of the {len(ids):,} clients looked at are online less often than one time in {cap:g} (the "
        f"least {float(p.min()):.2g}), and count less than they should: raise it for less bias and more noise"
    ]
