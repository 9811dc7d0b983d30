"""ClusterFedVARP: the last update of each cluster of clients stands for those that are not heard.

Jhunjhunwala, Sharma, Nagarkatti & Joshi, "FedVARP: tackling the variance due to partial client participation", UAI 2022,
Section 4: FedVARP whose memory is one update a cluster, at the server.

    paper         here
    clusters      the domains of the clients (``domains``), such as clusters of their labels
    Y_k           state.known[k], float64, zeros at first
    N_k / N       each cluster's part of all clients, or of all examples
    H, H_k        the clients heard, those of cluster k

    x <- x + lr (mean_H (Delta_i - Y_k(i)) + sum_k (N_k / N) Y_k);   Y_k <- the mean of Delta_i over H_k, where that is not empty

Where clients of one cluster are heard unequally often, Y_k follows those heard more often, and the step is biased. ``known_p``
divides by the clients' chances, in both means; or choose clusters whose clients are alike in that.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.agnostic import of_problem
from fedfleet.algorithms.domain_participation import ChanceCorrection
from fedfleet.algorithms.local import gradient, local_training, send_change
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    ByDomainMean,
    Key,
    Message,
    Phase,
    Problem,
    Round,
    T,
    Task,
    Tree,
    View,
)


class ClusterFedVarpOptions(LocalOptions):
    """Options of ClusterFedVARP."""

    global_lr: float = Field(default=1.0, gt=0)
    """Server learning rate."""
    weight: Literal["num_examples", "uniform"] = "num_examples"
    """How much a client counts, here and among all."""
    correction: ChanceCorrection = ChanceCorrection()
    """Correction for clients that are heard less often than others of their cluster."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class State(NamedTuple):
    """The model, and the last update of each cluster: leaves (G, ...) float64."""

    z: Tree
    known: Tree


def cluster_fedvarp(options: ClusterFedVarpOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build ClusterFedVARP."""

    how = options.correction
    work = local_training(options.plan(), gradient, options.client_optimizer.build(), send_change)
    train = how.changed(Phase(name="train", work=work, reduce={"dz": ByDomainMean()}, weight=options.weight))

    def parts(problem: Problem) -> Tensor:
        """Return what each cluster is of all (G,) float64: its examples, or its clients."""
        domains = of_problem(problem)
        of = domains.examples
        if options.weight == "uniform":
            of = domains.of(torch.arange(problem.clients)).bincount(minlength=len(of))
        return of.double() / of.sum()

    def init(z: Tree, key: Key, problem: Problem) -> State:
        clusters = len(of_problem(problem).examples)
        return State(z, T.map(lambda leaf: torch.zeros(clusters, *leaf.shape, dtype=torch.float64), z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        shared = Message(send={"z": state.z}, config={"lr": options.rates(rnd.index, task.parts)})
        weighed = how.weighing(rnd)
        invited = weighed(train, rnd.invite(cohort.size), shared=shared)
        heard = rnd.map_reduce(train, shared=shared, cohort=invited)["dz"]
        weight, of_all = heard.weight.double(), parts(rnd.problem)
        whole = float(weight.sum())
        if how.kind != "none":  # Horvitz-Thompson: those invited, and what clients count on average
            whole = len(invited) * (rnd.problem.mean_examples if options.weight == "num_examples" else 1.0)

        def step(y: Tensor, d: Tensor) -> Tensor:
            moved = (T.column(weight, d) * (d.double() - y[heard.domain])).sum(0) / whole
            return moved + (T.column(of_all, y) * y).sum(0)

        d = T.map(step, state.known, heard.value)
        known = T.map(lambda y, v: y.index_copy(0, heard.domain, v.double()), state.known, heard.value)
        z = T.map(lambda z, d: (z.double() + options.global_lr * d).to(z.dtype), state.z, d)
        return State(z, known), weighed.metrics

    chances = how.asks(ratio=False)
    return Algorithm(init, round, (train,), {"global": View(lambda state: state.z)}, chances=chances)
