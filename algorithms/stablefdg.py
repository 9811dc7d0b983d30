"""StableFDG: clients train on styles of one another, and on styles beyond, with a net that attends to what a class has in common.

Park, Han, Kim, Wang, Brinton & Moon, "StableFDG: style and attention based learning for federated domain generalization", NeurIPS
2023, and its released code; ``tasks/styles.py`` has what is done to a batch, ``tasks/attentive.py`` the net. Two exchanges a round,
with the same clients:

    1    at the model that is sent, mean and deviation over a client's examples of their styles, which are mean and deviation of
         each channel after the net's first block: four numbers a channel
    2    local steps, with those of another client

    released code                         here
    styles of all clients                 of those invited: no other is given away
    each participant's given to another   the same, in a random circle of the clients heard in 1, so that of two or more none has
                                          its own; one that is not in it, or alone, shares none
    no styles shared in the first round   they are
    deviations of one example             those of equal examples: the root of 1e-6, where the unbiased one is not a number
    statistics while styles are taken     running ones of BatchNorm, if there is any
    probability 1/2 of either, 32, 3      share, explore, copies, factor
    Beta(0.1, 0.1)                        alpha

Clients count alike. With ``share: 0`` there is one exchange; with ``explore: 0`` too it is FedAvg of the task's net.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.local import Local, gradient, local_training, over_all, zero
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    Cohort,
    CollectUploads,
    ConfigError,
    Key,
    LocalWork,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Reduced,
    Round,
    StepInfo,
    Task,
    Tree,
    View,
    positions,
    rng,
)

EPS = 1e-6  # added to the variance over examples


class StableFdgOptions(AveragingOptions):
    """Options of StableFDG."""

    weight: Literal["num_examples", "uniform"] = "uniform"
    share: float = Field(default=0.5, ge=0, le=1)
    """Probability that a batch takes on styles of another client and of its own clusters; 0 sends no styles."""
    explore: float = Field(default=0.5, ge=0, le=1)
    """Probability, after each block but the last, that styles are mixed, the first time with copies of styles beyond."""
    copies: int = Field(default=32, ge=0)
    """Examples appended to a batch whose styles are explored."""
    factor: float = Field(default=3.0, ge=0)
    """How far their styles are moved away from the batch's mean, as a multiple of how far they are from it."""
    alpha: float = Field(default=0.1, gt=0)
    """Of the Beta distribution of how much an example keeps of its style when styles are mixed."""


class _Moments(NamedTuple):
    """Of the styles seen so far: their number, their mean (width,), the sum of squares around it (width,)."""

    number: Tensor
    mean: Tensor
    squares: Tensor


def stablefdg(options: StableFdgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build StableFDG; its state is z. Raises ConfigError for a task whose net has no styles."""
    width = getattr(task, "style_width", None)
    if width is None:
        raise ConfigError(
            "algorithm.name='stablefdg': it is for a net that knows styles of images: set task.name=attentive"
        )
    rule, sharing = options.client_optimizer.build(), options.share > 0
    change = options.model_dump(include={"share", "explore", "copies", "factor", "alpha"})

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        return Local(shared["z"], rule.init(shared["z"]), client_input)

    def direction(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Tree:
        foreign = zero(shared, key).expand(2, width) if local.client_state is None else local.client_state
        return ops.grad("stablefdg", local.z, batch, key, ctx={**change, "foreign": foreign})[0]

    plain = not sharing and options.explore == 0
    work = replace(local_training(options.plan(), gradient if plain else direction, rule), client_init=client_init)
    reduce = {"style": CollectUploads()}
    look = Phase(name="styles", work=_look(width), reduce=reduce, dated=True)
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z", dated=sharing)

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        invited, styles = rnd.invite(cohort.size), None
        if sharing:
            result = rnd.map_reduce(look, shared=Message({"z": z}), cohort=invited)
            styles = dealt(result, invited, rng.fold(rnd.key, "styles"))
        shared = Message({"z": z}, {"lr": options.rates(rnd.index, task.parts)})
        return rnd.map_reduce(train, shared=shared, cohort=invited, client_input=styles)["z"], {}

    return Algorithm(
        init,
        round,
        (look, train) if sharing else (train,),
        {"global": View(lambda z: z)},
        minimises=True,
        same_cohort=sharing,
        buffers=True,
    )


def dealt(result: Reduced, invited: Cohort, key: Key) -> Tensor:
    """Return for each client invited the styles (S, 2, width) of another one that was heard, 0 where there is none."""
    styles: Tensor = result["style"].stacked()
    numbered = result.received.argsort()  # blocks may come in another order
    circle = numbered[rng.permutation(key.to(numbered.device), len(numbered))]
    of = torch.zeros((len(invited), *styles.shape[1:]), dtype=styles.dtype, device=styles.device)
    if len(circle) < 2:
        return of
    place = positions(result.received[circle], invited.clients)
    return of.index_copy(0, place, styles[circle.roll(-1)])


def _look(width: int) -> LocalWork:
    def begin(shared: Mapping[str, Any], key: Key) -> _Moments:
        nothing = zero(shared, key)
        return _Moments(nothing, nothing.expand(width), nothing.expand(width))

    def add(ops: Ops, shared: Mapping[str, Any], seen: _Moments, batch: Batch, at: StepInfo, key: Key) -> _Moments:
        styles, real = ops.apply("styles", shared["z"], batch), (batch.weight > 0)[:, None]
        n = batch.count().to(seen.number.dtype)
        mean = torch.where(real, styles, 0.0).sum(0) / n.clamp(min=1)
        squares = torch.where(real, styles - mean, 0.0).square().sum(0)
        total, away = seen.number + n, mean - seen.mean
        share = n / total.clamp(min=1)
        more = squares + away.square() * seen.number * share
        return _Moments(total, seen.mean + away * share, seen.squares + more)

    def tell(seen: _Moments) -> dict[str, Tensor]:
        variance = seen.squares / (seen.number - 1).clamp(min=1)
        return {"style": torch.stack([seen.mean, (variance + EPS).sqrt()])}

    return over_all(begin, add, tell)
