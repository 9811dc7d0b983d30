"""Numbers of a client that its labels give, whatever the partition: looked at once a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.population import Population

CALIBRATED_ON = 20_000
"""Clients that are looked at before a run: all, or a fixed draw of so many where there are more."""
ROWS = 1 << 22  # of a population's padded rows, looked at together

LEARNT = 1 << 24
"""Examples of a population up to which all clients are looked at before the run, if labels are at hand."""

Statistic = Callable[[Tensor, Tensor], Tensor]
"""Class numbers (n,) of clients, one after another, and how many each has (C,) -> a number each (C,) float64."""


def calibration_clients(population: Population) -> Tensor:
    """Return the clients (n,) to look at first, ascending; no seed decides them, so runs of several seeds share them."""
    if population.size <= CALIBRATED_ON:
        return torch.arange(population.size)
    return rng.sample(rng.fold(rng.key(0), "calibration"), population.size, CALIBRATED_ON).sort().values


class Labels:
    """The labels of a population, without those below 0, which are none.

    ``classes`` is 1 + the largest among ``calibration_clients``; larger ones count as that.

    ``key`` is the option that asks for them, which errors name. Raises ConfigError where there are no class numbers.
    """

    def __init__(self, population: Population, key: str):
        self._population, self._key, self._clients = population, key, calibration_clients(population)
        parts = portions(population, self._clients)
        self.classes = 1 + max(0, *(int(labels(population, part, key)[0].max()) for part in parts))

    def mean_of(self, values: Tensor) -> Remembering:
        """Return the means of ``values`` (classes,) float64 over clients' examples: their inner product with the label shares."""

        def mean(y: Tensor, counts: Tensor) -> Tensor:
            owner, labelled = _owner(counts), (y >= 0).to(torch.float64)
            total, of = torch.zeros(2, len(counts), dtype=torch.float64)
            total.index_add_(0, owner, values[self._known(y)] * labelled)
            return total / of.index_add_(0, owner, labelled).clamp(min=1)

        return self._remembering(mean)

    def least(self) -> Remembering:
        """Return clients' least class numbers; the largest of all for a client without labels."""

        def least(y: Tensor, counts: Tensor) -> Tensor:
            result = torch.full((len(counts),), self.classes - 1, dtype=torch.int64)
            labelled = y >= 0
            result.scatter_reduce_(0, _owner(counts)[labelled], self._known(y[labelled]), "amin")
            return result.to(torch.float64)

        return self._remembering(least)

    def _known(self, y: Tensor) -> Tensor:
        return y.clamp(0, self.classes - 1)

    def _remembering(self, statistic: Statistic) -> Remembering:
        return remembering(self._population, self._clients, statistic, self._key)


def _owner(counts: Tensor) -> Tensor:
    return torch.arange(len(counts)).repeat_interleave(counts)


def remembering(population: Population, clients: Tensor, statistic: Statistic, key: str) -> Remembering:
    """Return a statistic of clients' labels, known of some, or of all where they are few and labels are at hand."""

    def ask(ids: Tensor) -> Tensor:
        return torch.cat([statistic(*labels(population, part, key)) for part in portions(population, ids)])

    everybody = population.size * population.summary().mean_examples <= LEARNT
    if everybody and hasattr(population, "labels"):
        clients = torch.arange(population.size)
    return Remembering(ask, clients, ask(clients))


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


def portions(population: Population, ids: Tensor) -> Sequence[Tensor]:
    """Cut clients (n,), at least one, so that the data of a portion fit in memory."""
    largest = int(population.num_examples(ids).max())
    return ids.split(min(8192, max(1, ROWS // max(1, largest))))


def labels(population: Population, ids: Tensor, key: str) -> tuple[Tensor, Tensor]:
    """Return class numbers (n,) int64 of clients, one after another, and the counts (C,). Raises ConfigError naming a key."""
    alone = getattr(population, "labels", None)  # where a label is at hand without the example it belongs to
    if alone is not None and (result := alone(ids)) is not None:
        y, counts = result
    else:
        local = population.local_data(ids)
        y, counts = local.data.get("y"), local.counts
        if y is not None:
            y = y[local.rows[torch.arange(local.rows.shape[1]) < counts[:, None]]]
    if y is None or y.dim() != 1 or y.dtype.is_floating_point:
        raise ConfigError(f"{key}: the examples of this population have no class numbers y: choose another kind")
    return y.to(torch.int64), counts
