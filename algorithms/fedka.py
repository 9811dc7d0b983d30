"""FedKA: sources match their features with those of the target's images, and vote on their classes.

Sun, Chong & Ochiai, "Feature distribution matching for federated domain generalization", ACML 2022 (federated knowledge
alignment), and the authors' notebook.

    paper, notebook              here
    disentangler                 phase "source", ``steps`` batches: objective "reversed", DANN whose weight alpha rises
    embedding matching           phase "source", ``pairs`` batches: objective "mkmmd", a step every ``every`` of them
    global model                 "frozen", whose features of the target's images are matched
    federated voting             phase "target", ``votes`` batches: objective "voted"
    alpha                        2 / (1 + exp(-5 p)) - 1, p the share of the run's batches that are over
    cloud                        the target client

Sources hold the target's images, without labels (``domains.share_target``). A batch has as many of its own as of these. ``authors``
does what the notebook does and the paper does not say: a step of matching is along the last batch of its ``every`` alone, divided
by their number, and the voted model is evaluated and matched with, but sources go on from the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import Field, ValidationInfo, model_validator
from torch import Tensor

from fedfleet.algorithms.fact import check_dann, check_sources, check_targets, targets_of
from fedfleet.algorithms.local import stepped
from fedfleet.algorithms.options import AlgorithmOptions, ClientOptimizer, CohortOptions, LocalData, take_rounds
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    BatchPlan,
    CollectUploads,
    ConfigError,
    Key,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
    rng,
)

PARTS = ("x", "y")
STEEPNESS = 5.0


class FedKaOptions(AlgorithmOptions):
    """Options of FedKA."""

    steps: int = Field(default=32, ge=1)
    """Steps of the disentangler a round, a batch each."""
    pairs: int = Field(default=32, ge=1)
    """Batches of embedding matching a round."""
    every: int = Field(default=8, ge=1)
    """Batches of it a step."""
    votes: int = Field(default=128, ge=0)
    """Steps of the target on the sources' votes a round; 0 leaves them out."""
    batch_size: int = Field(default=32, ge=1)
    """Examples a batch, as many of the target's images as of the source's own; the target's own batches have half as many."""
    lr: float = Field(default=3e-4, gt=0)
    optimizer: ClientOptimizer = ClientOptimizer(name="adam")
    """The optimiser of each source and of the target, kept between rounds."""
    rounds: int | None = Field(default=None, ge=1)
    """Rounds over which alpha rises; those of the run if not given."""
    targets: int | None = Field(default=None, ge=1)
    """Target clients asked a round; all of them if not given."""
    authors: bool = False
    """Do as the released notebook does, where the paper says otherwise."""

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> FedKaOptions:
        take_rounds(self, info)
        if self.pairs % self.every:
            raise ValueError(f"pairs={self.pairs} is no multiple of every={self.every}: make it one")
        return self

    def local_data(self) -> LocalData:
        """Return how much of its data a client takes at once."""
        return self._batches(self.batch_size, steps=max(self.steps, self.pairs))


class State(NamedTuple):
    """The model that sources go on from, and the one that has learnt from their votes; the same but for ``authors``."""

    z: Tree
    voted: Tree


class Local(NamedTuple):
    """A client in the middle of its steps: the model, and the optimiser's state."""

    z: Tree
    optimizer: Any


def weight_at(batch: int, batches: int, rounds: int, t: Tensor, like: Tensor) -> Tensor:
    """Return alpha of a batch, of so many a round, in round ``t``."""
    p = (batch + batches * t) / (batches * rounds)
    return (2 / (1 + torch.exp(-STEEPNESS * p)) - 1).to(like.dtype)


def majority(says: Tensor) -> Tensor:
    """Return the class that most of the sources say, the least of equal ones (B,); ``says`` are scores (n, B, K)."""
    classes = torch.arange(says.shape[-1], device=says.device)
    return (says.argmax(-1)[..., None] == classes).sum(0).argmax(-1)


class Work:
    """The work of a client in each phase, as the options say."""

    def __init__(self, options: FedKaOptions):
        self._options, self._rule = options, options.optimizer.build()
        self._keeps = self._rule.remembers
        o = options
        plan = {"size": o.batch_size, "stratified": "domains"}
        disentangle = LocalLoop(step=self._disentangle, batches=BatchPlan(steps=o.steps, **plan))
        match = LocalLoop(step=self._match, batches=BatchPlan(steps=o.pairs // o.every, per_step=o.every, **plan))
        votes = BatchPlan(size=max(1, o.batch_size // 2), steps=max(1, o.votes))
        self.source = LocalWork(client_init=self._begin, loops=(disentangle, match), client_final=self._end)
        learn = LocalLoop(step=self._learn_votes, batches=votes)
        self.target = LocalWork(client_init=self._begin, loops=(learn,), client_final=self._end)

    def fresh(self, shared: Mapping[str, Any]) -> Tree:
        """Return the state of a client that has not taken part."""
        return self._rule.init({p: shared["z"][p] for p in PARTS})

    @property
    def state(self) -> Any:
        """The function that builds a client's state, if its optimiser has one."""
        return self.fresh if self._keeps else None

    def _begin(self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        return Local(shared["z"], client_state if self._keeps else self.fresh(shared))

    def _end(
        self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        return Message({"z": local.z}), local.optimizer if self._keeps else client_state

    def _stepped(self, ops: Ops, objective: str, local: Local, d: Tree) -> Local:
        moved, optimizer = stepped(ops, objective, local.z, PARTS, self._options.lr, d, self._rule, local.optimizer)
        return Local({**local.z, **moved}, optimizer)

    def _alpha(self, batch: int, batches: int, shared: Mapping[str, Any], like: Tensor) -> Tensor:
        return weight_at(batch, batches, self._options.rounds or 1, shared["round"], like)

    def _disentangle(
        self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key
    ) -> Local:
        told = {"alpha": self._alpha(at.k, self._options.steps, shared, batch.weight)}
        return self._stepped(ops, "reversed", local, ops.grad("reversed", local.z, batch, key, ctx=told)[0])

    def _match(self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Any, at: StepInfo, key: Key) -> Local:
        o, batches = self._options, batch if isinstance(batch, tuple) else (batch,)
        total: Tree = None
        for i, each in enumerate(batches):
            if o.authors and i < o.every - 1:
                continue
            told = {
                "alpha": self._alpha(at.k * o.every + i, o.pairs, shared, each.weight) / o.every,
                "others": ops.apply("features", shared["frozen"] if o.authors else shared["z"], each),
            }
            d, _ = ops.grad("mkmmd", local.z, each, rng.fold(key, i), ctx=told, wrt=("x",))
            total = d if total is None else T.add(total, d)
        return self._stepped(ops, "mkmmd", local, total)

    def _learn_votes(
        self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key
    ) -> Local:
        n = len(T.leaves(shared["sources"])[0])
        says = [ops.apply("predict", T.index(shared["sources"], i), batch)["logits"] for i in range(n)]
        told = {
            "alpha": self._alpha(at.k, self._options.votes, shared, batch.weight),
            "winner": majority(torch.stack(says)),
        }
        return self._stepped(ops, "voted", local, ops.grad("voted", local.z, batch, key, ctx=told, wrt=("x",))[0])


def fedka(options: FedKaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FedKA."""
    check_dann("fedka", task, "mkmmd")
    work = Work(options)
    source = Phase(name="source", work=work.source, reduce={"z": CollectUploads()}, client_state=work.state, dated=True)
    target = Phase(name="target", work=work.target, reduce={"z": Mean()}, client_state=work.state, dated=True)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        _check(options, cohort, problem)
        return State(z, z)

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        send = {"z": state.z, "frozen": state.voted} if options.authors else {"z": state.z}
        known = {"round": torch.tensor(rnd.index, dtype=torch.float64)}  # no number, so that blocks are captured once
        result = rnd.map_reduce(
            source, shared=Message(send, known=known), cohort=rnd.invite(cohort.size, role="source")
        )
        uploads, n = result["z"], len(result.received)
        z = uploads.combine(torch.full((n,), 1 / n, dtype=torch.float64))
        if not options.votes:
            return State(z, z), {}
        there = cloud(rnd.problem)
        shared = Message({"z": z, "sources": uploads.stacked()}, known=known)
        asked = rnd.draw(
            options.targets or len(there),
            lambda number, key: there[rng.sample(key, len(there), min(number, len(there)))],
        )
        voted = rnd.map_reduce(target, shared=shared, cohort=asked)["z"]
        return State(z if options.authors else voted, voted), {}

    return Algorithm(
        init,
        round,
        (source, target) if options.votes else (source,),
        {"global": View(lambda state: state.voted)},
        requires=PARTS,
        rounds=options.rounds,
        roles=True,
        buffers=True,
        name="fedka",
    )


def cloud(problem: Problem) -> Tensor:
    """Return the clients that hold the target's examples and no labels."""
    assert problem.sources is not None
    targets = targets_of(problem)
    return targets[~torch.isin(targets, problem.sources)]


def _check(options: FedKaOptions, cohort: CohortOptions, problem: Problem) -> None:
    """Refuse sources without the target's images, and what else a run could not do. Raises ConfigError."""
    targets = targets_of(problem)
    if problem.sources is None or not bool(torch.isin(problem.sources, targets).all()):
        raise ConfigError(
            "domains.share_target=false: sources of fedka match their features with the target's images, which they hold "
            "as in its code: set domains.share_target=true"
        )
    check_sources(cohort.size, len(problem.sources))
    check_targets(options.targets, len(cloud(problem)))
    if options.votes and not len(cloud(problem)):
        raise ConfigError(
            f"algorithm.votes={options.votes}: every client has labels, so that nobody is the cloud: set it to 0"
        )
    if options.rounds is None:
        raise ConfigError("algorithm.rounds: the weight of what is matched rises over the rounds of a run: give it")
