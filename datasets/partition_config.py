"""The partitioners as a configuration names them: one model a kind, told apart by `kind`."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from fedfleet.datasets import partition, partition_file, partition_skews
from fedfleet.datasets.files import DataError
from fedfleet.datasets.partition import Partition
from fedfleet.simulator.registry import Entry, Options, Registry


class PartitionConfig(Options, ABC):
    """How the examples of a data set are dealt to clients."""

    model_config = ConfigDict(allow_inf_nan=False)
    of_labels: ClassVar[bool] = False
    """Whether it looks at labels, which regression has none of."""

    @property
    def draws(self) -> bool:
        """Whether another seed deals otherwise."""
        return True

    def clients(self, asked: int | None) -> int:
        """Return how many clients there are to be: as many as are asked for, 100 if nobody says. Raises DataError."""
        return 100 if asked is None else asked

    @abstractmethod
    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal examples with int64 `labels` (M,), and where there are any `domains` (M,), some of them `targets`.

        Raises ValueError.
        """


class Iid(PartitionConfig):
    """Equal blocks of a random permutation."""

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.iid`."""
        return partition.iid(labels, clients, seed)


class LabelSorted(PartitionConfig):
    """Equal blocks of the examples sorted by label, but for a share of them."""

    of_labels: ClassVar[bool] = True
    similarity: float = Field(0.0, ge=0, le=1, description="sim: share of the examples placed at random, not sorted")

    @property
    def draws(self) -> bool:
        """Whether some are placed at random."""
        return self.similarity > 0

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.label_sorted`."""
        return partition.label_sorted(labels, clients, seed, self.similarity)


class Dirichlet(PartitionConfig):
    """Shares of every class drawn from a Dirichlet distribution over the clients."""

    of_labels: ClassVar[bool] = True
    alpha: float = Field(0.5, gt=0, description="alpha: concentration; small: few clients hold a class, large: iid")
    min_size: int = Field(1, ge=0, description="Examples every client has at least; drawn again until it holds")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.dirichlet`."""
        return partition.dirichlet(labels, clients, seed, self.alpha, self.min_size)


class Shards(PartitionConfig):
    """A few shards of the examples sorted by label for every client."""

    of_labels: ClassVar[bool] = True
    labels_per_client: int = Field(2, ge=1, description="n: shards dealt to every client, so about as many labels")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.shards`."""
        return partition.shards(labels, clients, seed, self.labels_per_client)


class QuantitySkew(PartitionConfig):
    """Client sizes drawn from a Dirichlet distribution, labels as if iid."""

    alpha: float = Field(1.0, gt=0, description="alpha: concentration; small: a few large clients, large: equal sizes")
    min_size: int = Field(1, ge=0, description="Examples every client has at least; drawn again until it holds")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.quantity_skew`."""
        return partition.quantity_skew(labels, clients, seed, self.alpha, self.min_size)


class ByDomain(PartitionConfig):
    """Every client within one domain, or at home there; clients of a domain in proportion to its examples, or equal in number."""

    heterogeneity: float = Field(
        1.0,
        ge=0,
        le=1,
        description="1: each client has one domain; 0: all have the same mixture of them; between: some of it",
    )
    target_clients: int | None = Field(
        None, ge=1, description="Clients of the target domains, in all; in proportion, as of sources, if not given"
    )
    equal: bool = Field(
        False,
        description="As many clients of each source, and of each target, whatever their examples; not in proportion",
    )

    @model_validator(mode="after")
    def _applies(self) -> "ByDomain":
        if self.equal and self.heterogeneity == 0:
            raise ValueError("equal=true: at a heterogeneity of 0 no client belongs to a domain: leave it out")
        return self

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition.by_domain`; data without domains are a ValueError."""
        if domains is None:
            raise ValueError("this data set has no domains: choose another partition than by_domain")
        if self.target_clients is not None and not targets:
            raise ValueError(f"target_clients is {self.target_clients}, and no domain is a target: leave it out")
        given = (self.target_clients, self.heterogeneity, self.equal)
        return partition.by_domain(domains, clients, seed, targets, *given)


class DomainShare(PartitionConfig):
    """Two groups of clients, of which one holds most of the sources and the other most of the targets, or all."""

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


class Pathological(PartitionConfig):
    """Exactly so many labels for every client, whose examples its clients share equally."""

    of_labels: ClassVar[bool] = True
    classes_per_client: int = Field(2, ge=1, description="Labels of every client")
    assignment: partition_skews.Assignment = Field(
        "random", description="Which labels: drawn; the first by the client's number; or all by it"
    )

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition_skews.pathological`."""
        return partition_skews.pathological(labels, clients, seed, self.classes_per_client, self.assignment)


class Distribution(PartitionConfig):
    """Consecutive labels for every client, and of each as many examples as a distribution says."""

    of_labels: ClassVar[bool] = True
    labels_per_client: int = Field(2, ge=1, description="Labels of every client; clients are a multiple of all labels")
    least: int = Field(5, ge=0, description="Examples of each of its labels that a client has at least")
    sigma: float = Field(2.0, ge=0, description="sigma: of the log-normal numbers that say how a label is spread")
    weights: list[list[float]] | None = Field(None, description="A row a label, a number a client that has it, instead")
    rescale: bool = Field(True, description="false: weights are numbers of examples, and least counts for nothing")

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition_skews.distribution`."""
        given = (self.labels_per_client, self.least, self.sigma, self.weights, self.rescale)
        return partition_skews.distribution(labels, clients, seed, *given)


class InnerDirichlet(PartitionConfig):
    """Clients of given sizes, each with its own shares of the labels drawn from a Dirichlet distribution."""

    of_labels: ClassVar[bool] = True
    alpha: Annotated[float, Field(gt=0)] | list[Annotated[float, Field(gt=0)]] = Field(
        0.5, description="alpha: concentration, one number or one a label"
    )
    sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="Examples of every client; equal if not given"
    )

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition_skews.inner_dirichlet`."""
        return partition_skews.inner_dirichlet(labels, clients, seed, self.alpha, self.sizes)

    def clients(self, asked: int | None) -> int:
        """Return as many as have sizes, where these are given."""
        return len(self.sizes) if self.sizes is not None and asked is None else super().clients(asked)


class Linear(PartitionConfig):
    """Sizes in proportion to the clients' numbers from 1, labels as if iid."""

    law: ClassVar[partition_skews.Law] = "linear"

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Deal the examples by `partition_skews.by_size`."""
        return partition_skews.by_size(labels, clients, seed, self.law)


class Square(Linear):
    """Sizes in proportion to the squares of the clients' numbers from 1, labels as if iid."""

    law: ClassVar[partition_skews.Law] = "square"


class Exponential(Linear):
    """Sizes in proportion to e to the power of the clients' numbers from 1, labels as if iid."""

    law: ClassVar[partition_skews.Law] = "exponential"


class File(PartitionConfig):
    """The partition in a file, such as ``fedfleet partition`` writes, whatever the seed."""

    path: str = Field(description="Parquet with the columns client and index, a row an example that is dealt")
    sha256: str | None = Field(None, description="Digest of what it deals to whom; a run says here what it was")

    @property
    def draws(self) -> bool:
        """False: the file says who has what."""
        return False

    def digest(self) -> str:
        """Return the digest of what the file deals. Raises DataError."""
        return partition_file.digest(self._file)

    @property
    def _file(self) -> Path:
        return Path(self.path).expanduser()

    def clients(self, asked: int | None) -> int:
        """Return how many clients the file has."""
        return len(partition_file.read(self._file).sizes)

    def split(
        self, labels: Tensor, domains: Tensor | None, clients: int, seed: int, targets: Collection[int] = ()
    ) -> Partition:
        """Return what `partition_file` reads."""
        if self.sha256 not in (None, result := self.digest()):
            raise DataError(
                f"population.partition.sha256={self.sha256!r}: {self.path} now deals otherwise ({result}): give the file that it "
                f"was, or leave this out in a new run"
            )
        dealt = partition_file.read(self._file, labels)
        if dealt.home is not None and domains is not None and (most := int(dealt.home.max())) > int(domains.max()):
            raise DataError(
                f"{self.path}: a client is at home in the domain {most}, and the last of these data is {int(domains.max())}: "
                f"give the partition of these data"
            )
        return dealt


PARTITIONS = Registry(
    "partition",
    {
        "iid": Entry(Iid),
        "label_sorted": Entry(LabelSorted),
        "dirichlet": Entry(Dirichlet),
        "shards": Entry(Shards),
        "quantity_skew": Entry(QuantitySkew),
        "by_domain": Entry(ByDomain),
        "domain_share": Entry(DomainShare),
        "pathological": Entry(Pathological),
        "distribution": Entry(Distribution),
        "inner_dirichlet": Entry(InnerDirichlet),
        "linear": Entry(Linear),
        "square": Entry(Square),
        "exponential": Entry(Exponential),
        "file": Entry(File),
    },
    default="iid",
)
