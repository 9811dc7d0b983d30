"""Data sets as the engine takes them: tensors of examples, as published.

Pixels stay uint8 until the engine gathers a batch. So a data set takes a quarter of the memory and is shared unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.datasets.names import NO_NAMES, Names, some
from fedfleet.datasets.vocabulary import PADDING
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.population import Population, in_rows


def fixed_draw(total: int, size: int) -> Tensor:
    """Return `size` of range(`total`), or all where there are no more, rising: the same at every call, at a cost of O(`size`)."""
    if size >= total:
        return torch.arange(total)
    return rng.sample(rng.fold(rng.key(0), "evaluation"), total, size).sort().values


@dataclass(frozen=True, repr=False)
class Examples:
    """Labelled examples.

    `x` is (n, ...), uint8 pixels 0..255 (images: n, channels, height, width), float32, or int64 words and other integers; `y` is
    int64 (n,), labels 0..`classes`-1, or where `classes` is 0 targets (n, ...), float32 numbers or int64 labels of their parts;
    `domain` is int64 (n,), the domain every example comes from, or None where there is only one. Of texts of several lengths
    `words` is how many tokens there are, and `x` (n, L) has those of each text first, and `PADDING` after its end; else it is 0.
    Raises ValueError where dtypes or lengths disagree. `x` is laid out row by row.
    """

    x: Tensor
    y: Tensor
    classes: int
    domain: Tensor | None = None
    words: int = 0

    def __post_init__(self) -> None:
        if self.x.dtype not in (torch.uint8, torch.float32, torch.int64):
            raise ValueError(f"x is {self.x.dtype}: store examples as torch.uint8, torch.float32 or torch.int64")
        if self.classes == 0 and (self.y.dtype not in (torch.float32, torch.int64) or len(self.y) != len(self.x)):
            raise ValueError(
                f"y is {self.y.dtype} {tuple(self.y.shape)}: give targets, float32 or int64, an entry an example"
            )
        for name, column in (("y", self.y if self.classes else None), ("domain", self.domain)):
            if column is not None and (column.dtype != torch.int64 or column.shape != self.x.shape[:1]):
                shape = tuple(column.shape)
                raise ValueError(f"{name} is {column.dtype} {shape}: give torch.int64 of shape ({len(self.x)},), as x")

        if self.words:
            self._check_tokens()
        object.__setattr__(self, "x", in_rows(self.x))

    def _check_tokens(self) -> None:
        if self.x.dtype != torch.int64 or self.x.dim() != 2 or bool((self.x >= self.words).any()):
            raise ValueError(f"x is {self.x.dtype} {tuple(self.x.shape)}: give tokens (n, L) below words={self.words}")
        there = self.x >= 0
        if not there[:, 0].all() or bool((there[:, 1:] > there[:, :-1]).any()):
            raise ValueError(
                f"x has a row that does not begin with its tokens: give them first, and {PADDING} after them"
            )

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        """Return a line: how many, of which shape, of what."""
        kind = f"{self.classes} classes" if self.classes else f"targets {tuple(self.y.shape[1:])}"
        return (
            f"Examples({len(self):,} of {str(self.x.dtype).removeprefix('torch.')} {tuple(self.x.shape[1:])}, {kind})"
        )

    def sample(self, size: int) -> "Examples":
        """Return `fixed_draw` of the examples."""
        return self.rows(fixed_draw(len(self), size))

    def rows(self, rows: Tensor) -> "Examples":
        """Return some of the examples, by number or by mask."""
        domain = None if self.domain is None else self.domain[rows]
        return Examples(self.x[rows], self.y[rows], self.classes, domain, self.words)


class Column(NamedTuple):
    """What else is known of each example: int64 numbers (n,) of `names`, of the training and of the test examples."""

    names: tuple[str, ...]
    train: Tensor
    test: Tensor


@dataclass(frozen=True, repr=False)
class Dataset:
    """A data set under its own name, split in training and test examples as published; a partition deals it to clients.

    `domains` names the domains that its examples come from, if there are any; each of `columns` may make others.
    """

    name: str
    train: Examples
    test: Examples
    domains: tuple[str, ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    names: Names = NO_NAMES

    def __repr__(self) -> str:
        """Return a line that says what it has."""
        return f"Dataset({self.name!r}, train={self.train}, test={self.test}{_of(self.domains, self.names)})"

    def parted(self, share: float) -> "tuple[Dataset, Examples]":
        """Return the data set without a `share` of the training examples of each domain, a fixed draw, and these examples."""
        domain = torch.zeros(len(self.train), dtype=torch.int64) if self.train.domain is None else self.train.domain
        out = torch.zeros(len(domain), dtype=torch.bool)
        for rows in ((domain == d).nonzero().flatten() for d in domain.unique()):
            out[rows[fixed_draw(len(rows), round(share * len(rows)))]] = True
        return self.without(out)

    def without(self, out: Tensor) -> "tuple[Dataset, Examples]":
        """Return the data set without some of the training examples, a mask (n,), and these examples."""
        columns = {name: c._replace(train=c.train[~out]) for name, c in self.columns.items()}
        return replace(self, train=self.train.rows(~out), columns=columns), self.train.rows(out)

    def sample(self, size: int) -> Examples:
        """Return a fixed draw of at most `size` training examples."""
        return self.train.sample(size)


@dataclass(frozen=True, repr=False)
class FederatedDataset:
    """A data set that comes in clients.

    `test` are examples that no client holds. `sample(size)` is a fixed draw of about `size` of the clients' examples,
    never of more, at a cost that does not grow with the number of clients. `domains` names the clients' domains, if
    there are any.
    """

    name: str
    population: Population
    test: Examples
    sample: Callable[[int], Examples]
    domains: tuple[str, ...] = ()
    names: Names = NO_NAMES

    def __repr__(self) -> str:
        """Return a line that says what it has."""
        clients, known = self.population.size, self.population.summary()
        held = f"{clients:,} clients with {round(clients * known.mean_examples):,} training examples"
        return f"FederatedDataset({self.name!r}, {held}, test={self.test}{_of(self.domains, self.names)})"


def _of(domains: tuple[str, ...], names: Names) -> str:
    known = {
        "tested on client" if len(names.tested) == 1 else "tested on clients": names.tested,
        "classes": names.classes,
        "features": names.features,
        "vocabulary": [] if names.vocabulary is None else [f"{names.vocabulary.tokenizer}"],
    }
    told = [f"{len(domains)} domains"] if domains else []
    told += [f"{what} {some(of)}" for what, of in known.items() if of]
    return "".join(f", {one}" for one in told)


def joined(name: str, domains: Mapping[str, tuple[Examples, Examples]]) -> Dataset:
    """Return domains, each its training and its test examples, as one data set in which they are numbered in their order."""
    train, test = (
        Examples(
            torch.cat([part.x for part in parts]),
            torch.cat([part.y for part in parts]),
            parts[0].classes,
            torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts])),
        )
        for parts in zip(*domains.values(), strict=True)
    )
    return Dataset(name, train, test, tuple(domains))
