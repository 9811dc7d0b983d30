"""Fish: a model goes from domain to domain, a step in each, and the server moves towards where it ends.

Shi, Seely, Torr, Siddharth, Hannun, Usunier & Synnaeve, "Gradient matching for domain generalization", ICLR 2022, Algorithm 1, as
in DomainBed:

    inner    of the domains in random order    w <- w - alpha g_d(w)        from w = z
    outer    z <- z + epsilon (w - z)

The mean over orders of where it ends is z - alpha sum_d g_d + alpha^2 / 2 grad sum_{d < e} <g_d, g_e> + O(alpha^3): gradients of
domains come to agree. Here a domain is a client, and each step an exchange with one of those invited: as many exchanges a round as
clients, one after the other, so that a round takes as long as all of them together. A model travels each way. Where one does not
answer there is no round: it starts again, or is skipped.

    DomainBed                 here
    alpha                     lr
    epsilon                   epsilon: 0.5, drawn of 0.05, 0.1 and 0.5 there; divided by the number of domains in the authors' code
    one minibatch a domain    steps: 1
    Adam's state of the       each client has a state of its own, which starts afresh, or with state: persist is kept
    inner steps goes on       from its last step
"""

from __future__ import annotations

from pydantic import Field

from fedfleet.algorithms.local import carried, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions
from fedfleet.simulator.author import (
    Algorithm,
    Cohort,
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
    rng,
)


class FishOptions(LocalOptions):
    """Options of Fish."""

    client_optimizer: LocalOptimizer = LocalOptimizer()
    epsilon: float = Field(default=0.5, gt=0)
    """The share of the way to where the round ends that the server goes."""


def fish(options: FishOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Fish; its state is z."""
    work = local_training(options.plan(), optimizer=options.client_optimizer.build())
    step = Phase(name="step", work=work, reduce={"z": Mean()}, dated=True)  # a late model began elsewhere

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        invited, end = rnd.invite(cohort.size), z
        config = {"lr": options.rates(rnd.index, task.parts)}
        for place in rng.permutation(rng.fold(rnd.key, "order"), len(invited)).tolist():
            one = Cohort(invited.clients[place : place + 1], invited.copies[place : place + 1])
            end = rnd.map_reduce(step, shared=Message({"z": end}, config), cohort=one)["z"]
        return carried(task.objectives["train"].step(z, options.epsilon, T.sub(z, end)), end), {}

    return Algorithm(
        init,
        round,
        (step,),
        {"global": View(lambda z: z)},
        minimises=True,
        same_cohort=True,
        buffers=True,
    )
