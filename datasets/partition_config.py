"""The partitioners as a configuration names them: one model a kind, told apart by `kind`."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedfleet.datasets import partition
from fedfleet.datasets.partition import Partition


class PartitionConfig(BaseModel, ABC):
    """How the examples of a data set are dealt to clients."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @abstractmethod
    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal examples with int64 `labels` (M,), and where there are any `domains` (M,), some of them `targets`.

        Raises ValueError.
        """


class Iid(PartitionConfig):
    """Equal blocks of a random permutation."""

    kind: Literal["iid"] = "iid"

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.iid`."""
        return partition.iid(labels, clients, seed)


class LabelSorted(PartitionConfig):
    """Equal blocks of the examples sorted by label, but for a share of them."""

    kind: Literal["label_sorted"] = "label_sorted"
    similarity: float = Field(0.0, ge=0, le=1, description="sim: share of the examples placed at random, not sorted")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.label_sorted`."""
        return partition.label_sorted(labels, clients, seed, self.similarity)


class Dirichlet(PartitionConfig):
    """Shares of every class drawn from a Dirichlet distribution over the clients."""

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(0.5, gt=0, description="alpha: concentration; small: few clients hold a class, large: iid")
    min_size: int = Field(1, ge=0, description="Examples every client has at least; drawn again until it holds")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.dirichlet`."""
        return partition.dirichlet(labels, clients, seed, self.alpha, self.min_size)


class Shards(PartitionConfig):
    """A few shards of the examples sorted by label for every client."""

    kind: Literal["shards"] = "shards"
    labels_per_client: int = Field(2, ge=1, description="n: shards dealt to every client, so about as many labels")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.shards`."""
        return partition.shards(labels, clients, seed, self.labels_per_client)


class QuantitySkew(PartitionConfig):
    """Client sizes drawn from a Dirichlet distribution, labels as if iid."""

    kind: Literal["quantity_skew"] = "quantity_skew"
    alpha: float = Field(1.0, gt=0, description="alpha: concentration; small: a few large clients, large: equal sizes")
    min_size: int = Field(1, ge=0, description="Examples every client has at least; drawn again until it holds")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.quantity_skew`."""
        return partition.quantity_skew(labels, clients, seed, self.alpha, self.min_size)


class ByDomain(PartitionConfig):
    """Every client within one domain, or at home there, clients of a domain in proportion to its examples."""

    kind: Literal["by_domain"] = "by_domain"
    heterogeneity: float = Field(
        1.0,
        ge=0,
        le=1,
        description="1: each client has one domain; 0: all have the same mixture of them; between: some of it",
    )
    target_clients: int | None = Field(
        None, ge=1, description="Clients of the target domains, in all; in proportion, as of sources, if not given"
    )

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.by_domain`; data without domains are a ValueError."""
        if domains is None:
            raise ValueError("this data set has no domains: choose another partition than by_domain")
        if self.target_clients is not None and not targets:
            raise ValueError(f"target_clients is {self.target_clients}, and no domain is a target: leave it out")
        return partition.by_domain(domains, clients, seed, targets, self.target_clients, self.heterogeneity)


class DomainShare(PartitionConfig):
    """Two groups of clients, of which one holds most of the sources and the other most of the targets, or all."""

    kind: Literal["domain_share"] = "domain_share"
    share: float = Field(
        1.0, ge=0, le=1, description="p: of the sources in the first group, and of the targets in the second"
    )
    sides: tuple[int, int] | None = Field(None, description="Clients of each group; half of them if not given")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.domain_share`; data without targets are a ValueError."""
        if domains is None or not targets:
            raise ValueError("no domain is a target: set domains.target, or choose by_domain")
        return partition.domain_share(domains, targets, clients, seed, self.share, self.sides)


PARTITIONS: Mapping[str, type[PartitionConfig]] = {
    "iid": Iid,
    "label_sorted": LabelSorted,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity_skew": QuantitySkew,
    "by_domain": ByDomain,
    "domain_share": DomainShare,
}
