"""More partitioners, those that Flower Datasets has under these names: a few labels a client, and clients of unequal sizes.

As in `partition`: pure functions of the labels (M,) int64, the number of clients N and a seed, which raise ValueError in one
line. What each gives is as Flower's documentation defines it, with draws of our own, so no partition is Flower's to the row; and
which examples of a label or a size go to a client is drawn here, where Flower takes them in the order of the file.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedfleet.datasets.partition import Integers, Partition, check_clients, generator, partition_of

Assignment = Literal["random", "first_deterministic", "deterministic"]
Law = Literal["linear", "square", "exponential"]
Weights = Sequence[Sequence[float]]


def pathological(
    labels: Tensor, clients: int, seed: int, classes_per_client: int = 2, assignment: Assignment = "random"
) -> Partition:
    """Give every client exactly so many of the labels, and share each label's examples out equally among those that have it.

    Which labels: drawn without replacement ("random"); the (i mod C)-th for client i and others drawn ("first_deterministic"); or
    the i-th and those that follow it, mod C ("deterministic"). Examples of a label that nobody drew are left out. The first of
    the clients that share a label have one example more where it does not divide.
    Q. Li et al., "Federated learning on non-IID data silos", ICDE 2022, arXiv:2102.02079: "first_deterministic".
    """
    values = labels.numpy()
    check_clients(len(values), clients)
    there, number, totals = np.unique(values, return_inverse=True, return_counts=True)
    _check_labels("classes_per_client", classes_per_client, len(there))
    rng = generator("pathological", seed)
    everybody = np.arange(clients)
    if assignment == "deterministic":
        chosen = (everybody[:, None] + np.arange(classes_per_client)) % len(there)
    else:
        ranks = rng.random((clients, len(there)))
        if assignment == "first_deterministic":
            ranks[everybody, everybody % len(there)] = -1  # before all that are drawn
        chosen = ranks.argsort(1)[:, :classes_per_client]
    has = np.zeros((len(there), clients), dtype=bool)
    has[chosen, everybody[:, None]] = True
    shares = has.sum(1)
    if len(short := np.flatnonzero(shares > totals)):
        label = short[0]
        raise ValueError(
            f"{shares[label]} clients cannot share {totals[label]} examples of label {there[label]}: ask for fewer clients, or "
            f"fewer classes_per_client"
        )
    counts = np.zeros((len(there), clients), dtype=np.int64)
    for label, owners in enumerate(has):
        of = np.flatnonzero(owners)
        counts[label, of] = [len(part) for part in np.array_split(np.arange(totals[label]), len(of))] if len(of) else []
    return _by_label(number, counts, rng)


def distribution(
    labels: Tensor,
    clients: int,
    seed: int,
    labels_per_client: int = 2,
    least: int = 5,
    sigma: float = 2.0,
    weights: Weights | None = None,
    rescale: bool = True,
) -> Partition:
    """Give client i the labels i, i + 1, …, mod C, and of each as many examples as a distribution says.

    With C labels, of which each client has k, a label is with k N / C clients, rising; N is a multiple of C. `weights` is (C, k N /
    C): how a label is spread over its clients. If not given it is log-normal with standard deviation `sigma` of the logarithm.
    Of a label every client has `least` examples first; of the rest the floor of its share; what rounding leaves goes to one of
    its clients, drawn. Without `rescale` weights are numbers of examples, `least` counts for nothing, and the rest is left out.
    T. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, arXiv:1812.06127: 1,000 clients of MNIST.
    """
    values = labels.numpy()
    check_clients(len(values), clients)
    there, number, totals = np.unique(values, return_inverse=True, return_counts=True)
    count = len(there)
    _check_labels("labels_per_client", labels_per_client, count)
    if clients % count:
        nearest = max(1, round(clients / count)) * count
        raise ValueError(f"{clients} clients are no multiple of {count} labels: ask for {nearest}")
    columns = labels_per_client * clients // count
    rng = generator("distribution", seed)
    if weights is None:
        if not rescale:
            raise ValueError("rescale is false, and no weights are given: give them, as numbers of examples")
        result = rng.lognormal(0.0, sigma, (count, columns))
    else:
        result = _weights(weights, count, columns)
    if rescale:
        fewest = int(totals.min())
        if not 0 <= least * columns <= fewest:
            raise ValueError(
                f"least is {least}: {columns} clients share {fewest} examples of a label: give 0 to {fewest // columns}"
            )
        sums = result.sum(1, keepdims=True)
        if not (sums > 0).all():
            raise ValueError(f"weights of label {there[(sums <= 0).argmax()]} are all 0: give one that is more")
        each = least + np.floor(result / sums * (totals[:, None] - least * columns)).astype(np.int64)
        each[np.arange(count), rng.integers(columns, size=count)] += totals - each.sum(1)
    else:
        each = result.astype(np.int64)
        if (over := each.sum(1) > totals).any():
            label = over.argmax()
            raise ValueError(
                f"weights ask for {each[label].sum()} of {totals[label]} examples of label {there[label]}: lower them"
            )
    counts = np.zeros((count, clients), dtype=np.int64)
    for label in range(count):
        behind = (label - np.arange(clients)) % count  # the place of the label among those of each client
        counts[label, behind < labels_per_client] = each[label]
    return _by_label(number, counts, rng)


def inner_dirichlet(
    labels: Tensor,
    clients: int,
    seed: int,
    alpha: float | Sequence[float] = 0.5,
    sizes: Sequence[int] | None = None,
) -> Partition:
    """Fill clients of given sizes one example at a time, each with labels from its own draw of a Dirichlet distribution.

    Client i draws its shares of labels q_i from Dirichlet(alpha), with a number for all labels or one each. Then, until all are
    full: a client that is not is drawn uniformly, and it takes an example of a label drawn from q_i. A label that has run out is
    0 in all q, which are scaled up; a client all of whose shares are 0 takes any example that is left. `sizes` are
    floor(M / N) each, if not given; what is beyond their sum is left out.
    D. A. E. Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, arXiv:2111.04263.
    """
    values = labels.numpy()
    check_clients(len(values), clients)
    there, number, totals = np.unique(values, return_inverse=True, return_counts=True)
    size = [len(values) // clients] * clients if sizes is None else list(sizes)
    if len(size) != clients or min(size) < 1 or sum(size) > len(values):
        raise ValueError(
            f"sizes are {len(size)} numbers from {min(size, default=0)} with the sum {sum(size)}: give one from 1 for each of "
            f"{clients} clients, {len(values)} in all at most"
        )
    each = [alpha] * len(there) if isinstance(alpha, int | float) else list(alpha)
    if len(each) != len(there) or not all(0 < a < np.inf for a in each):
        raise ValueError(f"alpha is {alpha}: give a finite number above 0, or one for each of {len(there)} labels")
    rng = generator("inner_dirichlet", seed)
    shares = rng.dirichlet(each, size=clients)
    left, needs, open_ = totals.tolist(), list(size), list(range(clients))
    upto: dict[int, list[float]] = {}
    counts = np.zeros((len(there), clients), dtype=np.int64)
    for who, which in rng.random((sum(size), 2)).tolist():
        place = int(who * len(open_))
        client = open_[place]
        if (row := upto.get(client)) is None:
            row = upto[client] = _cumulated(shares[client], left)
        label = min(bisect_right(row, which * row[-1]), len(row) - 1)
        while not left[label]:  # where rounding ends on a label that has run out
            label -= 1
        counts[label, client] += 1
        left[label] -= 1
        needs[client] -= 1
        if not needs[client]:
            open_[place] = open_[-1]
            open_.pop()
        if not left[label]:
            upto.clear()
    return _by_label(number, counts, rng)


def by_size(labels: Tensor, clients: int, seed: int, law: Law) -> Partition:
    """Deal a random permutation in blocks whose sizes rise: client i, from 1, has a share of i, i squared or e to the i.

    Sizes are rounded down, and the last client has what is left. A client without an example is a ValueError.
    """
    examples = len(labels)
    check_clients(examples, clients)
    sizes = _sizes(examples, clients, law)
    if sizes[0] < 1:
        # The first has the fewer the more they are, so the place is found by halving.
        most = bisect_left(range(1, clients + 1), x=True, key=lambda n: bool(_sizes(examples, n, law)[0] < 1))
        raise ValueError(
            f"the first of {clients} clients would have none of {examples} examples: ask for at most {most}"
        )
    return partition_of(generator(law, seed).permutation(examples), sizes)


def _sizes(examples: int, clients: int, law: Law) -> Integers:
    place = np.arange(1, clients + 1, dtype=np.int64)
    if law == "exponential":
        units = np.exp(place - float(clients))  # in proportion, and finite for any number of clients
        sizes = np.floor(units / units.sum() * examples).astype(np.int64)
    else:
        whole = [int(i) ** (2 if law == "square" else 1) for i in place]
        total = sum(whole)
        sizes = np.array([unit * examples // total for unit in whole], dtype=np.int64)
    sizes[-1] += examples - sizes.sum()
    return sizes


def _by_label(number: Integers, counts: Integers, rng: np.random.Generator) -> Partition:
    """Deal examples of labels `number` (M,), drawn within a label, to clients that have so many: `counts` (C, N)."""
    shuffled = rng.permutation(len(number))
    by_label = shuffled[np.argsort(number[shuffled], kind="stable")]
    first = np.cumsum(np.bincount(number)) - np.bincount(number)
    taken = np.concatenate([by_label[a : a + n] for a, n in zip(first, counts.sum(1), strict=True)])
    owner = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    return partition_of(taken[np.argsort(owner, kind="stable")], counts.sum(0))


def _cumulated(shares: NDArray[np.float64], left: Sequence[int]) -> list[float]:
    """Return a client's cumulated shares (C,) of the labels that are left, or where it has none what is left of each."""
    kept = np.where(np.array(left) > 0, shares, 0.0)
    return (kept if kept.any() else np.array(left, dtype=np.float64)).cumsum().tolist()


def _check_labels(option: str, asked: int, there: int) -> None:
    if not 1 <= asked <= there:
        raise ValueError(f"{option} is {asked}: there are {there} labels: give 1 to {there}")


def _weights(weights: Weights, count: int, columns: int) -> NDArray[np.float64]:
    if len(weights) != count or any(len(row) != columns for row in weights):
        raise ValueError(f"weights are not {count} rows, one a label, of {columns} numbers, one a client that has it")
    result = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(result) & (result >= 0)).all():
        raise ValueError("weights are not all finite numbers from 0: mend them")
    return result
