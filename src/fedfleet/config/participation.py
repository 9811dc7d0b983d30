"""Corrections for unequal participation: what is said of them before a run."""

from __future__ import annotations

import torch
from torch import Tensor

from fedfleet.algorithms.afl_variants import VariantOptions
from fedfleet.algorithms.domain_participation import ChanceCorrection, correction_of
from fedfleet.algorithms.options import AlgorithmOptions
from fedfleet.algorithms.participation import Correction
from fedfleet.config.availability import known
from fedfleet.config.schema import Config
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Availability, Chances, InRounds, chances, in_round
from fedfleet.simulator.fleet.online.labels import calibration_clients
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.population import Population

KEY = "algorithm.correction"
MOMENTS, APART_S = 60, 3607.3  # looked at for clients that rest; seconds between two, in step with no hour or day
VISITS = 2  # of a client, below which memories were measured to win back little


def correction(config: Config) -> Correction | ChanceCorrection | None:
    """Return the correction that an algorithm has; None for none."""
    options = config.algorithm
    how = correction_of(options) if isinstance(options, AlgorithmOptions) else None
    return None if how is None or how.kind == "none" else how


def without_all_heard(config: Config) -> str:
    """Return what to set where a correction divides by chances and not all who are online are heard; "" for nothing."""
    how = correction(config)
    if isinstance(how, Correction) and how.chances:
        return f"set {KEY}.chances=false, which divides by none"
    enough = ", which needs chances up to a factor"
    if isinstance(how, Correction):
        return f"set {KEY}.normalise=true{enough}"
    return f"set algorithm.estimator=ratio{enough}" if isinstance(config.algorithm, VariantOptions) else ""


def advice(config: Config, algorithm: Algorithm, federation: Federation, population: Population) -> list[str]:
    """Return a line for what of a correction will rarely do. Raises ConfigError for clients that are never online."""
    how, clients, online = correction(config), population.size, known(config.availability)
    result = [] if algorithm.chances is None else _chances(config, federation, population)
    if algorithm.domains is not None and how is None and (online is None or not online.alike):
        result.append(
            f"{KEY}=none: with availability.kind={config.availability.kind!r} some clients may be heard more often than others; "
            f"lambda then follows who is heard, not only which domains are hard: known_p would correct both, and for afl memory"
        )
    if how is None or algorithm.domains is not None:
        return result
    invited, rounds = min(config.cohort.size, clients), config.rounds
    if isinstance(how, Correction) and how.start == "wait" and clients > invited * rounds:
        raise ConfigError(
            f"{KEY}.start='wait': the model waits until all {clients:,} clients have been heard, and {rounds:,} rounds of "
            f"{invited:,} are fewer: choose zeros or completed, or raise rounds"
        )
    if isinstance(how, Correction) and how.pool == "domain" and population.summary().domains < 2:
        raise ConfigError(
            f"{KEY}.pool='domain': all clients are of one domain, and so would have one weight: set domains.kind, or choose client"
        )
    visits = _online(federation, population) * invited * rounds / clients
    if how.remembers and float(visits.mean()) < VISITS:
        result.append(
            f"{KEY}={how.kind!r}: clients remember what they last sent, and each is heard about {float(visits.mean()):.2g} times, "
            f"so many have nothing to remember: raise rounds or cohort.size"
        )
    elif never := int((visits < 1).sum()):
        result.append(
            f"{KEY}={how.kind!r}: {never:,} of the {len(visits):,} clients looked at are heard less than once in {rounds:,} rounds "
            f"(the rarest {float(visits.min()):.2g} times), and no correction knows what they would send: raise rounds"
        )
    if isinstance(how, Correction) and how.kind == "fedau" and how.count == "intervals" and 2 * invited <= clients:
        result.append(
            f"{KEY}.count='intervals': with {invited:,} of {clients:,} clients invited, steps are about {invited / clients:.2g} of "
            f"fedavg's until clients have been heard twice: invitations would start at once"
        )
    return result


def spread(federation: Federation, population: Population) -> str:
    """Return how often clients are online: least, mean and most of those looked at.

    "" where all always are, or where the model does not tell.
    """
    p = _online(federation, population)
    least, mean, most = float(p.min()), float(p.mean()), float(p.max())
    if least == 1:
        return ""
    alike = most - least < 1e-9
    return f"{least:.3g} of the time" if alike else f"{least:.3g} to {most:.3g} of the time, {mean:.3g} on average"


def _online(federation: Federation, population: Population) -> Tensor:
    """Return how likely an invitation finds each of the clients looked at online; one 1 where the model does not tell."""
    model = in_round(federation.availability, 0)
    return model.long_run(calibration_clients(population)) if isinstance(model, Chances) else torch.ones(1)


def _chances(config: Config, federation: Federation, population: Population) -> list[str]:
    """Return a line about clients that are online less often than the cap allows for. Raises ConfigError."""
    ids = calibration_clients(population)
    none = torch.zeros(len(ids), dtype=torch.float64)
    chances(federation.availability, ids, none, none, round=0)  # what cannot be divided by is said before the work
    p = _online(federation, population)
    how = correction(config)
    result, rests = [], none if how is None else _rests(federation.availability, ids)
    if how is not None and (resting := int(rests.count_nonzero())):
        result.append(
            f"{KEY}={how.kind!r}: {resting:,} of the {len(ids):,} clients looked at have no chance of being "
            f"online for a part of the time (the most {float(rests.max()):.2g} of it), when nobody stands for them, so they count "
            f"less than they should: a memory would stand for them"
        )
    cap = torch.inf if how is None else how.cap
    rare = int((p * cap < 1).sum())
    if not rare:
        return result
    return [
        *result,
        f"{KEY}.cap={cap:g}: {rare:,} of the {len(ids):,} clients looked at are online less often than one time in {cap:g} (the "
        f"least {float(p.min()):.2g}), and count less than they should: raise it for less bias and more noise",
    ]


def _rests(model: Availability | InRounds, clients: Tensor) -> Tensor:
    """Return for which part of the time (S,) clients have no chance of being online, as far as some moments tell."""
    result, lasting = torch.zeros(len(clients), dtype=torch.float64), torch.zeros(len(clients), dtype=torch.float64)
    for i in range(MOMENTS):
        now = in_round(model, i)
        if not isinstance(now, Chances) or not now.varies:
            return result
        result += now.chance(clients, torch.full_like(lasting, i * APART_S), lasting) == 0
    return result / MOMENTS
