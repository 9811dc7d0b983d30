"""The population: who the clients are, and where their examples lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng


class Held(NamedTuple):
    """Examples that clients do not work on: rows (C, n) int64, padded at the end with any valid row, and counts (C,) int64."""

    rows: Tensor
    counts: Tensor


class LocalData(NamedTuple):
    """The data of a block of clients.

    Attributes:
        data: name -> (rows, ...) tensors that the clients' rows point into.
        rows: (C, n) int64, row numbers of each client's examples, padded at the end with any valid row.
        counts: (C,) int64, each client's number of examples.
        domain: (C,) int64.
        labelled: (C,) int64, how many of each client's examples have labels, which come first; None where all have.
        held: the clients' examples that are none of these, but held out to evaluate on; None where nothing is.
        by_domain: (C, p) int64, how many of each client's examples are of each domain, which come one after the other; None
            where that is not told.

    """

    data: Mapping[str, Tensor]
    rows: Tensor
    counts: Tensor
    domain: Tensor
    labelled: Tensor | None = None
    held: Held | None = None
    by_domain: Tensor | None = None


class Summary(NamedTuple):
    """What is known of all clients without visiting each: examples a client (least, most, mean) and the number of domains."""

    min_examples: int
    max_examples: int
    mean_examples: float
    domains: int = 1


class Population(Protocol):
    """Clients 0 .. size - 1 and their examples. Nothing but the making of it may cost time or memory for every client."""

    @property
    def size(self) -> int:
        """Number of clients, N."""
        ...

    def summary(self) -> Summary:
        """Return what is known of all clients."""
        ...

    def num_examples(self, ids: Tensor) -> Tensor:
        """Return the number of examples of each client: int64 of the shape of ``ids``."""
        ...

    def domains(self, ids: Tensor) -> Tensor:
        """Return the domain of each client, from 0: int64 of the shape of ``ids``."""
        ...

    def grouped(self, domain: Tensor) -> Population:
        """Return the population with other domains: those of all clients, (N,) int64."""
        ...

    def local_data(self, ids: Tensor) -> LocalData:
        """Return the data of a block of clients (C,): the same for a client, to the bit, whatever the block."""
        ...

    def to(self, device: torch.device) -> Population:
        """Return the population with its tensors on a device."""
        ...


@dataclass(frozen=True)
class InMemoryPopulation:
    """Examples in memory and an index partition: client i holds rows ``indices[offsets[i]:offsets[i+1]]``.

    Attributes:
        data: name -> (rows, ...) tensors, shared by all clients.
        indices: (total,) int64.
        offsets: (N + 1,) int64, rising.
        domain: (N,) int64, the domain of each client, from 0 without a gap.
        labelled: (N,) int64, how many of a client's rows have labels, its first ones; None where all have.
        by_domain: (N, p) int64, how many of a client's rows are of each domain, in that order; None where it is not told.

    """

    data: Mapping[str, Tensor]
    indices: Tensor
    offsets: Tensor
    domain: Tensor
    labelled: Tensor | None = None
    by_domain: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of clients, N."""
        return len(self.offsets) - 1

    def summary(self) -> Summary:
        """Return what is known of all clients."""
        sizes = self.offsets.diff()
        return Summary(int(sizes.min()), int(sizes.max()), float(sizes.double().mean()), int(self.domain.max()) + 1)

    def num_examples(self, ids: Tensor) -> Tensor:
        """Return the number of examples of each client."""
        return self.offsets[ids + 1] - self.offsets[ids]

    def domains(self, ids: Tensor) -> Tensor:
        """Return the domain of each client."""
        return self.domain[ids]

    def grouped(self, domain: Tensor) -> InMemoryPopulation:
        """Return the population with other domains."""
        return replace(self, domain=domain.to(self.domain.device))

    def local_data(self, ids: Tensor) -> LocalData:
        """Return row numbers into the shared tensors, padded with the client's first row."""
        first = self.offsets[ids]
        counts = self.offsets[ids + 1] - first
        rows = self.indices[padded_rows(first, counts)]
        labelled = None if self.labelled is None else self.labelled[ids]
        by_domain = None if self.by_domain is None else self.by_domain[ids]
        return LocalData(self.data, rows, counts, self.domain[ids], labelled, by_domain=by_domain)

    def labels(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the labels of clients (C,), one client after another, and how many each has, (C,); None without labels."""
        if "y" not in self.data or self.labelled is not None:
            return None
        counts = self.num_examples(ids)
        return self.data["y"][self.indices[joined_rows(self.offsets[ids], counts)]], counts

    def to(self, device: torch.device) -> InMemoryPopulation:
        """Return the population with its tensors on a device."""
        data = {k: v.to(device) for k, v in self.data.items()}
        placed = [self.indices.to(device), self.offsets.to(device), self.domain.to(device)]
        told = [None if v is None else v.to(device) for v in (self.labelled, self.by_domain)]
        return InMemoryPopulation(data, *placed, *told)

    def withholding(self, unlabelled: Tensor) -> InMemoryPopulation:
        """Return the population without the labels of some rows, (rows,) bool: ``y`` is -1 there, and a column "target" true.

        A client's labelled examples come first, each kind in its order.
        """
        owner = torch.arange(self.size).repeat_interleave(self.offsets.diff())
        hidden = unlabelled[self.indices]
        order = (2 * owner + hidden).argsort(stable=True)
        labelled = torch.zeros(self.size, dtype=torch.int64).index_add_(0, owner, (~hidden).long())
        y = torch.where(unlabelled, -1, self.data["y"])
        data = {**self.data, "y": y, "target": unlabelled}
        return replace(self, data=data, indices=self.indices[order], labelled=labelled)

    def sharing(self) -> InMemoryPopulation:
        """Return the population in which clients with labels hold all examples without labels, too, after their own."""
        assert self.labelled is not None  # labels are withheld from somebody
        owner = torch.arange(self.size).repeat_interleave(self.offsets.diff())
        hidden = self.data["target"][self.indices]
        sources, every = self.labelled.nonzero().flatten(), self.indices[hidden]
        kept = ~hidden | (self.labelled[owner] == 0)
        owners = torch.cat([owner[kept], sources.repeat_interleave(len(every))])
        rows = torch.cat([self.indices[kept], every.repeat(len(sources))])
        sizes = torch.bincount(owners, minlength=self.size)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return replace(self, indices=rows[owners.argsort(stable=True)], offsets=offsets)

    def telling(self, domain: Tensor) -> InMemoryPopulation:
        """Return the population whose rows say of which domain they are, (rows,) int64, in a column "domain" (rows, p) bool.

        Domains whose labels are withheld come last, and a client's rows are in the order of domains.
        """
        count = int(domain.max()) + 1
        hidden = self.data.get("target", torch.zeros_like(domain, dtype=torch.bool))
        last = torch.zeros(count, dtype=torch.bool).index_fill_(0, domain[hidden].unique(), True)
        place = last.to(torch.int64).argsort(stable=True).argsort()[domain]
        owner = torch.arange(self.size).repeat_interleave(self.offsets.diff())
        cell = owner * count + place[self.indices]
        by_domain = torch.bincount(cell, minlength=self.size * count).view(self.size, count)
        data = {**self.data, "domain": place[:, None] == torch.arange(count)}
        return replace(self, data=data, indices=self.indices[cell.argsort(stable=True)], by_domain=by_domain)

    def keeping(self, rows: Tensor) -> InMemoryPopulation:
        """Return the population of the rows (rows,) bool alone; clients that have none of them are left out."""
        kept = rows[self.indices]
        owner = torch.arange(self.size).repeat_interleave(self.offsets.diff())[kept]
        clients, sizes = owner.unique(return_counts=True)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return InMemoryPopulation(self.data, self.indices[kept], offsets, self.domain[clients])


def joined_rows(first: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of clients that hold ``counts`` (C,) rows from ``first`` (C,) on, one client after another."""
    start = first - (counts.cumsum(0) - counts)
    return start.repeat_interleave(counts) + torch.arange(int(counts.sum()), device=counts.device)


def padded_rows(first: Tensor, counts: Tensor) -> Tensor:
    """Return the rows (C, n) of clients that hold ``counts`` (C,) rows from ``first`` (C,) on, padded with the first."""
    at = torch.arange(int(counts.max()), device=counts.device)
    return first[:, None] + at * (at < counts[:, None])


def gather(data: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return the given rows (any shape) of every tensor, decoded."""
    flat = rows.flatten()
    result = {k: in_rows(v.index_select(0, flat)) for k, v in data.items()}
    return {k: decode(v.view(*rows.shape, *v.shape[1:])) for k, v in result.items()}


def in_rows(x: Tensor) -> Tensor:
    """Return a tensor laid out row by row.

    Images that were read with their channels last may say that they are contiguous and still be taken for such; torch's gradient
    of a convolution by 1x1 with a stride then writes beyond its memory, where there are few channels.
    """
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.append(step)
        step *= max(1, size)
    return x if x.stride() == tuple(reversed(strides)) else x.clone(memory_format=torch.contiguous_format)


def decode(x: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [-1, 1] (x / 127.5 - 1); all other tensors pass through."""
    return x.to(torch.float32) * (1 / 127.5) - 1.0 if x.dtype == torch.uint8 else x


def shuffled(seed: int, purpose: str, ids: Tensor, counts: Tensor, longest: int) -> Tensor:
    """Return an order of each client's ``counts`` (C,) of so many rows (C, longest), drawn from seed and client; padding last."""
    order = rng.bits(rng.fold(rng.key(seed).to(ids.device), purpose, ids), longest)
    padding = torch.arange(longest, device=ids.device) >= counts[:, None]
    return order.masked_fill(padding, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
