"""REFL: those of the clients online that are online least, and late answers by how old and how different they are.

Abdelmoniem, Sahu, Canini & Fahmy, "REFL: resource-efficient federated learning", EuroSys 2023.

    paper      here
    n_F, u_F   the answers of this round, and their mean
    u_s, tau   a late answer, and the rounds that it is late
    Lambda_s   |u_F - (u_s + n_F u_F) / (n_F + 1)|^2 / |u_F|^2, and its largest among those of the round
    beta, c    beta, damping

    select those online with the least chance of being so;  x <- x + sum_i w_i u_i / sum_i w_i,
    w_i = 1 of this round's,  (1 - beta) / (tau + 1) + beta (1 - exp(-Lambda_s / Lambda_max) / c) of late ones

The paper's clients predict whether they are online in the next window; here the model of availability says how likely they are.
c is of the authors' code. Nothing here is unbiased: who is rarely online counts for more, and who is late for less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.f3ast import ChoosingOptions, check, invited, online
from fedfleet.algorithms.local import Local, gradient, local_training, send_change
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import (
    Algorithm,
    CollectUploads,
    ConfigError,
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


class ReflOptions(ChoosingOptions):
    """Options of REFL."""

    beta: float = Field(default=0.35, ge=0, le=1)
    """Share of a late answer's weight that goes by how different it is; the rest goes by its age."""
    weight: Literal["num_examples", "uniform"] = "uniform"
    """Weight of a client besides."""
    damping: float = Field(default=10.0, ge=1)
    """c: 10 as in the authors' code; 1 leaves it out."""


def refl(options: ReflOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build REFL; its state is z. Raises ConfigError."""
    check(options, cohort)
    usual = CohortOptions.model_fields["stale_discount"].default
    if cohort.stale_discount != usual:
        raise ConfigError(
            f"cohort.stale_discount={cohort.stale_discount:g}: algorithm.name='refl' has weights of its own for late answers: "
            f"leave it out"
        )

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        message, _ = send_change(shared, client_state, client_input, local)
        return Message(message.send, {"t": client_input}), client_state  # the round in which it was asked

    work = local_training(options.plan(), gradient, options.client_optimizer.build(), client_final)
    train = Phase(name="train", work=work, reduce={"dz": CollectUploads()}, weight=options.weight)

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        shared = Message({"z": z}, {"lr": options.rates(rnd.index, task.parts)})
        here = invited(online(rnd, cohort.size))
        t = torch.full((len(here),), float(rnd.index), dtype=T.leaves(z)[0].dtype)
        chances = rnd.chances(train, shared=shared, cohort=here, client_input=t)
        least = here.clients[chances.argsort(stable=True)[: options.select].sort().values]
        result = rnd.map_reduce(train, shared=shared, cohort=invited(least), client_input=t[: len(least)])
        age = rnd.index - result.config["t"].double()
        weights = stale_weights(result["dz"].gram(), age, options.beta, options.damping)
        weights = weights * result["dz"].weight.double() / result.unit
        return T.add(z, result["dz"].combine(weights / weights.sum())), {"late": float((age > 0).sum())}

    return Algorithm(init, round, (train,), {"global": View(lambda z: z)}, chances="relative")


def stale_weights(gram: Tensor, age: Tensor, beta: float, damping: float) -> Tensor:
    """Return the weights (R,) of answers that are so many rounds old (R,), some of them 0, from their inner products (R, R)."""
    late = age > 0
    mean = (~late).double() / (~late).sum()
    apart = (gram.diagonal() - 2 * gram @ mean + mean @ gram @ mean).clamp(min=0)
    # It is |u_s - u_F|^2: Lambda_s but for (n_F + 1)^2 |u_F|^2, which all have in common.
    most = apart[late].max() if bool(late.any()) else apart.new_ones(())
    told = torch.where(most > 0, apart / most, 0.0)
    return torch.where(late, (1 - beta) / (age + 1) + beta * (1 - torch.exp(-told) / damping), 1.0)
