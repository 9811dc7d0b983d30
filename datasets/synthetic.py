"""Synthetic clients: what a client holds is a function of the seed and its number, so that any number of them is free.

After Synthetic(alpha, beta) of T. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020,
arXiv:1812.06127, section 5.1. There every client draws a concept W_k of its own, and the u_k that alpha scales adds the
same to the scores of all classes, so it changes no label, and nothing learnt from some clients helps another. Here
clients share a part W, and alpha and beta do what they are named for there: both 0 is the iid case.

    paper     here
    alpha     alpha: how far concepts differ;  W_k = W + alpha A_k, the same for the bias, W and A_k standard normal
    beta      beta: how far inputs differ;     x ~ N(beta v_k, Sigma), v_kj ~ N(B_k, 1), B_k ~ N(0, 1)
    Sigma     diagonal, Sigma_jj = j^-1.2
    y         argmax(W_k x + b_k)

Inputs are multiples of 2^-16 and concepts of 2^-10, so that scores in float64 are exact sums: no label depends on the
order of summation, hence on the block a client is in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.datasets.examples import Examples, FederatedDataset, fixed_draw
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.population import LocalData, Summary, padded_rows
from fedfleet.simulator.registry import Options

MAX_EXAMPLES = 100_000  # of one client
DRAWS = 1 << 17  # at a time, so that they stay in the cache; results do not depend on it

Size = Annotated[int, Field(ge=1, le=MAX_EXAMPLES)]


class SyntheticOptions(Options):
    """The law of the synthetic clients. The bounds keep scores exact: |score| < 2^25 at the largest draws."""

    features: int = Field(default=60, ge=1, le=10_000)
    """Features of an example, d."""
    classes: int = Field(default=10, ge=2, le=10_000)
    """Classes."""
    examples: Size | tuple[Size, Size] = 50
    """Examples of a client: a number, or [least, most], drawn with probability about 1/n (log-uniform)."""
    alpha: float = Field(default=0.5, ge=0, le=4)
    """How far the clients' concepts differ; 0: not at all."""
    beta: float = Field(default=0.5, ge=0, le=4)
    """How far the clients' inputs differ; 0: not at all."""
    domains: int | None = Field(default=None, ge=1)
    """Domains, client i in domain i mod this: clients of one domain have their concept and the law of their inputs in common."""
    test_examples: int = Field(default=10_000, ge=1, le=1_000_000)
    """Test examples, each of another client of the same law (and domain) that takes no part in training."""

    @model_validator(mode="after")
    def _in_order(self) -> "SyntheticOptions":
        low, high = self.span
        if low > high:
            raise ValueError(f"examples is [{low}, {high}]: give the least first")
        return self

    @property
    def span(self) -> tuple[int, int]:
        """The least and the most examples of a client."""
        return (self.examples, self.examples) if isinstance(self.examples, int) else self.examples


@dataclass(frozen=True)
class SyntheticPopulation:
    """Clients whose data are drawn when they are asked for.

    Attributes:
        options: the law.
        size: number of clients, N.
        key: a scalar; a client's own key is folded from it.
        homes: a scalar; a domain's key is folded from it.
        concept: (d + 1, classes) float64, W above b, shared by all clients.
        domain: what the domain of each client is called, (N,) int64, instead of its number modulo ``options.domains``.

    """

    options: SyntheticOptions
    size: int
    key: Key
    homes: Key
    concept: Tensor
    domain: Tensor | None = None

    def summary(self) -> Summary:
        """Return the bounds and the mean of the law."""
        low, high = self.options.span
        n = np.arange(low, high + 1)
        chances = np.log1p(1 / n)
        domains = (self.options.domains or 1) if self.domain is None else int(self.domain.max()) + 1
        return Summary(low, high, float(n @ (chances / chances.sum())), domains)

    def num_examples(self, ids: Tensor) -> Tensor:
        """Return the number of examples of each client: floor(low ((high + 1) / low)^u), u uniform."""
        low, high = self.options.span
        u = rng.uniform(rng.fold(self.key, ids, "examples"), (), torch.float64)
        return (low * torch.exp(u * math.log((high + 1) / low))).to(torch.int64).clamp(low, high)

    def local_data(self, ids: Tensor) -> LocalData:
        """Draw the data of a block of clients."""
        counts = self.num_examples(ids)
        x, y = self.draw(ids, counts)
        rows = padded_rows(counts.cumsum(0) - counts, counts)
        return LocalData({"x": x, "y": y}, rows, counts, self.domains(ids))

    def domains(self, ids: Tensor) -> Tensor:
        """Return the domain of each client."""
        return self._home(ids) if self.domain is None else self.domain[ids.cpu()].to(ids.device)

    def grouped(self, domain: Tensor) -> "SyntheticPopulation":
        """Return the population with other domains; what clients hold stays the same."""
        return replace(self, domain=domain)

    def _home(self, ids: Tensor) -> Tensor:
        return ids % (self.options.domains or 1)

    def draw(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first ``counts`` (C,) examples of each client, one client after another: x (rows, d), y (rows,)."""
        widest = self.options.features * (self.options.classes + 1 + int(counts.max()))
        parts = max(1, DRAWS // widest)
        pairs = zip(ids.split(parts), counts.split(parts), strict=True)
        x, y = zip(*(self._draw(i, n) for i, n in pairs), strict=True)
        return torch.cat(x), torch.cat(y)

    def _draw(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        o, d = self.options, self.options.features
        keys = rng.fold(self.key, ids)
        home = keys if o.domains is None else rng.fold(self.homes, self._home(ids))
        owner = torch.arange(len(ids), device=ids.device).repeat_interleave(counts)  # (rows,)
        place = torch.arange(len(owner), device=ids.device) - (counts.cumsum(0) - counts)[owner]
        x = _normal(rng.fold(keys[owner], "example", place), d)
        x = x * torch.arange(1, d + 1, dtype=torch.float64, device=ids.device) ** -0.6
        if o.beta:
            x = x + o.beta * (_normal(rng.fold(home, "centre"), 1) + _normal(rng.fold(home, "centres"), d))[owner]
        x = _grid(x, 16)
        concept = self.concept[None]
        if o.alpha:
            concept = concept + o.alpha * _normal(rng.fold(home, "concept"), d + 1, o.classes)
        concept = _grid(concept, 10)
        # Sums of grid points are exact, in whatever order: as few products as there are shapes.
        rows = [len(x)] if len(concept) == 1 else counts.tolist()
        if len(set(rows)) == 1:
            by_client = x.view(len(concept), -1, d)
            y = (by_client @ concept[:, :-1] + concept[:, -1:]).argmax(2).flatten()
        else:
            pairs = zip(x.split(rows), concept.unbind(), strict=True)
            y = torch.cat([(mine @ w[:-1] + w[-1]).argmax(1) for mine, w in pairs])
        return x.to(torch.float32), y

    def to(self, device: torch.device) -> "SyntheticPopulation":
        """Return the population drawing on a device."""
        return replace(self, key=self.key.to(device), homes=self.homes.to(device), concept=self.concept.to(device))


def load(options: SyntheticOptions, clients: int | None, seed: int) -> FederatedDataset:
    """Return so many clients (100 if not given) of the law, and test examples of others; the seed decides all of them."""
    root = rng.fold(rng.key(seed), "synthetic")
    concept = _normal(rng.fold(root, "concept"), options.features + 1, options.classes)
    size = 100 if clients is None else clients
    population = SyntheticPopulation(options, size, rng.fold(root, "train"), rng.fold(root, "domains"), concept)
    others = replace(population, key=rng.fold(root, "test"))
    one_each = torch.ones(options.test_examples, dtype=torch.int64)
    strangers = torch.arange(options.test_examples)
    domain = None if options.domains is None else others.domains(strangers)
    test = Examples(*others.draw(strangers, one_each), options.classes, domain)
    return FederatedDataset("synthetic", population, test, _sampler(population))


def _sampler(population: SyntheticPopulation) -> Callable[[int], Examples]:
    def sample(size: int) -> Examples:
        """As many examples of each of as many clients as there are; their number says nothing of them, so this is fair."""
        ids = fixed_draw(population.size, size)
        counts = population.num_examples(ids).clamp(max=-(-size // len(ids)))
        x, y = population.draw(ids, counts)
        return Examples(x[:size], y[:size], population.options.classes)

    return sample


def _normal(keys: Key, *shape: int) -> Tensor:
    return rng.normal(keys, shape, torch.float64)


def _grid(x: Tensor, bits: int) -> Tensor:
    """Round to multiples of 2^-bits."""
    return (x * 2.0**bits).round() * 2.0**-bits
