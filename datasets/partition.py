"""Partitioners: pure functions that deal the examples of a data set to clients.

Symbols: M examples -> `len(labels)`, N clients -> `clients`, sim -> `similarity`, alpha -> `alpha`.

Every function takes the int64 labels or domains (M,) of the examples, on the CPU, and gives a `Partition`. Its
randomness comes from the seed and its own name alone, so a partition can be made again anywhere. All raise ValueError,
in one line, for arguments out of range and for more clients than examples.
"""

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ATTEMPTS, NUMBERS = (
    (100, 10_000),
    10_000_000,
)  # draws of sizes before `min_size` counts as out of reach; of so many shares in all

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Which examples every client holds: client i has `indices[offsets[i]:offsets[i + 1]]`.

    `indices` is int64 (examples dealt,), no index twice; `offsets` is int64 (clients + 1,), from 0. `home` is int64 (clients,),
    the domain that a client counts as one of where it holds others, too; None where a partition knows none.
    """

    indices: Tensor
    offsets: Tensor
    home: Tensor | None = None

    @property
    def sizes(self) -> Tensor:
        """Examples of every client, int64 (clients,)."""
        return self.offsets.diff()


def iid(labels: Tensor, clients: int, seed: int) -> Partition:
    """Cut a random permutation in equal blocks of floor(M/N); the remainder is dropped."""
    check_clients(len(labels), clients)
    return equal_blocks(generator("iid", seed).permutation(len(labels)), clients)


def label_sorted(labels: Tensor, clients: int, seed: int, similarity: float = 0.0) -> Partition:
    """Sort by label, all but a share `similarity` of the examples, and cut in equal blocks of floor(M/N).

    At 0: a stable sort by label, nothing random. Above: of a random permutation the first ceil((1 - sim) M) entries are
    sorted by label and the rest put at uniformly random positions of the final order. The remainder is dropped.
    S. P. Karimireddy et al., "SCAFFOLD", ICML 2020, arXiv:1910.06378, section 7, as CDMA's experiments use it.
    """
    if not 0 <= similarity <= 1:
        raise ValueError(f"similarity is {similarity}: give a share of the examples, from 0 to 1")
    examples = len(labels)
    check_clients(examples, clients)
    values = labels.numpy()
    if similarity == 0:
        return equal_blocks(np.argsort(values, kind="stable"), clients)
    rng = generator("label_sorted", seed)
    shuffled = rng.permutation(examples)
    # The decimal the user wrote, not its binary neighbour: ceil(0.3 * 10) has to be 3, and 1 - 0.7 is above 0.3.
    kept = math.ceil((1 - Fraction(str(similarity))) * examples)
    head, rest = shuffled[:kept], shuffled[kept:]
    is_rest = np.zeros(examples, dtype=bool)
    is_rest[rng.choice(examples, len(rest), replace=False)] = True
    order = np.empty_like(shuffled)
    order[is_rest] = rest
    order[~is_rest] = head[np.argsort(values[head], kind="stable")]
    return equal_blocks(order, clients)


def dirichlet(labels: Tensor, clients: int, seed: int, alpha: float = 0.5, min_size: int = 1) -> Partition:
    """Share the examples of each class out by proportions drawn from a symmetric Dirichlet(alpha) over the clients.

    Small alpha: few clients hold a class; large alpha: all have the same mix. Every example is dealt exactly once.
    Drawn again, a hundred to ten thousand times, until every client has `min_size` examples; then ValueError.
    M. Yurochkin et al., ICML 2019, arXiv:1905.12022; alike T.-M. H. Hsu et al., 2019, arXiv:1909.06335.
    """
    return _dirichlet_shares("dirichlet", labels.numpy(), clients, seed, alpha, min_size)


def quantity_skew(labels: Tensor, clients: int, seed: int, alpha: float = 1.0, min_size: int = 1) -> Partition:
    """Draw the clients' shares of all examples from a symmetric Dirichlet(alpha); labels are as if iid.

    Every example is dealt exactly once; `min_size` as in `dirichlet`.
    Q. Li et al., "Federated learning on non-IID data silos", ICDE 2022, arXiv:2102.02079, section 4.
    """
    one_class = np.zeros(len(labels), dtype=np.int64)
    return _dirichlet_shares("quantity_skew", one_class, clients, seed, alpha, min_size)


def shards(labels: Tensor, clients: int, seed: int, labels_per_client: int = 2) -> Partition:
    """Sort by label, cut in N * `labels_per_client` equal shards and deal every client that many at random.

    A client so holds about `labels_per_client` labels. Every example is dealt exactly once, so the shards have to come
    out even. H. B. McMahan et al., AISTATS 2017, arXiv:1602.05629, section 3.
    """
    examples = len(labels)
    check_clients(examples, clients)
    if labels_per_client < 1:
        raise ValueError(f"labels_per_client is {labels_per_client}: give at least 1")
    pieces = clients * labels_per_client
    if examples % pieces:
        cut = (
            f"{examples} examples do not cut into {clients} clients x {labels_per_client} labels_per_client even shards"
        )
        raise ValueError(f"{cut}: {_even_shards(examples, clients, labels_per_client)}")
    order = np.argsort(labels.numpy(), kind="stable").reshape(pieces, -1)
    return equal_blocks(order[generator("shards", seed).permutation(pieces)].ravel(), clients)


def by_domain(
    domains: Tensor,
    clients: int,
    seed: int,
    targets: Collection[int] = (),
    target_clients: int | None = None,
    heterogeneity: float = 1.0,
    equal: bool = False,
) -> Partition:
    """Give every client examples of one domain only, or mixed with others, dealt at random; clients are numbered domain by domain.

    A domain has clients in proportion to its examples, by largest remainder, and at least one: it is their home. With
    `target_clients` the target domains have so many in all, and the sources the others. With `equal` all domains have as many
    clients, whatever their examples; with `target_clients` too, all sources, and all targets. Of n examples of a domain,
    floor(heterogeneity * n) are dealt to the clients at home there, and the others go into a pool of which all clients have
    equal parts, each with the domains in proportion: at 0 all clients hold the same mixture, and nobody is at home anywhere.
    Sources and targets have a pool each. Clients at home in one domain differ by at most one example.
    Every example is dealt exactly once. Fewer clients than domains is a ValueError, and so is nothing to be mixed with.
    R. Bai, S. Bagchi, D. I. Inouye, "Benchmarking algorithms for federated domain generalization", ICLR 2024,
    arXiv:2307.04942: their lambda is 1 - heterogeneity.
    """
    check_clients(len(domains), clients)
    if not 0 <= heterogeneity <= 1:
        raise ValueError(
            f"heterogeneity is {heterogeneity}: give a number from 0, all alike, to 1, one domain a client"
        )
    values, domain, totals = np.unique(domains.numpy(), return_inverse=True, return_counts=True)
    target = np.isin(values, list(targets))
    if heterogeneity < 1 and max(target.sum(), (~target).sum()) < 2:
        raise ValueError(f"heterogeneity is {heterogeneity}: there are no two domains to mix: leave it out")
    counts = _clients_of_domains(totals, clients, target, target_clients, equal=equal)
    rng = generator("by_domain", seed)
    shuffled = rng.permutation(len(domains))
    of_domain = np.split(shuffled[np.argsort(domain[shuffled], kind="stable")], np.cumsum(totals)[:-1])
    # The decimal the user wrote, not its binary neighbour, as in label_sorted.
    kept = np.array([math.floor(Fraction(str(heterogeneity)) * int(n)) for n in totals])
    at_home = np.repeat(np.arange(len(totals)), counts)
    rank = np.arange(clients) - (np.cumsum(counts) - counts)[at_home]  # a client's place in its domain
    own = (kept // counts)[at_home] + (rank < (kept % counts)[at_home])
    rows = [part[:n] for part, n in zip(of_domain, kept, strict=True)]
    owners = [np.repeat(np.arange(clients), own)]
    for role in (target, ~target):
        pool = _interleaved([part[n:] for part, n, mine in zip(of_domain, kept, role, strict=True) if mine])
        # Who has less of its own comes first, so that what does not come out even makes up for it.
        order = rng.permutation(np.flatnonzero(role[at_home]))
        order = order[np.argsort(own[order], kind="stable")]
        sizes = [len(part) for part in np.array_split(pool, max(len(order), 1))][: len(order)]
        rows.append(pool)
        owners.append(np.repeat(order, sizes))
    owner = np.concatenate(owners)
    result = partition_of(np.concatenate(rows)[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=clients))
    return replace(result, home=torch.from_numpy(values[at_home])) if heterogeneity else result


def _clients_of_domains(
    totals: Integers, clients: int, target: NDArray[np.bool_], target_clients: int | None, *, equal: bool
) -> Integers:
    """Return how many clients are at home in each domain, of which some are targets."""
    counts = np.zeros_like(totals)
    groups = [(np.ones(len(totals), dtype=bool), clients, "domains")]
    if target_clients is not None:
        groups = [(~target, clients - target_clients, "sources"), (target, target_clients, "target domains")]
    for mine, count, what in groups:
        least = int(mine.sum())
        if not least:
            raise ValueError(f"there are no {what}: name one domain or more in domains.target, and leave a source")
        if count < least:
            raise ValueError(f"{count} clients cannot cover {least} {what}: ask for at least {least} clients")
        if count > (most := int(totals[mine].sum())):
            raise ValueError(f"{count} clients cannot share {most} examples of {what}: ask for at most {most} clients")
        counts[mine] = _equal(count, totals[mine], what) if equal else _apportion(count, totals[mine])
    return counts


def _equal(clients: int, totals: Integers, what: str) -> int:
    """Return the clients of each domain where all have as many. Raises ValueError."""
    each, over = divmod(clients, len(totals))
    if over:
        raise ValueError(
            f"equal is true: {clients} clients do not divide among {len(totals)} {what}: ask for {each * len(totals)} of them"
        )
    if each > (fewest := int(totals.min())):
        raise ValueError(
            f"equal is true: {each} clients cannot share {fewest} examples: ask for at most {fewest} a domain"
        )
    return each


def _interleaved(parts: list[Integers]) -> Integers:
    """Return the entries of all parts, each part spread evenly from the beginning to the end."""
    places = [(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in parts]
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *parts])[np.argsort(np.concatenate([none, *places]), kind="stable")]


def domain_share(
    domains: Tensor,
    targets: Collection[int],
    clients: int,
    seed: int,
    share: float,
    sides: tuple[int, int] | None = None,
) -> Partition:
    """Give two groups of clients domains of which some are targets, the first `share` of the sources and the rest of the targets.

    Of n examples of a source domain, in a random order, the first floor(share * n) go to group A, and of a target domain the
    first floor((1 - share) * n); the others go to group B. So at 1 group A holds all sources and group B all targets, and at 0.5
    both hold the same. Within a group each domain is dealt in equal parts at random; its clients differ by at most one example,
    in all and of each domain. Every example is dealt exactly once. Group A comes first, and has `sides[0]` clients, group B
    `sides[1]`; if that is not given, half of the clients, and the odd one is in A. `targets` are numbers of domains.
    Y. Shen et al., "FedMM", AAMAS 2023: p of its two clients.
    """
    check_clients(len(domains), clients)
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}: give a share of the source examples, from 0 to 1")
    group_sizes = ((clients + 1) // 2, clients // 2) if sides is None else sides
    if min(group_sizes) < 1 or sum(group_sizes) != clients:
        raise ValueError(f"sides are {list(group_sizes)}: give two numbers from 1 that add up to {clients} clients")
    values = domains.numpy()
    there = np.unique(values)
    if strange := sorted(set(targets) - set(there.tolist())):
        raise ValueError(f"no example is of the target domain {strange[0]}: choose among {there.tolist()}")
    if not targets or len(set(targets)) == len(there):
        raise ValueError(
            f"{len(set(targets))} of {len(there)} domains are targets: give one or more, and leave a source"
        )
    rng = generator("domain_share", seed)
    shuffled = rng.permutation(len(values))
    # The decimal the user wrote, not its binary neighbour, as in label_sorted.
    exact = Fraction(str(share))
    groups: tuple[list[Integers], list[Integers]] = ([], [])
    for domain in there:
        rows = shuffled[values[shuffled] == domain]
        cut = math.floor((1 - exact if domain in targets else exact) * len(rows))
        groups[0].append(rows[:cut])
        groups[1].append(rows[cut:])
    order, sizes = [], []
    for group, size in zip(groups, group_sizes, strict=True):
        rows = np.concatenate(group)
        if len(rows) < size:
            raise ValueError(
                f"{size} clients of a group cannot share {len(rows)} examples: give another share, or sides"
            )
        owner = np.arange(len(rows)) % size  # round and round, domain by domain
        order.append(rows[np.argsort(owner, kind="stable")])
        sizes.append(np.bincount(owner, minlength=size))
    return partition_of(np.concatenate(order), np.concatenate(sizes))


def _dirichlet_shares(name: str, classes: Integers, clients: int, seed: int, alpha: float, min_size: int) -> Partition:
    examples = len(classes)
    check_clients(examples, clients)
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}: give a finite number above 0, such as 0.5")
    if min_size < 0 or clients * min_size > examples:
        most = examples // clients
        raise ValueError(f"min_size is {min_size}: {examples} examples among {clients} clients allow 0 to {most}")
    rng = generator(name, seed)
    totals = np.unique(classes, return_counts=True)[1]
    least, most = ATTEMPTS
    attempts = max(least, min(most, NUMBERS // (clients * len(totals))))
    for _ in range(attempts):
        counts = _dirichlet_counts(rng, alpha, totals, clients)
        sizes = counts.sum(axis=0)
        if sizes.min() >= min_size:
            break
    else:
        tried = (
            f"no draw of {attempts} with alpha={alpha:g} gave each of {clients} clients min_size={min_size} examples"
        )
        raise ValueError(f"{tried}: raise alpha, ask for fewer clients or lower min_size")
    shuffled = rng.permutation(examples)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    owner = np.repeat(np.tile(np.arange(clients), len(totals)), counts.ravel())
    return partition_of(by_class[np.argsort(owner, kind="stable")], sizes)


def _dirichlet_counts(rng: np.random.Generator, alpha: float, totals: Integers, clients: int) -> Integers:
    """Return counts (classes, clients) that add up to `totals` (classes,)."""
    proportions = rng.dirichlet(np.full(clients, alpha), size=len(totals))
    cuts = np.floor(np.cumsum(proportions, axis=1) * totals[:, None]).astype(np.int64)
    cuts = np.minimum(cuts, totals[:, None])  # a sum may round to just above 1
    cuts[:, -1] = totals
    return np.diff(cuts, axis=1, prepend=0)


def _apportion(seats: int, totals: Integers) -> Integers:
    """Return int64 counts that add up to `seats`: at least one each, the others by largest remainder of `totals`."""
    counts = np.zeros_like(totals)
    while True:
        # A domain whose quota is below one takes its one, and the others share what is left by their own quotas.
        weights = np.where(counts == 0, totals, 0)
        left, whole = seats - counts.sum(), weights.sum()
        quotas, remainders = np.divmod(weights * left, whole)  # integers, so that no rounding decides a seat
        below_one = (counts == 0) & (quotas == 0)
        if not below_one.any():
            break
        counts[below_one] = 1
    quotas[np.argsort(-remainders, kind="stable")[: left - quotas.sum()]] += 1
    return counts + quotas


def _even_shards(examples: int, clients: int, labels_per_client: int) -> str:
    """Return the mend for shards that do not come out even."""
    if examples % labels_per_client:
        return "choose a labels_per_client that divides the examples, or label_sorted, which drops the remainder"
    most = examples // labels_per_client
    nearest = min((n for n in range(1, most + 1) if most % n == 0), key=lambda n: abs(n - clients))
    return f"the nearest number of clients that does is {nearest}; label_sorted drops the remainder instead"


def check_clients(examples: int, clients: int) -> None:
    """Refuse more clients than examples. Raises ValueError."""
    if not 1 <= clients <= examples:
        raise ValueError(f"{clients} clients cannot share {examples} examples: ask for 1 to {examples} clients")


def generator(name: str, seed: int) -> np.random.Generator:
    """Return the draws of a kind of partition under a seed. Raises ValueError."""
    if seed < 0:
        raise ValueError(f"seed is {seed}: give a whole number from 0")
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


def equal_blocks(order: Integers, clients: int) -> Partition:
    """Return the partition that cuts an order of examples in equal blocks, without the remainder."""
    size = len(order) // clients
    return partition_of(order[: size * clients], np.full(clients, size))


def partition_of(indices: Integers, sizes: Integers) -> Partition:
    """Return the partition of indices, one client's after another's, of which each has a size."""
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    return Partition(torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64)))
