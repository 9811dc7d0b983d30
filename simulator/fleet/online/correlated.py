"""Clients that are online more or less often for what they hold: by their labels, or by how much they hold.

    logit p_c = a + strength s_c,   with s_c in [-1, 1] the client's propensity, and a such that the mean of p_c is `rate`

so that a dropout that depends on the data can be compared with one that does not, at one mean rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.online.labels import LEARNT, Remembering, labels, portions
from fedfleet.simulator.population import Population

KEY = "availability.kind='label_correlated'"

Propensity = Callable[[Tensor], Tensor]
"""Clients (S,) int64 -> s (S,) float64 in [-1, 1]."""


@dataclass(frozen=True)
class Correlated:
    """Each client is online with a probability of its own, afresh in every phase.

    Attributes:
        propensity: s of clients.
        intercept, strength: a and the factor of s in the logit.

    """

    propensity: Propensity
    intercept: float
    strength: float
    varies: ClassVar[bool] = False

    def rate(self, clients: Tensor) -> Tensor:
        """Return p_c (S,) float64."""
        return torch.sigmoid(self.intercept + self.strength * self.propensity(clients))

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return independent draws, one a client; the same uniforms as Bernoulli's."""
        return rng.bernoulli(rng.fold(key, "online", clients), self.rate(clients))

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return p_c: one draw answers both questions of a phase."""
        return self.rate(clients)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return p_c."""
        return self.rate(clients)


def calibrated(propensity: Propensity, clients: Tensor, rate: float, strength: float) -> Correlated:
    """Return the model whose mean p over these clients is ``rate``, above 0 and at most 1."""
    s = propensity(clients) * strength
    if rate == 1:
        return Correlated(propensity, torch.inf, strength)
    logit = float(torch.logit(torch.tensor(rate, dtype=torch.float64)))
    low, high = logit - float(s.max()), logit - float(s.min())  # everybody at most, at least, at the rate
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if float(torch.sigmoid(middle + s).mean()) < rate else (low, middle)
    return Correlated(propensity, high, strength)


def by_size(population: Population, clients: Tensor) -> Propensity:
    """Return s = 2 (share of ``clients`` that hold less) - 1, those that hold as much counted half: larger clients have more."""
    sizes = population.num_examples(clients).sort().values

    def propensity(ids: Tensor) -> Tensor:
        mine = population.num_examples(ids)
        below = torch.searchsorted(sizes, mine) + torch.searchsorted(sizes, mine, right=True)
        return below.to(torch.float64) / len(sizes) - 1

    return propensity


def by_label(population: Population, clients: Tensor, classes: Sequence[int] | None = None) -> Propensity:
    """Return s from the class numbers of a client's examples.

    Without ``classes``: s = 2 (mean class number) / (largest class number among ``clients``) - 1. With: s = 1 - 2 (share of
    these classes among the client's examples), so that who holds them is online less, for a strength above 0.

    Raises ConfigError where there are no class numbers, or those classes are nobody's.
    """
    chosen = None if classes is None else torch.tensor(sorted(set(classes)))

    def statistic(y: Tensor, counts: Tensor) -> Tensor:
        """Return mean class numbers, or shares of the classes, (C,) float64."""
        upto = (y if chosen is None else torch.isin(y, chosen)).cumsum(0)
        ends = counts.cumsum(0)
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), upto])[torch.stack([ends - counts, ends])].diff(dim=0)[0]
        return sums.to(torch.float64) / counts.clamp(min=1)

    def ask(ids: Tensor) -> Tensor:
        return torch.cat([statistic(*labels(population, part, KEY)) for part in portions(population, ids)])

    result, largest, held = [], 0, set[int]()
    for part in portions(population, clients):
        y, counts = labels(population, part, KEY)
        result.append(statistic(y, counts))
        largest = max(largest, int(y.max()))
        held |= set() if chosen is None else set(chosen[torch.isin(chosen, y)].tolist())
    if largest == 0 and classes is None:
        raise ConfigError(f"{KEY}: all examples are of class 0: there is nothing to follow")
    if missing := sorted(set(classes or ()) - held):
        who = "no client" if len(clients) == population.size else f"none of the {len(clients):,} clients looked at"
        raise ConfigError(
            f"availability.classes={list(classes or ())}: {who} holds class {missing[0]}: leave it out (class numbers go up to "
            f"{largest})"
        )
    values, everybody = torch.cat(result), population.size * population.summary().mean_examples <= LEARNT
    if len(clients) < population.size and everybody and hasattr(population, "labels"):
        clients = torch.arange(population.size)
        values = ask(clients)
    known = Remembering(ask, clients, values)
    return lambda ids: (2 * known(ids) / largest - 1 if classes is None else 1 - 2 * known(ids)).clamp(-1, 1)
