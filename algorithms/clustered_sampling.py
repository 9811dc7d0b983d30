"""FedAvg whose cohorts are drawn by the clients' examples: independently, or one from each of as many clusters.

Fraboni, Vidal, Kameni & Lorenzi, "Clustered sampling: low-variance and improved representativity for clients selection in federated
learning", ICML 2021, Algorithms 1 and 2; multinomial sampling (MD): Li et al., "On the convergence of FedAvg on non-IID data", ICLR
2020.

    paper     here
    m         cohort.size, draws with replacement
    p_i       n_i / n
    W_k       the clients in cluster k, of which there are m with n examples each, where client i has m n_i of them; each is drawn
              with its part of that

    clustered   clients in order of falling n_i fill one cluster after the other (Algorithm 1)
    similarity  Ward's tree groups clients by the angles between their last updates, 0 with one that was never heard. It is cut
                where groups hold n / m examples at most: the m largest keep a cluster each, the others fill these (Algorithm 2)

As in the authors' code, Ward's distances are those of rows of the matrix of angles. There the others come in a drawn order; here
by size and number. A client of more than n / m examples has a cluster of its own and fills others with the rest; their code drops
that. The server keeps every client's last update.

Every draw counts 1/m, so a client counts p_i on average under both laws; clusters have less variance. Both take everybody drawn to
answer. Where some do not, the mean over those heard has another fixed point, unless ``correction`` divides by their chances.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedfleet.algorithms.domain_participation import ChanceCorrection
from fedfleet.algorithms.local import carried, gradient, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    CollectUploads,
    ConfigError,
    Key,
    Mean,
    Message,
    Phase,
    Problem,
    Round,
    T,
    Task,
    Tree,
    UploadMatrix,
    View,
    rng,
    trainable,
)

COMPARED = 2000
"""Clients whose updates are compared, at the most: a round then takes seconds."""


class SamplingOptions(LocalOptions):
    """Options of FedAvg whose cohorts are drawn by examples."""

    law: Literal["clustered", "similarity", "multinomial"] = "clustered"
    """One client of each cluster, by examples alone, or by last updates; or every draw from all."""
    correction: ChanceCorrection = ChanceCorrection()
    """Correction for clients that are heard less often than others."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class State(NamedTuple):
    """The model, and with ``law: similarity`` the last update of each client: leaves (N, ...), 0 for whoever was never heard."""

    z: Tree
    last: Any = None


def drawn(law: str, examples: Tensor, u: Tensor) -> Tensor:
    """Return the clients of m draws from N clients with these numbers of examples (N,), for u (m,) float64 in [0, 1)."""
    order = examples.argsort(descending=True, stable=True)
    upto = examples[order].double().cumsum(0) / examples.sum()
    if law == "clustered":
        u = (torch.arange(len(u), dtype=torch.float64) + u) / len(u)
    return order[torch.searchsorted(upto, u, right=True).clamp(max=len(order) - 1)]


def drawn_of(held: Tensor, u: Tensor) -> Tensor:
    """Return a client of each of m clusters that hold so many of clients' examples (m, N), for u (m,) float64 in [0, 1)."""
    upto = held.cumsum(1).double()
    return torch.searchsorted(upto, (u * upto[:, -1])[:, None], right=True)[:, 0].clamp(max=held.shape[1] - 1)


def angles(gram: Tensor) -> Tensor:
    """Return the angles (N, N) between updates with these inner products (N, N), 0 with one that is 0."""
    length = gram.diagonal().clamp(min=0).sqrt()
    both = length[:, None] * length
    return torch.where(both > 0, torch.arccos((gram / both.where(both > 0, 1.0)).clamp(-1, 1)), 0.0)


def groups(rows: Tensor, examples: Tensor, m: int) -> list[list[int]]:
    """Return the clients of the largest subtrees of Ward's tree over rows (N, d) that hold n / m examples at most.

    A client that holds more is by itself. Groups are in order of rising numbers of examples.
    """
    from scipy.cluster.hierarchy import linkage  # here, for they take half a second to import
    from scipy.spatial.distance import pdist

    whole, held = int(examples.sum()), examples.tolist()
    members = {i: [i] for i in range(len(held))}
    for a, b in linkage(pdist(rows.numpy()), "ward")[:, :2].astype(int).tolist() if len(held) > 1 else ():
        held.append(held[a] + held[b])
        if held[-1] * m <= whole:
            members[len(held) - 1] = members.pop(a) + members.pop(b)
    return [sorted(members[i]) for i in sorted(members, key=lambda i: (held[i], members[i]))]


def bins(grouped: list[list[int]], examples: Tensor, m: int) -> Tensor:
    """Return how many of a client's m n_i examples each of m clusters has (m, N), of n in all, for groups in rising order."""
    whole, left = int(examples.sum()), (m * examples).tolist()
    result = torch.zeros(m, len(left), dtype=torch.int64)
    room = [whole] * m

    def pour(client: int, k: int) -> None:
        part = min(left[client], room[k])
        result[k, client] += part
        left[client] -= part
        room[k] -= part

    for k, group in enumerate(grouped[-m:]):
        for client in group:
            pour(client, k)
    k = 0
    for client in (client for group in grouped for client in group):
        while left[client]:
            if not room[k]:
                k += 1
            pour(client, k)
    return result


def clustered_sampling(options: SamplingOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAvg with such cohorts. Raises ConfigError."""
    how, similar = options.correction, options.law == "similarity"
    work = local_training(options.plan(), gradient, options.client_optimizer.build())
    train = how.changed(
        Phase(name="train", work=work, reduce={"z": CollectUploads() if similar else Mean()}, model="z")
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        if not similar:
            return State(z)
        if problem.clients > COMPARED:
            raise ConfigError(
                f"algorithm.law='similarity': it keeps and compares the last updates of all {problem.clients:,} clients, and up to "
                f"{COMPARED:,} may be: choose clustered"
            )
        return State(z, T.map(lambda leaf: leaf.new_zeros(problem.clients, *leaf.shape), trainable(z)))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        problem, z = rnd.problem, state.z
        everybody = torch.arange(problem.clients)
        examples = torch.ones_like(everybody) if problem.num_examples is None else problem.num_examples(everybody)

        def clients(number: int, key: Key) -> Tensor:
            u = rng.uniform(key, (number,), torch.float64)
            if not similar:
                return drawn(options.law, examples, u)
            rows = angles(UploadMatrix((state.last,), (torch.ones(problem.clients),)).gram())
            return drawn_of(bins(groups(rows, examples, number), examples, number), u)

        shared = Message(send={"z": z}, config={"lr": options.rates(rnd.index, task.parts)})
        weighed = how.weighing(rnd)
        invited = weighed(train, rnd.draw(cohort.size, clients), shared=shared)
        result = rnd.map_reduce(train, shared=shared, cohort=invited)
        mean = result["z"].mean() if similar else result["z"]
        last = state.last
        if similar:
            rows = {client: i for i, client in enumerate(result.received.tolist())}  # the last of who is drawn twice
            heard, places = torch.tensor(list(rows)), torch.tensor(list(rows.values()))
            sent = T.index(result["z"].of(trainable).stacked(), places)
            last = T.map(lambda old, new, start: old.index_copy(0, heard, new - start), last, sent, trainable(z))
        if how.kind == "none":
            return State(mean, last), weighed.metrics
        share = float(result.unit.sum()) / how.answers(result, invited)
        return State(
            carried(T.axpy(share, T.sub(trainable(mean), trainable(z)), trainable(z)), mean), last
        ), weighed.metrics

    chances = how.asks(ratio=False)
    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, buffers=True, chances=chances)
