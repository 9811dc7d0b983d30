"""FedAvg whose cohorts are drawn by the clients' examples: independently, or one from each of as many clusters.

Fraboni, Vidal, Kameni & Lorenzi, "Clustered sampling: low-variance and improved representativity for clients selection in federated
learning", ICML 2021, Algorithm 1; multinomial sampling (MD): Li et al., "On the convergence of FedAvg on non-IID data", ICLR 2020.

    paper     here
    m         cohort.invite, draws with replacement
    p_i       n_i / n
    W_k       the clients in cluster k: of all, in order of falling n_i, those who hold the k-th of m equal parts of m n examples,
              where client i has m n_i; each is drawn with its part of that

Every draw counts 1/m, so a client counts p_i on average under both laws; clusters have less variance. Both take everybody drawn to
answer. Where some do not, the mean over those heard has another fixed point, unless ``correction`` divides by their chances.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedfleet.algorithms.domain_participation import ChanceCorrection
from fedfleet.algorithms.local import carried, gradient, local_training
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Key,
    Mean,
    Message,
    Phase,
    Problem,
    Round,
    T,
    Task,
    Tree,
    View,
    learnt,
    rng,
)


class SamplingOptions(LocalOptions):
    """Options of FedAvg whose cohorts are drawn by examples."""

    law: Literal["clustered", "multinomial"] = "clustered"
    """One client of each cluster, or every draw from all."""
    correction: ChanceCorrection = ChanceCorrection()
    """Correction for clients that are heard less often than others."""
    client_optimizer: ClientOptimizer = ClientOptimizer()


def drawn(law: str, examples: Tensor, u: Tensor) -> Tensor:
    """Return the clients of m draws from N clients with these numbers of examples (N,), for u (m,) float64 in [0, 1)."""
    order = examples.argsort(descending=True, stable=True)
    upto = examples[order].double().cumsum(0) / examples.sum()
    if law == "clustered":
        u = (torch.arange(len(u), dtype=torch.float64) + u) / len(u)
    return order[torch.searchsorted(upto, u, right=True).clamp(max=len(order) - 1)]


def clustered_sampling(options: SamplingOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAvg with such cohorts; its state is z."""
    how = options.correction
    work = local_training(options.plan(), gradient, options.client_optimizer.build())
    train = how.changed(Phase(name="train", work=work, reduce={"z": Mean()}, model="z"))

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        problem = rnd.problem
        everybody = torch.arange(problem.clients)
        examples = torch.ones_like(everybody) if problem.num_examples is None else problem.num_examples(everybody)

        def clients(number: int, key: Key) -> Tensor:
            return drawn(options.law, examples, rng.uniform(key, (number,), torch.float64))

        shared = Message(send={"z": z}, config={"lr": options.rates(rnd.index, task.parts)})
        invited = how.weighed(rnd, train, rnd.draw(cohort.invite, clients), shared=shared)
        found = rnd.map_reduce(train, shared=shared, cohort=invited)
        mean = found["z"]
        if how.kind == "none":
            return mean, {}
        share = float(found.unit.sum()) / how.answers(found, invited)
        return carried(T.axpy(share, T.sub(learnt(mean), learnt(z)), learnt(z)), mean), {}

    chances = how.asks(ratio=False)
    return Algorithm(init, round, (train,), {"global": View(lambda z: z)}, buffers=True, chances=chances)
