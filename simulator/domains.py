"""Domains: a partition of the clients, of which each belongs to one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key


class Domains(Protocol):
    """Which clients make up domain 0, ..., p - 1."""

    @property
    def examples(self) -> Tensor:
        """Examples of each domain, m_k: (p,) int64."""
        ...

    def of(self, clients: Tensor) -> Tensor:
        """Return the domain of each client: int64 of the shape of ``clients``."""
        ...

    def draw(self, domains: Tensor, key: Key) -> Tensor:
        """Return a client of each of the domains (S,), drawn with a chance in proportion to its number of examples."""
        ...


class Grouped:
    """Domains of clients that are looked at once, the first time they are asked for: 24 bytes a client.

    Args:
        clients: N.
        count: of domains, p.
        of: the domain of each of some clients.
        num_examples: the number of examples of each of some clients.

    """

    def __init__(
        self, clients: int, count: int, of: Callable[[Tensor], Tensor], num_examples: Callable[[Tensor], Tensor]
    ):
        self.clients, self.count = clients, count
        self._of, self._num_examples = of, num_examples

    def of(self, clients: Tensor) -> Tensor:
        """Return the domain of each client."""
        return self._of(clients)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return clients by domain (N,), the sum of examples up to each (N,), the examples of each domain (p,)."""
        everybody = torch.arange(self.clients)
        domain, examples = self._of(everybody), self._num_examples(everybody)
        order = domain.argsort(stable=True)
        sizes = torch.zeros(self.count, dtype=torch.int64).index_add_(0, domain, examples)
        return order, examples[order].cumsum(0), sizes

    @property
    def examples(self) -> Tensor:
        """Examples of each domain, m_k: (p,) int64."""
        return self._table[2]

    def draw(self, domains: Tensor, key: Key) -> Tensor:
        """Return a client of each of the domains (S,), drawn with a chance in proportion to its number of examples."""
        order, upto, sizes = self._table
        picked = (rng.uniform(key, (len(domains),), torch.float64) * sizes[domains]).long()
        before = sizes.cumsum(0) - sizes
        return order[torch.searchsorted(upto, before[domains] + picked, right=True)]
