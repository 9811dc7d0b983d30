"""What methods with a penalty on how domains differ share, beside the mean of their losses.

DomainBed has them in one place for data that are in one place: Gulrajani & Lopez-Paz, "In search of lost domain generalization",
ICLR 2021, algorithms.py. Here each client takes its own part of the gradient, with what it has to know of other domains, taken at
the model that is sent, fixed for its local steps: with one full step a round, and each domain one client, it is theirs. Several
clients of a domain have their part each, and count as clients in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.local import Direction, Local, local_training
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.author import (
    Algorithm,
    Cohort,
    ConfigError,
    Key,
    Mean,
    Message,
    Phase,
    Problem,
    Reduced,
    Round,
    Task,
    Tree,
    View,
)


class PenaltyOptions(AveragingOptions):
    """Options of local training with a penalty."""

    weight: Literal["num_examples", "uniform"] = "uniform"
    penalty: float = Field(default=1.0, ge=0)
    """Weight of the penalty; 0 is FedAvg."""
    anneal_rounds: int = Field(default=0, ge=0)
    """Rounds at the beginning in which the penalty has weight 1, or ``penalty`` if that is less."""

    def penalty_at(self, t: int) -> float:
        """Return the penalty's weight in round t."""
        return min(1.0, self.penalty) if t < self.anneal_rounds else self.penalty


class Known(NamedTuple):
    """What clients are told of all domains, trees and numbers, and each of them alone (S, ...)."""

    send: Mapping[str, Tree]
    config: Mapping[str, float]
    inbox: Tree = None


class Look(NamedTuple):
    """An exchange before the training: ``learnt(found, cohort, problem) -> known``."""

    phase: Phase
    learnt: Callable[[Reduced, Cohort, Problem], Known]


def penalised(
    options: PenaltyOptions, task: Task, cohort: CohortOptions, direction: Direction, look: Look | None, name: str
) -> Algorithm:
    """Build an algorithm that averages local training along ``direction``, whose ``local.own`` is the client's inbox."""
    rule = options.client_optimizer.build()

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Local:
        return Local(shared["z"], rule.init(shared["z"]), inbox)

    work = replace(local_training(options.plan(), direction, rule), begin=begin)
    train = Phase(
        name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z", dated=look is not None
    )

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        if look is not None and (problem.domains is None or len(problem.domains.examples) < 2):
            raise ConfigError(
                f"algorithm.name={name!r}: it compares domains, and there is one alone: take a data set that has some, or set "
                f"domains.kind=client"
            )
        return z

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        invited, known = rnd.invite(cohort.invite), Known({}, {})
        if look is not None:
            found = rnd.map_reduce(look.phase, shared=Message({"z": z}), cohort=invited)
            known = look.learnt(found, invited, rnd.problem)
        config = {"lr": options.rates(rnd.index, task.parts), "penalty": options.penalty_at(rnd.index)}
        shared = Message({"z": z, **known.send}, {**config, **known.config})
        return rnd.map_reduce(train, shared=shared, cohort=invited, inbox=known.inbox)["z"], {}

    return Algorithm(
        init,
        round,
        (train,) if look is None else (look.phase, train),
        {"global": View(lambda z: z)},
        minimises=True,
        same_cohort=look is not None,
        buffers=True,
        name=name,
    )
