"""Clients that are online more or less often for what they hold: by their labels, or by how much they hold.

    logit p_c = a + strength s_c,   with s_c in [-1, 1] the client's propensity, and a such that the mean of p_c is `rate`

so that a dropout that depends on the data can be compared with one that does not, at one mean rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.population import Population

CALIBRATED_ON = 20_000
"""Clients over which the mean of p_c is taken: all, or a fixed draw of so many where there are more."""
ROWS = 1 << 22  # of a population's padded rows, looked at together

LEARNT = 1 << 24
"""Examples of a population up to which all clients are looked at before the run, if labels are at hand."""

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


def calibration_clients(population: Population) -> Tensor:
    """Return the clients (n,) to calibrate on, ascending; no seed decides them, so runs of several seeds share the p_c."""
    if population.size <= CALIBRATED_ON:
        return torch.arange(population.size)
    return rng.sample(rng.fold(rng.key(0), "calibration"), population.size, CALIBRATED_ON).sort().values


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
        return torch.cat([statistic(*_labels(population, part)) for part in _portions(population, ids)])

    found, largest, held = [], 0, set[int]()
    for part in _portions(population, clients):
        y, counts = _labels(population, part)
        found.append(statistic(y, counts))
        largest = max(largest, int(y.max()))
        held |= set() if chosen is None else set(chosen[torch.isin(chosen, y)].tolist())
    if largest == 0 and classes is None:
        raise ConfigError(
            "availability.kind='label_correlated': all examples are of class 0: there is nothing to follow"
        )
    if missing := sorted(set(classes or ()) - held):
        who = "no client" if len(clients) == population.size else f"none of the {len(clients):,} clients looked at"
        raise ConfigError(
            f"availability.classes={list(classes or ())}: {who} holds class {missing[0]}: leave it out (class numbers go up to "
            f"{largest})"
        )
    values, everybody = torch.cat(found), population.size * population.summary().mean_examples <= LEARNT
    if len(clients) < population.size and everybody and hasattr(population, "labels"):
        clients = torch.arange(population.size)
        values = ask(clients)
    known = Remembering(ask, clients, values)
    return lambda ids: (2 * known(ids) / largest - 1 if classes is None else 1 - 2 * known(ids)).clamp(-1, 1)


class Remembering:
    """Asks for a number of a client once: it is a client's own, and looking at its data is dear.

    Args:
        ask: clients (n,) int64, at least one -> (n,) float64.
        ids, values: what is known already, ids ascending.

    """

    def __init__(self, ask: Callable[[Tensor], Tensor], ids: Tensor, values: Tensor):
        self._ask, self._ids, self._values = ask, ids.numpy(), values.numpy()

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the numbers (n,), asking for those not known."""
        wanted = ids.numpy()
        place = np.searchsorted(self._ids, wanted)
        unknown = self._ids.take(place, mode="clip") != wanted
        if unknown.any():
            self._learn(np.unique(wanted[unknown]))
            place = np.searchsorted(self._ids, wanted)
        return torch.from_numpy(self._values[place])

    def _learn(self, new: NDArray[np.int64]) -> None:
        values = self._ask(torch.from_numpy(new)).numpy()
        ids, values = np.concatenate([self._ids, new]), np.concatenate([self._values, values])
        order = ids.argsort(kind="stable")
        self._ids, self._values = ids[order], values[order]


def _portions(population: Population, ids: Tensor) -> Sequence[Tensor]:
    """Cut clients (n,), at least one, so that the data of a portion fit in memory."""
    largest = int(population.num_examples(ids).max())
    return ids.split(min(8192, max(1, ROWS // max(1, largest))))


def _labels(population: Population, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return class numbers (n,) int64 of clients, one after another, and the counts (C,). Raises ConfigError."""
    alone = getattr(population, "labels", None)  # where a label is at hand without the example it belongs to
    if alone is not None and (found := alone(ids)) is not None:
        y, counts = found
    else:
        local = population.local_data(ids)
        y, counts = local.data.get("y"), local.counts
        if y is not None:
            y = y[local.rows[torch.arange(local.rows.shape[1]) < counts[:, None]]]
    if y is None or y.dim() != 1 or y.dtype.is_floating_point:
        raise ConfigError(
            "availability.kind='label_correlated': the examples of this population have no class numbers y: choose another kind"
        )
    return y.to(torch.int64), counts
