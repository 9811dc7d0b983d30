"""Shared code of methods that add a penalty on how domains differ to the mean of the losses.

DomainBed has these methods for data in one place: Gulrajani & Lopez-Paz, "In search of lost domain generalization",
ICLR 2021, algorithms.py. Here each client takes its own part of the gradient. Whatever it has to know of other
domains is computed at the model that is sent, and stays fixed for its local steps. With one full step a round, and
one client a domain, the result is DomainBed's. Several clients of a domain take a part each, and count as clients in
the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from pydantic import Field

from fedfleet.algorithms.fedavg import AveragingOptions, State, server_of
from fedfleet.algorithms.local import Direction, Local, local_training
from fedfleet.algorithms.options import CohortOptions, ServerOptimizer
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
    server_optimizer: ServerOptimizer = ServerOptimizer()
    """The server's rule for the mean update; with one local step a round, it is DomainBed's optimiser for the gradient."""

    def penalty_at(self, t: int) -> float:
        """Return the penalty's weight in round t."""
        return min(1.0, self.penalty) if t < self.anneal_rounds else self.penalty


class Known(NamedTuple):
    """What clients are told of all domains, trees and numbers, and each of them alone (S, ...)."""

    send: Mapping[str, Tree]
    config: Mapping[str, float]
    client_input: Tree = None


class Look(NamedTuple):
    """An exchange before the training.

    Attributes:
        phase: the exchange.
        result: ``(found, cohort, problem) -> known``.
        common: what clients have of the model in both exchanges without being told, as from a seed that is the same for all.

    """

    phase: Phase
    result: Callable[[Reduced, Cohort, Problem], Known]
    common: Callable[[Tree], Mapping[str, Tree]] = lambda z: {}


def penalised(
    options: PenaltyOptions, task: Task, cohort: CohortOptions, direction: Direction, look: Look | None, name: str
) -> Algorithm:
    """Build an algorithm that averages local training along ``direction``.

    ``local.client_state`` of a direction is the client's ``client_input``.
    """
    rule, server = options.client_optimizer.build(), server_of(options.server_optimizer, task)

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        return Local(shared["z"], rule.init(shared["z"]), client_input)

    work = replace(local_training(options.plan(), direction, rule), client_init=client_init)
    train = Phase(
        name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z", dated=look is not None
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        if look is not None and (problem.domains is None or len(problem.domains.examples) < 2):
            raise ConfigError(
                f"algorithm.name={name!r}: it compares domains, and there is one alone: take a data set that has some, or set "
                f"domains.kind=client"
            )
        return server.start(z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        z, invited, known, common = state.z, rnd.invite(cohort.size), Known({}, {}), {}
        if look is not None:
            common = look.common(z)
            result = rnd.map_reduce(look.phase, shared=Message({"z": z}, {}, common), cohort=invited)
            known = look.result(result, invited, rnd.problem)
        config = {"lr": options.rates(rnd.index, task.parts), "penalty": options.penalty_at(rnd.index)}
        shared = Message({"z": z, **known.send}, {**config, **known.config}, common)
        mean = rnd.map_reduce(train, shared=shared, cohort=invited, client_input=known.client_input)["z"]
        return server.moved(state, mean), {}

    return Algorithm(
        init,
        round,
        (train,) if look is None else (look.phase, train),
        {"global": View(lambda state: state.z)},
        minimises=True,
        same_cohort=look is not None,
        buffers=True,
        name=name,
    )
