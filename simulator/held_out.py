"""Clients that keep a share of their examples from their work, to be evaluated on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfleet.simulator.population import Held, LocalData, Population, Summary, shuffled

EXACT_UP_TO = 1_000_000
"""Clients up to which the mean number of examples is taken over all of them."""


@dataclass(frozen=True)
class HeldOut:
    """A population in which client work sees all but floor(share n + 1/2), at least one, of a client's n examples.

    Which ones is drawn from ``seed`` and the client alone. A client has to have two.
    """

    whole: Population
    share: float
    seed: int

    @property
    def size(self) -> int:
        """Number of clients, N."""
        return self.whole.size

    def held(self, counts: Tensor) -> Tensor:
        """Return how many of so many examples are held out, int64 of their shape."""
        return torch.floor(counts.double() * self.share + 0.5).long().clamp(min=1).minimum(counts - 1)

    def num_examples(self, ids: Tensor) -> Tensor:
        """Return the number of examples that each client works on."""
        counts = self.whole.num_examples(ids)
        return counts - self.held(counts)

    def summary(self) -> Summary:
        """Return what is known of all clients; of very many the mean is that of all examples, less the share."""
        result = self.whole.summary()
        least, most = (n - int(self.held(torch.tensor(n))) for n in (result.min_examples, result.max_examples))
        mean = result.mean_examples * (1 - self.share)
        if self.size <= EXACT_UP_TO:
            mean = float(self.num_examples(torch.arange(self.size)).double().mean())
        return Summary(least, most, mean, result.domains)

    def domains(self, ids: Tensor) -> Tensor:
        """Return the domain of each client."""
        return self.whole.domains(ids)

    def grouped(self, domain: Tensor) -> HeldOut:
        """Return the population with other domains."""
        return replace(self, whole=self.whole.grouped(domain))

    def to(self, device: torch.device) -> HeldOut:
        """Return the population with its tensors on a device."""
        return replace(self, whole=self.whole.to(device))

    def local_data(self, ids: Tensor) -> LocalData:
        """Return what clients work on, and what is held out of it."""
        local = self.whole.local_data(ids)
        held = self.held(local.counts)
        order = shuffled(self.seed, "held_out", ids, local.counts, local.rows.shape[1])
        rows, kept = local.rows.gather(1, order), local.counts - held
        return local._replace(
            rows=_window(rows, torch.zeros_like(kept), kept), counts=kept, held=Held(_window(rows, kept, held), held)
        )


def _window(rows: Tensor, first: Tensor, counts: Tensor) -> Tensor:
    """Return ``counts`` (C,) of the rows (C, n) from ``first`` (C,) on, padded with the first of them."""
    at = torch.arange(int(counts.max()), device=rows.device)
    return rows.gather(1, first[:, None] + torch.where(at < counts[:, None], at, torch.zeros_like(at)))
