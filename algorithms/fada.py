"""FADA, reconstructed: a domain identifier for each source and the target, and sources that count by what they do for the target.

Peng, Huang, Zhu & Saenko, "Federated adversarial domain adaptation", ICLR 2020: its FADA-I, dynamic attention, and FADA-II,
adversarial alignment beside it. Disentanglement (FADA-III) is left out: weights of its losses were not at hand. The authors'
code is no repository, and was not read.

    paper                   here
    G, C                    "x" of z: the extractor, and "head."; one model, from which all begin each minibatch
    DI_i                    "y", a client's state; it sees features alone
    L_D, L_G                objectives "identify" and "confuse", by adversaries.of_pair
    dynamic attention       gap_statistics.py
    FADA-I, FADA-II         align: false, true

    phase      who         a minibatch each
    features   targets     features of a minibatch, which the client keeps
    source     sources     a step of G and C on labels; DI_i descends L_D, then G L_G; the gradient of the target's features
    target     targets     G descends L_G by the mean of these gradients; gap statistics before and after each source's update
    server                 z <- the target's model + sum_i alpha_i (source i's - z)

Every gradient of the target's features is of one source's L_G. With several targets the identifiers and the gain are of all their
examples. Whoever is not heard counts for nothing: the attention is that among the sources that are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.fact import check_dann, check_sources, check_targets, sources_of, targets_of
from fedfleet.algorithms.gap_statistics import attention, clustered_gap
from fedfleet.algorithms.local import stepped
from fedfleet.algorithms.options import AlgorithmOptions, ClientOptimizer, CohortOptions, LocalData, Schedule
from fedfleet.simulator.author import (
    Algorithm,
    Batch,
    BatchPlan,
    Cohort,
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


class FadaOptions(AlgorithmOptions):
    """Options of FADA. None of their values is published."""

    steps: int = Field(default=1, ge=1)
    """Minibatches a round, of three exchanges each; two where ``align`` is false."""
    batch_size: int = Field(default=128, ge=1)
    """Examples of each client a minibatch."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of extractor and head."""
    dual_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the domain identifiers; the same as ``lr`` if not given."""
    lr_schedule: Schedule = Schedule()
    """The course of both rates over rounds."""
    optimizer: ClientOptimizer = ClientOptimizer(name="adam")
    """The optimiser of each client's steps on labels, on L_G, and of its identifier: three, kept between rounds."""
    align: bool = True
    """Align features by the identifiers, FADA-II; false is FADA-I, attention alone."""
    clusters: int = Field(default=10, ge=1)
    """Clusters of the target's features, of which gap statistics are taken."""
    targets: int | None = Field(default=None, ge=1)
    """Target clients asked a round; all of them if not given."""

    def local_data(self) -> LocalData:
        """Return how much of its data a client takes at once."""
        return self._batches(self.batch_size, steps=self.steps)

    def given_dual_lr(self) -> float | None:
        """Return ``dual_lr``."""
        return self.dual_lr

    def rates(self, t: int) -> dict[str, float]:
        """Return the learning rates of round t, of the model and of identifiers."""
        now = self.lr_schedule.at(t)
        return {"lr": self.lr * now, "dual_lr": (self.lr if self.dual_lr is None else self.dual_lr) * now}


class State(NamedTuple):
    """The model, without an identifier, and the values that all identifiers begin with."""

    z: Tree
    y: Tree


class Local(NamedTuple):
    """A client at work: the model, with its identifier; what it keeps; and what it sends besides: slots, and both losses."""

    z: Tree
    kept: Tree
    send: Tree
    losses: Mapping[str, Tensor] = MappingProxyType({})


class Work:
    """The work of a client in each phase, as the options say."""

    def __init__(self, options: FadaOptions, task: Any):
        self._options, self._rule = options, options.optimizer.build()
        self._blank = task.blank(options.batch_size)
        self._plan = BatchPlan(size=options.batch_size, steps=1, stratified="spread")
        self.features = self._work(self._begin_features, self._take_features, self._end_features)
        self.source = self._work(self._begin_source, self._learn, self._end_source)
        self.target = self._work(self._begin_target, self._follow, self._end_target)

    def _work(self, begin: Any, step: Any, end: Any) -> LocalWork:
        return LocalWork(client_init=begin, loops=(LocalLoop(step=step, batches=self._plan),), client_final=end)

    def fresh(self, shared: Mapping[str, Any]) -> Tree:
        """Return the state of a client that has not taken part: the same tree for source and target clients.

        "batch" is what a target client keeps of its minibatch until gradients of its features come back.
        """
        x, y = {"x": shared["z"]["x"]}, {"y": shared["y"]}
        labels = self._rule.init(x)
        if not self._options.align:
            return {"labels": labels}
        like = T.leaves(x)[0]
        blank = self._blank.to(like)
        key = torch.zeros((), dtype=torch.int64, device=like.device)
        batch = {"x": blank, "real": blank.new_zeros(len(blank)), "key": key}
        return {"labels": labels, "confuse": self._rule.init(x), "identify": self._rule.init(y), **y, "batch": batch}

    @property
    def state(self) -> Any:
        """The function that builds a client's state, if it keeps anything."""
        return self.fresh if self._options.align or self._rule.remembers else None

    def _stepped(self, ops: Ops, name: str, part: str, local: Local, lr: Any, d: Tree) -> Local:
        """Step one part along the direction of an objective, which has an optimiser of its own."""
        moved, optimizer = stepped(ops, name, local.z, (part,), lr, d, self._rule, local.kept[name])
        return local._replace(z={**local.z, **moved}, kept={**local.kept, name: optimizer})

    def _begin_features(self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        return Local(shared["z"], client_state, None)

    def _take_features(
        self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key
    ) -> Local:
        taken = batch.only(batch.data["target"])
        blank, count = local.kept["batch"]["x"], taken.weight > 0
        first = (~count).to(torch.int64).argsort(stable=True)[: len(blank)]  # rows that count, in their order
        x, real = (_padded(v.index_select(0, first).to(blank), len(blank)) for v in (taken.x, count))
        x = torch.where(real.view(-1, *(1 for _ in x.shape[1:])) > 0, x, 0.0)
        kept = {"x": x, "real": real, "key": key}
        features = ops.apply("features_in_training", local.z, Batch(kept, real))
        return Local(local.z, {**local.kept, "batch": kept}, {"features": features, "real": real})

    def _end_features(
        self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        return Message(local.send), local.kept

    def _begin_source(self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        kept = client_state or {"labels": self._rule.init({"x": shared["z"]["x"]})}
        return Local({**shared["z"], "y": kept.get("y")} if "y" in kept else shared["z"], kept, {})

    def _learn(self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        lr, keys = shared["lr"], (rng.fold(key, name) for name in ("labels", "identify", "confuse"))
        d, _ = ops.grad("labels", local.z, batch, next(keys))
        local = self._stepped(ops, "labels", "x", local, lr, d)
        if not self._options.align:
            return local
        real = {"real": shared["real"]}
        told = {"others": shared["features"], **real}
        d, identified = ops.grad("identify", local.z, batch, next(keys), ctx=told, wrt=("y",))
        local = self._stepped(ops, "identify", "y", local, shared["dual_lr"], d)
        pair = {**local.z, "others": shared["features"]}
        d, confused = ops.grad("confuse", pair, batch, next(keys), ctx=real, wrt=("x", "others"))
        losses = {"identified": identified["loss"], "confused": confused["loss"]}
        return self._stepped(ops, "confuse", "x", local, lr, d)._replace(send={"pull": d["others"]}, losses=losses)

    def _end_source(
        self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        z = {part: v for part, v in local.z.items() if part != "y"}
        kept = {**local.kept, "y": local.z["y"]} if "y" in local.z else local.kept
        return Message({"z": z, **local.send}, local.losses), kept if client_state is not None else None

    def _begin_target(self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        pull = None if client_input is None else client_input["pull"]
        return Local(shared["z"], client_state, {"pull": pull})

    def _follow(self, ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        pull = local.send["pull"]
        batch = batch.only(batch.data["target"])
        if pull is not None:
            mine = local.kept["batch"]
            batch = Batch(mine, mine["real"])
            told = {"pull": pull, "loss": torch.as_tensor(shared["confused"])}
            d, _ = ops.grad("pulled", local.z, batch, mine["key"], ctx=told)
            local = self._stepped(ops, "confuse", "x", local, shared["lr"], d)
        clusters, real = rng.fold(key, "clusters"), batch.weight > 0

        def measured(z: Tree) -> Tensor:
            return clustered_gap(clusters, ops.apply("features", z, batch), real, self._options.clusters)

        before, n = measured(local.z), len(T.leaves(shared["sources"])[0])
        moved = (T.add(local.z, T.sub(T.index(shared["sources"], i), shared["z"])) for i in range(n))
        return local._replace(send={"gain": torch.stack([before - measured(z) for z in moved])})

    def _end_target(
        self, shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        send = {**local.send, "z": local.z} if self._options.align else local.send
        return Message(send), local.kept


def _padded(v: Tensor, rows: int) -> Tensor:
    """Return v (n, ...) with rows of 0 after its own."""
    return torch.cat([v, v.new_zeros(rows - len(v), *v.shape[1:])])


def fada(options: FadaOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build FADA."""
    check_dann("fada", task, "confuse")
    work = Work(options, task)
    common = {"client_state": work.state, "dated": True}
    features = Phase(
        name="features",
        work=work.features,
        reduce={"features": CollectUploads(), "real": CollectUploads()},
        **common,
    )
    pulls = {"pull": Mean()} if options.align else {}
    source = Phase(name="source", work=work.source, reduce={"z": CollectUploads(), **pulls}, **common)
    moves = {"z": Mean()} if options.align else {}
    target = Phase(name="target", work=work.target, reduce={"gain": Mean(), **moves}, **common)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        _check(options, cohort, problem)
        return State({part: v for part, v in z.items() if part != "y"}, {"y": z["y"]})

    def step(
        z: Tree, rnd: Round, known: Tree, rates: dict[str, float], sources: Cohort, targets: Cohort
    ) -> tuple[Tree, dict[str, float]]:
        """Return the model after one minibatch, and its metrics."""
        send, pull, losses = {"z": z}, None, {}
        if options.align:
            there = rnd.map_reduce(features, shared=Message(send, rates, known), cohort=targets)
            targets = Cohort(there.received, torch.zeros_like(there.received))
            send = {**send, "features": there["features"].stacked(), "real": there["real"].stacked()}
        result = rnd.map_reduce(source, shared=Message(send, rates, known), cohort=sources)
        uploads = result["z"]
        if options.align:
            pull = {"pull": result["pull"] * len(targets)}  # the models of as many are averaged
            losses = {name: float(result.config[name].mean()) for name in ("identified", "confused")}
        shared = Message({"z": z, "sources": uploads.stacked()}, {**rates, **losses}, known)
        found = rnd.map_reduce(target, shared=shared, cohort=targets, client_input=pull)
        alpha = attention(found["gain"])
        moved = T.sub(uploads.combine(alpha), z)
        return T.add(found["z"] if options.align else z, moved), {"attention": float(alpha.max()), **losses}

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        sources = rnd.invite(cohort.size, role="source")
        targets = rnd.invite(options.targets or len(targets_of(rnd.problem)), role="target")
        z, rates, total = state.z, options.rates(rnd.index), Counter[str]()
        for _ in range(options.steps):
            z, metrics = step(z, rnd, state.y, rates, sources, targets)
            total.update(metrics)
        return state._replace(z=z), {name: value / options.steps for name, value in total.items()}

    return Algorithm(
        init,
        round,
        (features, source, target) if options.align else (source, target),
        {"global": View(lambda state: state.z)},
        requires=("x", "y"),
        roles=True,
        buffers=True,
        name="fada",
    )


def _check(options: FadaOptions, cohort: CohortOptions, problem: Problem) -> None:
    """Refuse too few clients of either kind. Raises ConfigError."""
    check_sources(cohort.size, sources_of(problem))
    targets = len(targets_of(problem))
    if not targets:
        raise ConfigError(
            "algorithm.name='fada': there is no target client whose features it could be on: name a domain in domains.target"
        )
    check_targets(options.targets, targets)
