"""KD3A: source models vote on the examples of a target without labels, which learns from the vote.

Feng, You, Chen, Zhang, Zhu, Wu, Wu & Chen, "KD3A: Unsupervised multi-source decentralized domain adaptation via knowledge
distillation", ICML 2021, and the authors' code.

    paper, code             here
    backbone, classifier    "x" and "head" of z; heads of sources stay theirs, only "x" is averaged
    knowledge vote          ``knowledge_vote.vote``
    consensus focus         ``knowledge_vote.shapley``, summed over the target's epoch
    domain weights          ``State.weight`` of sources, ``State.of_target``
    confidence gate         gate, gate_end
    mixup                   of x and of the vote's class, one share of Beta(2, 2) a batch
    BatchNorm-MMD           running statistics are averaged with the weights, as parameters are

    phase      who
    source     source clients: their own head on the averaged extractor, trained on labels
    target     target clients: the sources vote on each batch, and the target learns from it

A source that is not heard has no vote; its weight stays, and those of whoever is heard are scaled to add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, ValidationInfo, model_validator
from torch import Tensor

from fedfleet.algorithms.fact import check_objective, check_sources, check_targets, sources_of, targets_of
from fedfleet.algorithms.fact_work import model, net
from fedfleet.algorithms.knowledge_vote import MOST, coalitions, shapley, values, vote
from fedfleet.algorithms.local import stepped
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, LocalOptions, take_rounds
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
    Total,
    Tree,
    View,
    rng,
)

PARTS = ("x", "head")


class Kd3aOptions(LocalOptions):
    """Options of KD3A."""

    batch_size: int = Field(default=128, ge=1)
    lr: float = Field(default=0.05, gt=0)
    optimizer: ClientOptimizer = ClientOptimizer(momentum=0.9, weight_decay=5e-4)
    """The optimiser of sources and of targets; weight decay acts where the vote is not used, too."""
    optimizer_state: Literal["persist", "reset"] = "persist"
    """Clients keep their momentum between rounds, as in the released code, at the cost of a model a client; or start afresh."""
    gate: float = Field(default=0.9, ge=0, le=1)
    """The largest probability that a source must exceed to be believed, in the first round."""
    gate_end: float = Field(default=0.95, ge=0, le=1)
    """The same at the end: it rises linearly over ``rounds``."""
    rounds: int | None = Field(default=None, ge=1)
    """Rounds that the gate rises over; those of the run if not given."""
    memory: float = Field(default=0.9, ge=0, lt=1)
    """Share of its old weight that a domain keeps in each round."""
    mixup: bool = True
    """Mix pairs of target examples, and what the vote says of them."""
    targets: int | None = Field(default=None, ge=1)
    """Target clients asked a round; all of them if not given."""

    @model_validator(mode="after")
    def _rounds_of_the_run(self, info: ValidationInfo) -> Kd3aOptions:
        take_rounds(self, info)
        if self.gate_end < self.gate:
            raise ValueError(f"gate_end={self.gate_end} is below gate={self.gate}: the gate rises, so raise it")
        return self

    def gate_at(self, t: int) -> float:
        """Return the gate of round t."""
        return self.gate + (self.gate_end - self.gate) * t / (self.rounds or 1)


class State(NamedTuple):
    """The server's state between rounds.

    Attributes:
        z: the averaged extractor, and the target's head.
        weight: of each client as a source (N,) float64, NaN of those not heard so far.
        of_target: that of the target.
        key: what initial heads of sources are drawn from.

    """

    z: Tree
    weight: Tensor
    of_target: Tensor
    key: Key


class Local(NamedTuple):
    """A client in the middle of its steps: the model, the optimiser's state, and, of a target, what the votes came to.

    ``worth`` (2^n,) is the value of each coalition so far, ``gated`` (2,) the examples that were used, and all.
    """

    z: Tree
    optimizer: Any
    worth: Tensor | None = None
    gated: Tensor | None = None


class Work:
    """The work of a client in each phase, as the options say."""

    def __init__(self, options: Kd3aOptions):
        self._options, self._rule = options, options.optimizer.build()
        self._persists = self._rule.remembers and options.optimizer_state == "persist"
        plan = BatchPlan(size=options.batch_size, steps=options.steps, epochs=options.epochs, stratified="spread")
        self.source = self._work(self._begin_source, self._learn_labels, self._end_source, plan)
        self.target = self._work(self._begin_target, self._learn_votes, self._end_target, plan)

    @staticmethod
    def _work(begin: Any, step: Any, end: Any, plan: BatchPlan) -> LocalWork:
        return LocalWork(client_init=begin, loops=(LocalLoop(step=step, batches=plan),), client_final=end)

    def fresh(self, shared: Mapping[str, Any]) -> Tree:
        """Return the state of a client that has not taken part: the same tree for source and target clients."""
        optimizer = self._first(model(x=shared["g"], head=shared["head"])) if self._persists else None
        head = T.zeros_like(shared["head"])
        return {"optimizer": optimizer, "head": head, "begun": torch.zeros((), dtype=torch.bool)}

    def _first(self, z: Tree) -> Any:
        return self._rule.init({p: z[p] for p in PARTS})

    def _optimizer(self, client_state: Tree, z: Tree) -> Any:
        return client_state["optimizer"] if self._persists else self._first(z)

    def _begin_source(self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        head = client_state["head"]
        if client_input is not None:  # somebody has none yet
            head = T.where(client_state["begun"], head, client_input["head"])
        z = model(x=shared["g"], head=head)
        return Local(z, self._optimizer(client_state, z))

    def _begin_target(self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        z, sources = model(x=shared["g"], head=shared["head"]), len(T.leaves(shared["sources"])[0])
        worth = torch.zeros(2**sources, dtype=torch.float64, device=key.device)
        return Local(z, self._optimizer(client_state, z), worth, torch.zeros_like(worth[:2]))

    def _stepped(self, ops: Ops, objective: str, local: Local, lr: Any, d: Tree) -> Local:
        """Step extractor and head along a direction; running statistics become those of the last gradient."""
        z, optimizer = stepped(ops, objective, local.z, PARTS, lr, d, self._rule, local.optimizer)
        return local._replace(z=z, optimizer=optimizer)

    def _learn_labels(
        self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key
    ) -> Local:
        return self._stepped(ops, "train", local, shared["lr"], ops.grad("train", local.z, batch, key)[0])

    def _learn_votes(
        self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key
    ) -> Local:
        batch = batch.only(batch.data["target"])
        real, sources = batch.weight > 0, shared["sources"]
        n = len(T.leaves(sources)[0])
        says = torch.stack([ops.apply("predict", T.index(sources, i), batch).softmax(1) for i in range(n)])
        members = coalitions(n, real.device)
        found = vote(says, shared["gate"], members)
        used = found.gated[-1] & real
        classes = torch.arange(says.shape[-1], device=real.device)
        soft = (found.winner[-1][:, None] == classes).to(says.dtype)
        x, soft = self._mixed(batch.x, soft, real, rng.fold(key, "mix"))
        given = {"soft": soft, "used": used.to(says.dtype)}
        d, _ = ops.grad("distil", local.z, Batch({**batch.data, "x": x}, batch.weight), key, ctx=given)
        local = self._stepped(ops, "distil", local, shared["lr"], d)
        assert local.worth is not None
        assert local.gated is not None
        more = torch.stack([used.sum(), real.sum()]).double()
        return local._replace(worth=local.worth + values(found, real), gated=local.gated + more)

    def _mixed(self, x: Tensor, soft: Tensor, real: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """Return examples (B, ...) and classes (B, K), each mixed with those of a partner among the ``real`` rows (B,)."""
        if not self._options.mixup:
            return x, soft
        u = rng.uniform(rng.fold(key, "share"), (), torch.float64)
        share = 0.5 - torch.sin(torch.asin(1 - 2 * u) / 3)  # Beta(2, 2) by its quantiles: 3 s^2 - 2 s^3 = u
        other = rng.partners(rng.fold(key, "partner"), real)
        return tuple(_blend(share, v, other) for v in (x, soft))  # type: ignore[return-value]

    def _end_source(
        self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        begun = torch.ones_like(client_state["begun"])
        return Message({"z": local.z}), {
            **self._kept(client_state, local),
            "head": net(local.z, "head"),
            "begun": begun,
        }

    def _end_target(
        self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        assert local.worth is not None
        members = coalitions(len(T.leaves(shared["sources"])[0]), local.worth.device)
        send = {"z": local.z, "focus": shapley(local.worth, members), "gated": local.gated}
        return Message(send), self._kept(client_state, local)

    def _kept(self, client_state: Tree, local: Local) -> Tree:
        return {**client_state, "optimizer": local.optimizer} if self._persists else client_state


def _blend(share: Tensor, v: Tensor, other: Tensor) -> Tensor:
    share = share.to(v.dtype)
    return share * v + (1 - share) * v.index_select(0, other)


def weights(focus: Tensor, gated: Tensor, before: Tensor, of_target: Tensor, memory: float) -> tuple[Tensor, Tensor]:
    """Return the new weights of the sources heard (n,), and that of the target, float64.

    Args:
        focus: the sources' Shapley values (n,).
        gated: the target's examples that were used, and all (2,).
        before: the sources' weights so far (n,), NaN of those that have none.
        of_target: that of the target, NaN in the first round.
        memory: share of the old ones that is kept.

    """
    target = gated[0] / gated[1] / (len(focus) + 1)
    total = focus.sum()
    new = (1 - target) * torch.where(total > 0, focus / total, 1 / len(focus))
    kept = lambda old, now: torch.where(old.isnan(), now, memory * old + (1 - memory) * now)  # noqa: E731
    return kept(before, new), kept(of_target, target)


def kd3a(options: Kd3aOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build KD3A."""
    if cohort.size > MOST:
        raise ConfigError(
            f"cohort.size={cohort.size}: kd3a weighs every coalition of the sources asked a round, and up to {MOST} may be: "
            f"lower it"
        )
    check_objective("kd3a", task, "distil", "task.name=two_heads")
    work = Work(options)
    source = Phase(name="source", work=work.source, reduce={"z": CollectUploads()}, client_state=work.fresh, dated=True)
    target = Phase(
        name="target",
        work=work.target,
        reduce={"z": Mean(), "focus": Total(), "gated": Total()},
        client_state=work.fresh,
        dated=True,
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        _check_clients(options, cohort, problem)
        none = torch.full((problem.clients + 1,), torch.nan, dtype=torch.float64)
        return State(z, none[1:].clone(), none[0].clone(), rng.fold(key, "heads"))

    def first_head(state: State, client: int) -> Tree:
        seed = int(rng.bits(rng.fold(state.key, client))) % 2**31
        return T.map(lambda v, like: v.to(like.dtype), net(task.init(seed), "head"), net(state.z, "head"))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        lr = options.rates(rnd.index, PARTS)["x"]
        asked, starts = rnd.invite(cohort.size, role="source"), None
        if bool(state.weight[asked.clients].isnan().any()):
            starts = {"head": T.stack([first_head(state, c) for c in asked.clients.tolist()])}
        g, head = (net(state.z, p) for p in PARTS)
        shared = Message({"g": g}, {"lr": lr}, {"head": head})  # the head's shapes are known
        result = rnd.map_reduce(source, shared=shared, cohort=asked, client_input=starts)
        heard, uploads = result.received, result["z"]
        there = rnd.invite(options.targets or len(targets_of(rnd.problem)), role="target")
        gate = torch.tensor(
            options.gate_at(rnd.index), dtype=torch.float64
        )  # no number, so that blocks are captured once
        shared = Message({"g": g, "head": head, "sources": uploads.stacked()}, {"lr": lr}, {"gate": gate})
        result = rnd.map_reduce(target, shared=shared, cohort=there)
        mine, of_target = weights(
            result["focus"], result["gated"], state.weight[heard], state.of_target, options.memory
        )
        total = mine.sum() + of_target
        of_sources = uploads.of(lambda z: net(z, "x")).combine(mine / total)
        x = T.axpy(float(of_target / total), net(result["z"], "x"), of_sources)
        z = model(x=x, head=net(result["z"], "head"))
        weight = state.weight.scatter(0, heard, mine)
        used = float(result["gated"][0] / result["gated"][1])
        return state._replace(z=z, weight=weight, of_target=of_target), {
            "used": used,
            "target_weight": float(of_target / total),
        }

    return Algorithm(
        init,
        round,
        (source, target),
        {"global": View(lambda state: state.z)},
        requires=PARTS,
        minimises=True,
        rounds=options.rounds,
        roles=True,
        buffers=True,
    )


def _check_clients(options: Kd3aOptions, cohort: CohortOptions, problem: Problem) -> None:
    """Refuse too few clients of either kind, and a gate whose way is not known. Raises ConfigError."""
    check_sources(cohort.size, sources_of(problem))
    targets = len(targets_of(problem))
    if not targets:
        raise ConfigError(
            "algorithm.name='kd3a': there is no target client to learn from the votes: name a domain in domains.target"
        )
    check_targets(options.targets, targets)
    if options.rounds is None and options.gate_end != options.gate:
        raise ConfigError(
            f"algorithm.gate_end={options.gate_end}: the gate rises over the rounds of a run: give algorithm.rounds"
        )
