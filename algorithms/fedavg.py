"""FedAvg, and FedOpt with a server optimiser.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017, Algorithm 1;
Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2; FedAvgM: Hsu et al., arXiv 1909.06335.

    paper          here
    w_t            z
    E, B, eta      epochs (or steps), batch_size, lr
    Delta_t        the mean of the clients' final points minus z
    eta, beta, tau server_optimizer.lr, .momentum / .beta1 / .beta2, .eps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fedfleet.algorithms.local import Direction, carried, gradient, local_training
from fedfleet.algorithms.options import CohortOptions, LocalOptimizer, LocalOptions, ServerOptimizer
from fedfleet.algorithms.participation import Correction, correcting
from fedfleet.simulator.author import (
    Algorithm,
    Key,
    Mean,
    Message,
    Personal,
    Phase,
    Problem,
    Round,
    T,
    Task,
    Tree,
    View,
)


class AveragingOptions(LocalOptions):
    """Options of local training whose results are averaged."""

    weight: Literal["num_examples", "uniform"] = "num_examples"
    """How much a client counts in the mean."""
    client_optimizer: LocalOptimizer = LocalOptimizer()


class FedAvgOptions(AveragingOptions):
    """Options of FedAvg."""

    server_optimizer: ServerOptimizer = ServerOptimizer()
    correction: Correction = Correction()
    """Correction for clients that are heard less often than others."""


class FedOptOptions(FedAvgOptions):
    """Options of FedOpt: FedAvg with FedAdam's server by default."""

    server_optimizer: ServerOptimizer = ServerOptimizer(name="adam", lr=0.1)


class State(NamedTuple):
    """The model and the server optimiser's state."""

    z: Tree
    server: Any


class Server(NamedTuple):
    """The server's step: ``start(z)`` and ``moved(state, mean)``, of the mean of clients' models."""

    start: Callable[[Tree], State]
    moved: Callable[[State, Tree], State]


def server_of(options: ServerOptimizer, task: Task) -> Server:
    """Return the step that takes the mean update for a gradient; plain SGD of rate 1 takes the mean as it is, to the bit."""
    optimizer = options.build()
    plain = options.name == "sgd" and options.momentum == 0 and options.lr == 1

    def moved(state: State, mean: Tree) -> State:
        if plain:
            return State(mean, state.server)
        d, moments = optimizer.update(state.server, T.sub(state.z, mean), state.z)
        return State(carried(task.objectives["train"].step(state.z, options.lr, d), mean), moments)

    return Server(lambda z: State(z, optimizer.init(z)), moved)


def fedavg(options: FedAvgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedAvg."""
    return averaging(options, task, cohort, gradient)


def averaging(
    options: FedAvgOptions,
    task: Task,
    cohort: CohortOptions,
    direction: Direction,
    config: Callable[[int], Mapping[str, float]] = lambda t: {},
    *,
    per_step: int = 1,
) -> Algorithm:
    """Build an algorithm that averages local training along a direction.

    Args:
        options: those of local training, the mean, the server and the correction.
        task, cohort: as every algorithm is given them.
        direction: what a local step goes along.
        config: of round t, numbers that are sent to clients.
        per_step: minibatches a step.

    """
    server = server_of(options.server_optimizer, task)
    work = local_training(options.plan(per_step), direction, options.client_optimizer.build())
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, model="z")

    def message(state: State, t: int) -> Message:
        return Message(send={"z": state.z}, config={"lr": options.rates(t, task.parts), **config(t)})

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return server.start(z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        mean = rnd.map_reduce(train, shared=message(state, rnd.index), cohort=rnd.invite(cohort.size))["z"]
        return server.moved(state, mean), {}

    made = Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda state: state.z)},
        buffers=True,
        personal=Personal(message, work),  # what a client has at the end of its round: the global model, fine-tuned
    )
    return correcting(options.correction, made, "train", "z", model=True, rates=True)
