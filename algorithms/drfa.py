"""DRFA: distributionally robust federated averaging, with local steps and two exchanges a round.

Deng, Kamani & Mahdavi, "Distributionally robust federated averaging", NeurIPS 2020, Algorithm 1. There a client is a domain
(``domains.kind: client``); here a domain may have many.

    paper              here
    w, lambda          z, mixture
    tau, t'            steps, drawn anew in each round from 1..steps
    eta, gamma         lr, dual.lr
    m                  cohort.size, in both phases

    weighting: importance, gamma_decay: 0.9 and lambda_floor: 0.001 come near the code its authors published; there the snapshot
    is taken after 0..tau-2 steps, and the first weight below the floor is raised to it, and all are scaled to sum to 1 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.agnostic import by_shares, estimated, latest_losses, loss_at_z, of_problem, share_of
from fedfleet.algorithms.domain_participation import ChanceCorrection
from fedfleet.algorithms.lambda_sets import Simplex
from fedfleet.algorithms.mirror import Ball
from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.algorithms.options import AlgorithmOptions, CohortOptions, LocalData, Schedule
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    BatchPlan,
    ByDomainMean,
    ConfigError,
    Key,
    LocalLoop,
    LocalWork,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Total,
    Tree,
    View,
    rng,
)


class DrfaOptions(AlgorithmOptions):
    """Options of DRFA."""

    lr: float = Field(default=0.1, gt=0)
    """Local step, eta."""
    lr_schedule: Schedule = Schedule()
    steps: int = Field(default=10, ge=1)
    """Local steps, tau."""
    batch_size: int | None = Field(default=10, ge=1)
    """Examples of a local step, and of a loss; null: all a client has."""
    dual: DualOptions = DualOptions()
    """lambda moves by steps * dual.lr a round."""
    weighting: Literal["sampling", "importance"] = "sampling"
    """Draw clients by lambda; or uniformly, and weigh what they send."""
    gamma_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor of dual.lr a round."""
    lambda_floor: float = Field(default=0.0, ge=0, lt=1)
    """Least weight of a domain, on the whole simplex: lambda is mixed with the uniform one."""
    radius: float | None = Field(default=None, gt=0)
    """W is the ball of that radius around 0, and every step, of clients and server, is projected onto it; null: all models."""
    correction: ChanceCorrection = ChanceCorrection()
    """Correction for clients that are heard less often than others, for the model and for lambda."""
    average: bool = True
    """Evaluate the mean of the models after each round, as the paper returns; otherwise the last."""

    def local_data(self) -> LocalData:
        """Return how much of its data a client takes at once."""
        return self._batches(self.batch_size, steps=self.steps)

    @model_validator(mode="before")
    @classmethod
    def _forgets(cls, said: Any) -> Any:
        how = said.get("correction") if isinstance(said, Mapping) else None
        if "memory" in (how, how.get("kind") if isinstance(how, Mapping) else None):
            raise ValueError(
                "correction='memory': lambda's losses are taken at a snapshot after a step that each round draws, and what clients "
                "remember is of another: take known_p, or afl with steps"
            )
        return said


class State(NamedTuple):
    """The model, lambda (p,) float64, the last known losses (p,) or NaN, and the mean of the models."""

    z: Tree
    mixture: Tensor
    losses: Tensor
    z_mean: Tree


class _Path(NamedTuple):
    """The sum of the gradients along a client's local steps, and that up to the snapshot."""

    total: Tree
    snapshot: Tree


def _local(plan: BatchPlan, ball: Ball) -> LocalWork:
    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Path:
        zeros = T.zeros_like(shared["z"])
        return _Path(zeros, zeros)

    def step(ops: Ops, shared: Mapping[str, Any], path: _Path, batch: Batch, at: StepInfo, key: Key) -> _Path:
        here = shared["z"] if at.k == 0 else T.axpy(-shared["lr"], path.total, shared["z"])
        d = ops.grad("train", here, batch, key)[0]
        total = d if at.k == 0 else T.add(path.total, d)
        if ball.radius is not None:
            there = ball.project(T.axpy(-shared["lr"], total, shared["z"]))
            total = T.scale(1 / shared["lr"], T.sub(shared["z"], there))
        return _Path(total, total if at.k < shared["snapshot_at"] else path.snapshot)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, path: _Path
    ) -> tuple[Message, Tree]:
        return Message(path._asdict() if client_input is None else T.scale(client_input, path._asdict())), client_state

    return LocalWork(
        client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final, divisible=False
    )


def drfa(options: DrfaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build DRFA."""
    plan, ball = BatchPlan(size=options.batch_size, steps=options.steps), Ball(radius=options.radius)
    # A late snapshot is of another step t'.
    train = Phase(name="train", work=_local(plan, ball), reduce={"total": Total(), "snapshot": Total()}, dated=True)
    measure = Phase(
        name="loss", work=loss_at_z(options.batch_size), reduce={"loss": ByDomainMean()}, weight="num_examples"
    )
    how = options.correction
    train, measure = how.changed(train), how.changed(measure)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        dual = Dual.of(options.dual, of_problem(problem).examples)
        if options.lambda_floor * len(dual.sizes) >= 1:
            raise ConfigError(
                f"algorithm.lambda_floor={options.lambda_floor:g}: {len(dual.sizes)} domains would weigh more than 1: lower it"
            )
        if options.lambda_floor and not (isinstance(dual.set, Simplex) and dual.set.members.all()):
            raise ConfigError(
                "algorithm.lambda_floor: needs lambda_set simplex with all domains: leave one of them out"
            )
        return State(z, dual.start(), torch.full_like(dual.sizes, torch.nan), z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        dual = Dual.of(options.dual, of_problem(rnd.problem).examples)
        lr = options.lr * options.lr_schedule.at(rnd.index)
        at = 1 + int(rng.uniform(rng.fold(rnd.key, "snapshot"), (), torch.float64) * options.steps)
        client_input, of = None, 1.0
        if options.weighting == "sampling":
            invited = by_shares(rnd, cohort.size, state.mixture)
        else:
            invited = rnd.invite(cohort.size)
            client_input = share_of(rnd.problem, invited, state.mixture).to(T.leaves(state.z)[0].dtype)
            of = float(rnd.problem.clients)
        shared = Message({"z": state.z}, {"lr": lr, "snapshot_at": at})
        weighed = how.weighing(rnd)
        invited = weighed(train, invited, shared=shared, client_input=client_input)
        result = rnd.map_reduce(train, shared=shared, cohort=invited, client_input=client_input)
        objective, share = task.objectives["train"], of / how.answers(result, invited)
        z, snapshot = (ball.step(objective, state.z, lr * share, result[slot]) for slot in ("total", "snapshot"))
        shared = Message({"z": snapshot})
        invited = weighed(measure, rnd.invite(cohort.size), shared=shared)
        heard = rnd.map_reduce(measure, shared=shared, cohort=invited)
        known_losses = latest_losses(heard, state.losses)
        answers = how.answers(heard, invited)
        losses = estimated(heard, rnd.problem, known_losses, "horvitz_thompson", answers)
        gamma = options.steps * options.dual.lr * options.gamma_decay ** (rnd.index + 1)
        mixture = dual.step(state.mixture, dual.gradient(losses, state.mixture), gamma)
        mixture = options.lambda_floor + (1 - len(mixture) * options.lambda_floor) * mixture
        new = averaged(State(z, mixture, known_losses, state.z_mean), rnd)
        return new, {"largest_weight": float(mixture.max()), **weighed.metrics}

    def averaged(state: State, rnd: Round) -> State:
        """Return the state whose mean counts the model once more, as also after a round that nobody has answered."""
        return state._replace(z_mean=T.axpy(1 / (rnd.index + 1), T.sub(state.z, state.z_mean), state.z_mean))

    view = View(lambda state: state.z_mean if options.average else state.z)

    def by_domain(state: State) -> dict[str, Tensor]:
        return {"lambda": state.mixture, "train_loss": state.losses}

    chances = how.asks(ratio=False)
    phases = (train, measure)
    return Algorithm(init, round, phases, {"global": view}, domains=by_domain, chances=chances, skipped=averaged)
