"""Options of ``domains``: the clients that make up a domain, by a kind and its options."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedfleet.simulator.population import Population
from fedfleet.simulator.registry import Entry, Options, Registry

Array = NDArray[np.float64]
ClientFeatures = Callable[[str, Population], Array]
"""``(kind, clients) -> vectors (N, k)`` of all clients at the initial model: of kind "gradient" or "loss"."""
VECTORS_UP_TO = 100_000  # clients, at about a thousand a second
STEPS = 300  # of Lloyd's algorithm, at most


class DomainConfig(Options):
    """A way to group clients: as the data say, unless a kind says otherwise."""

    @property
    def of_labels(self) -> bool:
        """Whether it looks at labels, which regression has none of."""
        return False

    @property
    def draws(self) -> bool:
        """Whether another seed of the partition groups otherwise."""
        return False

    @property
    def asked(self) -> tuple[str | int, ...]:
        """Domains that are to be targets, by name or number."""
        return ()

    def group(self, clients: Population, seed: int, vectors: ClientFeatures | None = None) -> Population:
        """Return the clients with their domains, numbered from 0 without a gap. Raises ValueError."""
        return clients


class Given(DomainConfig):
    """As the data say; all clients are one domain where they say nothing."""

    target: str | int | tuple[str | int, ...] = ()
    """Domains whose examples have no labels but for evaluation: targets. All others are sources. By name, or by number from 0 in
    the order of ``population.dataset.domains``, where no name is a number itself."""
    share_target: bool = False
    """Source clients hold the examples of the targets too, without labels: for methods that match features with them there."""

    @model_validator(mode="after")
    def _applies(self) -> Given:
        if self.share_target and not self.asked:
            raise ValueError("share_target=true: there is no target to share: name one in domains.target")
        return self

    @property
    def asked(self) -> tuple[str | int, ...]:
        """Domains that are to be targets, by name or number."""
        return self.target if isinstance(self.target, tuple) else (self.target,)

    def targets(self, names: tuple[str, ...], count: int) -> tuple[int, ...]:
        """Return the numbers of the targets, of ``count`` domains with these names if they have any. Raises ValueError."""
        result = tuple(_number(one, names, count) for one in self.asked)
        if len(set(result)) < len(result):
            raise ValueError(f"target={list(self.asked)}: give each domain once")
        if result and len(result) == count:
            raise ValueError(f"target={list(self.asked)}: no domain is left as a source: leave one out")
        return result


class EachClient(DomainConfig):
    """Every client is a domain of its own."""

    def group(self, clients: Population, seed: int, vectors: ClientFeatures | None = None) -> Population:
        """Return the clients, each a domain."""
        return clients.grouped(torch.arange(clients.size))


class ByLabel(DomainConfig):
    """Clients whose most frequent label is the same are a domain."""

    @property
    def of_labels(self) -> bool:
        """It does."""
        return True

    def group(self, clients: Population, seed: int, vectors: ClientFeatures | None = None) -> Population:
        """Return the clients by label; labels that are nobody's most frequent are no domain."""
        label = torch.from_numpy(histograms(clients).argmax(1))
        return clients.grouped(label.unique(return_inverse=True)[1])


class Clusters(DomainConfig):
    """Clusters of clients by the shares of their labels, or by what they make of the initial model: k-means."""

    count: int = Field(default=10, ge=1)
    """Clusters, p, before small ones are merged."""
    by: Literal["labels", "gradient", "loss"] = "labels"
    """The share of each label; or, at the model that a run of ``population.partition_seed`` (or ``warm_start``) starts from, the
    direction of a client's gradient, or its mean loss on each label."""
    distance: Literal["euclidean", "kl"] = "euclidean"
    """Squared Euclidean, or the Kullback-Leibler divergence of a client from its cluster (Banerjee et al., JMLR 2005)."""
    min_examples: int = Field(default=1, ge=1)
    """A cluster with fewer is merged into the nearest."""
    max_skewness: float | None = Field(default=None, gt=1)
    """Merge small clusters until m / min_k m_k is at most this."""

    @model_validator(mode="after")
    def _shares(self) -> Clusters:
        if self.distance == "kl" and self.by != "labels":
            raise ValueError(f"distance=kl is between shares, and by={self.by} gives none: use euclidean, or by=labels")
        return self

    @property
    def of_labels(self) -> bool:
        """Gradients alone do without."""
        return self.by != "gradient"

    @property
    def draws(self) -> bool:
        """True: k-means begins at clients that are drawn."""
        return True

    def group(self, clients: Population, seed: int, vectors: ClientFeatures | None = None) -> Population:
        """Return the clients by cluster."""
        if self.count > clients.size:
            raise ValueError(f"count={self.count}: there are only {clients.size} clients")
        examples = clients.num_examples(torch.arange(clients.size)).double().numpy()
        shares = self._vectors(clients, vectors)
        result = _euclidean(shares, self.count, seed) if self.distance == "euclidean" else _kl(shares, self.count, seed)
        merged = _merged(shares, examples, result, self.min_examples, self.max_skewness, self.distance)
        return clients.grouped(torch.from_numpy(merged).unique(return_inverse=True)[1])

    def _vectors(self, clients: Population, vectors: ClientFeatures | None) -> Array:
        if self.by == "labels":
            counts = histograms(clients)
            return counts / counts.sum(1, keepdims=True)
        if vectors is None:
            raise ValueError(f"by={self.by}: there is no model to take it at: use by=labels")
        if clients.size > VECTORS_UP_TO:
            raise ValueError(
                f"by={self.by}: it looks at the examples of all {clients.size:,} clients, and up to {VECTORS_UP_TO:,} may be: "
                f"use by=labels"
            )
        return vectors(self.by, clients)


DOMAINS = Registry(
    "domains",
    {"given": Entry(Given), "client": Entry(EachClient), "label": Entry(ByLabel), "clusters": Entry(Clusters)},
    default="given",
)


def _number(domain: str | int, names: tuple[str, ...], count: int) -> int:
    if str(domain) in names:
        return names.index(str(domain))
    if isinstance(domain, int) and 0 <= domain < count and not any(name.isdecimal() for name in names):
        return domain
    near = difflib.get_close_matches(str(domain), names, n=1)
    known = ", ".join(names) if names else f"0 to {count - 1}"
    raise ValueError(f"target={domain}: unknown; {f'did you mean {near[0]!r}? ' if near else ''}choose of {known}")


def histograms(clients: Population) -> Array:
    """Return how many examples of each label every client has, (N, classes). Raises ValueError where labels are not known."""
    labels = getattr(clients, "labels", lambda ids: None)(torch.arange(clients.size))
    if labels is None:
        raise ValueError("the labels of these clients are not known beforehand: use domains.kind given or client")
    y, counts = labels
    classes = int(y.max()) + 1
    owner = torch.arange(clients.size).repeat_interleave(counts)
    return (owner * classes + y).bincount(minlength=clients.size * classes).view(-1, classes).double().numpy()


def _euclidean(shares: Array, count: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans  # here, for scikit-learn takes a second to import

    return np.asarray(KMeans(count, n_init="auto", random_state=seed).fit_predict(shares), np.int64)


def _kl(shares: Array, count: int, seed: int) -> NDArray[np.int64]:
    """Cluster by the divergence of a client from the mean of its cluster, which is the arithmetic mean (Lloyd's algorithm)."""
    from sklearn.cluster import kmeans_plusplus

    centres, _ = kmeans_plusplus(shares, count, random_state=seed)
    result = np.zeros(len(shares), np.int64)
    for _ in range(STEPS):
        old, result = result, _divergence(shares, centres).argmin(1)
        if (old == result).all():
            break
        centres = np.stack([shares[result == k].mean(0) if (result == k).any() else centres[k] for k in range(count)])
    return result


def _divergence(shares: Array, centres: Array) -> Array:
    """Return KL(share || centre) up to a term of the share alone, (N, p); a centre is a little mixed with uniform."""
    smooth = (centres + 1e-6) / (centres + 1e-6).sum(1, keepdims=True)
    return -shares @ np.log(smooth).T


def _merged(
    shares: Array,
    examples: Array,
    result: NDArray[np.int64],
    least: int,
    skewness: float | None,
    distance: str,
) -> NDArray[np.int64]:
    """Merge the smallest cluster into the nearest until all are large enough."""
    while True:
        names = np.unique(result)
        sizes = np.array([examples[result == k].sum() for k in names])
        needed = least if skewness is None else max(least, examples.sum() / skewness)
        if len(names) == 1 or sizes.min() >= needed:
            return result
        centres = np.stack([shares[result == k].mean(0) for k in names])
        small = int(sizes.argmin())
        away = (
            ((centres - centres[small]) ** 2).sum(1)
            if distance == "euclidean"
            else _divergence(centres[small : small + 1], centres)[0]
        )
        away[small] = np.inf
        result = np.where(result == names[small], names[int(away.argmin())], result)
