"""FACT: federated adversarial cross training, for a target domain without labels.

Schrod, Lippl, Schäfer & Altenbuchinger, "FACT: Federated adversarial cross training", arXiv 2306.00607. Two source clients train
the same model on their labels; where their heads disagree on unlabelled examples of the target domain, the generator of features
is moved so that they agree. Nothing is maximised: that the two clients' domains differ takes the place of the adversary.

    paper                   here
    G, F                    "x" and "head" of z, the mean of the round's two heads
    F_1, F_2                "head" and "second" of the model that step 3 starts from, and that is evaluated
    E, R, B, eta_0          epochs, rounds, batch_size, lr
    L_IDD                   objective "idd" of the task; round metric "idd"
    fine-tuning, FACT-NF    fine_tune: true, false

    step                    phase         who
    1 source training       source        two source clients, drawn without replacement
    2 fine-tuning           fine_tune     the same two, on the mean of their generators
    3 IDD minimisation      target        the target clients; heads stay as they are

Means are plain: a client's number of examples counts for nothing. Where one of the two does not answer in step 1 or 2, there are
no two heads: the other's is the new one, and the round ends without step 3. Where nobody answers in a step, the round starts again
with another pair.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.fact_work import Work, WorkOptions, model, net
from fedfleet.algorithms.options import CohortOptions, refuse_others
from fedfleet.simulator.author import (
    BUFFERS,
    Algorithm,
    Cohort,
    CollectUploads,
    ConfigError,
    Key,
    Mean,
    Message,
    Phase,
    Problem,
    Reduced,
    Round,
    T,
    Task,
    Tree,
    View,
)

PAIR = 2
OF_STEP_3 = {"target_lr", "targets", "select_burn_in", "return_target_head_buffers"}


class FactOptions(WorkOptions):
    """Options of FACT."""

    idd: bool = True
    """Minimise the discrepancy on target clients; false, with ``fine_tune: false``, is unweighted FedAvg of two clients a round."""
    targets: int | None = Field(default=None, ge=1)
    """Target clients asked a round; all of them if not given."""
    return_target_head_buffers: bool = True
    """Target clients return the running statistics of the two heads, which have moved to target data, as in the released code."""
    evaluate: Literal["ensemble", "mean"] = "ensemble"
    """What is evaluated and kept: the generator with the round's two heads, of which the surer one predicts; or with their mean."""
    select: Literal["idd", "last"] = "idd"
    """Evaluate and keep the model of the round with the least discrepancy so far, which takes no labels; or the last one, as is
    always done without step 3."""
    select_burn_in: float = Field(default=0.1, ge=0, lt=1)
    """The share of ``rounds`` of which the models are not selected, and without ``rounds`` none; until then it is the last one."""

    @model_validator(mode="after")
    def _applies(self) -> FactOptions:
        if not self.fine_tune and self.finetune_epochs > 1:
            raise ValueError(f"finetune_epochs={self.finetune_epochs} is not for fine_tune=false: leave it out")
        if self.lr_clock == "global" and self.rounds is None:
            raise ValueError("lr_clock=global is of a rate that falls: give rounds, those of the run, or leave it out")
        if not self.idd:
            refuse_others(self, "idd=false", set(), OF_STEP_3)
        if self.select == "last":
            refuse_others(self, "select=last", set(), {"select_burn_in"})
        if self.rounds is None and self.select_burn_in != type(self).model_fields["select_burn_in"].default:
            raise ValueError(
                f"select_burn_in={self.select_burn_in} is a share of rounds: give rounds, those of the run, or leave it out"
            )
        return self

    @property
    def burn_in(self) -> int:
        """Rounds whose models are not selected."""
        return math.ceil(round(self.select_burn_in * (self.rounds or 0), 9))  # 0.55 of 100 is 55


class State(NamedTuple):
    """The model with two heads, that which was selected (None for none yet), and its discrepancy."""

    model: Tree
    selected: Tree
    idd: float


def merged(two: Tree) -> Tree:
    """Return the model whose head is the mean of two."""
    return model(x=net(two, "x"), head=T.mean([net(two, "head"), net(two, "second")]))


def heads_of(result: Reduced) -> list[Tree]:
    """Return the heads that clients have sent, one after the other."""
    each = result["head"].stacked()
    return [T.index(each, i) for i in range(len(result.received))]


def fact(options: FactOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FACT."""
    _check(cohort)
    statistics = BUFFERS in task.parts and options.return_target_head_buffers
    work = Work(options)
    keeps_head = {"g": Mean()} if options.tunes else {"g": Mean(), "head": CollectUploads()}
    source = Phase(name="source", work=work.source(), reduce=keeps_head, client_state=work.fresh, dated=True)
    tune = Phase(
        name="fine_tune", work=work.tuning(), reduce={"head": CollectUploads()}, client_state=work.fresh, dated=True
    )
    of_target = {"g": Mean(), "statistics": Mean()} if statistics else {"g": Mean()}
    target = Phase(
        name="target", work=work.target(statistics=statistics), reduce=of_target, client_state=work.fresh, dated=True
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        _check_clients(options, cohort, problem)
        g, head = net(z, "x"), net(z, "head")
        return State(model(x=g, head=head, second=head), None, math.inf)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        clock = work.clock(rnd.index * options.epochs)
        shared = Message({"z": merged(state.model)}, clock)
        result = rnd.map_reduce(source, shared=shared, cohort=rnd.invite(PAIR, role="source"))
        g = result["g"]
        if options.tunes:
            pair = Cohort(result.received, torch.zeros_like(result.received))
            after = work.clock((rnd.index + 1) * options.epochs)
            result = rnd.map_reduce(tune, shared=Message({"g": g}, after), cohort=pair)
        heads = heads_of(result)
        two = model(x=g, head=heads[0], second=heads[-1])
        if not options.idd:
            return State(two, None, math.inf), {}
        if len(heads) < PAIR:
            return state._replace(model=two), {"idd": math.nan}
        there = rnd.invite(options.targets or len(targets_of(rnd.problem)), role="target")
        result = rnd.map_reduce(target, shared=Message({"z": two}, clock), cohort=there)
        nets = {p: net(two, p) for p in ("head", "second")}
        if statistics:
            nets = {p: {**of, "b": result["statistics"][p]} for p, of in nets.items()}
        two, idd = model(x=result["g"], **nets), float(result.config["idd"].mean())
        if rnd.index >= options.burn_in and idd < state.idd and options.select == "idd":
            return State(two, two, idd), {"idd": idd}
        return state._replace(model=two), {"idd": idd}

    def evaluated(state: State) -> Tree:
        two = state.model if state.selected is None else state.selected
        return two if options.evaluate == "ensemble" else merged(two)

    phases = (source, *((tune,) if options.tunes else ()), *((target,) if options.idd else ()))
    return Algorithm(
        init,
        round,
        phases,
        {"global": View(evaluated)},
        requires=("x", "head"),
        minimises=True,
        rounds=options.rounds,
        roles=True,
        buffers=True,
    )


def targets_of(problem: Problem) -> Tensor:
    """Return the target clients, of which there may be none."""
    return torch.zeros(0, dtype=torch.int64) if problem.targets is None else problem.targets


def sources_of(problem: Problem) -> int:
    """Return how many source clients there are."""
    return problem.clients if problem.sources is None else len(problem.sources)


def check_sources(size: int, sources: int) -> None:
    """Refuse a cohort of more source clients than there are. Raises ConfigError."""
    if sources < size:
        raise ConfigError(f"cohort.size={size}: there are {sources} source clients: lower it")


def check_objective(name: str, task: Task, objective: str, use: str) -> None:
    """Refuse a task without an objective, and say which to ``use``. Raises ConfigError."""
    if objective not in task.objectives:
        raise ConfigError(f"algorithm.name='{name}': the task has no objective '{objective}': use {use}")


def check_dann(name: str, task: Task, objective: str) -> None:
    """Refuse a task without an objective of DANN's nets, and options of the two players' game, not played. Raises ConfigError."""
    check_objective(name, task, objective, "task.name=domain_adaptation with loss=dann")
    for key, value in getattr(task, "of_the_game", {}).items():
        raise ConfigError(f"task.{key}={value}: {name} has losses of its own, which do not read it: leave it out")


def check_targets(asked: int | None, targets: int) -> None:
    """Refuse to ask more target clients than there are. Raises ConfigError."""
    if asked is not None and asked > targets:
        raise ConfigError(f"algorithm.targets={asked}: there are {targets} target clients: lower it")


def _check(cohort: CohortOptions) -> None:
    """Refuse other cohorts than pairs. Raises ConfigError."""
    if cohort.size != PAIR:
        raise ConfigError(
            f"cohort.size={cohort.size}: fact asks two source clients a round: set cohort.size=2 (how many target clients "
            f"is algorithm.targets)"
        )
    if cohort.wait_for == 1:
        raise ConfigError(
            "cohort.wait_for=1: fact needs the heads of two clients: set cohort.wait_for=all, or leave it out"
        )
    if cohort.wait_for == "siwer" and math.ceil(PAIR * cohort.response_high) < PAIR:
        raise ConfigError(
            f"cohort.response_high={cohort.response_high:g}: of two clients one would be heard in every round, and fact needs the "
            f"heads of both: raise it above 0.5"
        )


def _check_clients(options: FactOptions, cohort: CohortOptions, problem: Problem) -> None:
    """Refuse too few clients of either kind. Raises ConfigError."""
    if (sources := sources_of(problem)) < PAIR:
        raise ConfigError(
            f"algorithm.name='fact': a round takes two source clients, and there is {sources}: deal the source domain to more "
            f"clients, or name fewer domains in domains.target"
        )
    targets = len(targets_of(problem))
    if options.idd and not targets:
        raise ConfigError(
            "algorithm.idd=true: there is no target client whose examples it could be on: name a domain in domains.target"
        )
    check_targets(options.targets, targets)
    if options.idd and cohort.min_responses > (asked := options.targets or targets):
        raise ConfigError(
            f"cohort.min_responses={cohort.min_responses}: a round asks {asked} of the target clients: lower it"
        )
