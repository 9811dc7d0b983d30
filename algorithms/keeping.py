"""Parts of a model that stay with the client: its head, its body, or its layers of normalisation.

What is kept is a client's state, and what travels is the rest; both are models with some of the parameters missing. A client that
has not been asked before starts from the initial values of what it keeps, which a common seed gives, so nothing is sent for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.algorithms.local import Local, Training, replaced
from fedfleet.algorithms.options import CohortOptions, LocalOptions
from fedfleet.simulator.author import (
    BUFFERS,
    Algorithm,
    Batch,
    BatchPlan,
    ConfigError,
    Key,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Ops,
    Personal,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
)

Kept = Literal["head", "body", "norm"]
Moves = Literal["all", "kept", "rest"]
MISSING = {
    "head": "the net has no linear last layer after others: choose task.model=mlp or cnn, or a module:name that has",
    "body": "the net has no layers before a linear last one: choose task.model=mlp or cnn",
    "norm": "the net has no layers that normalise: choose task.model=cnn_bn",
}


class Cut(NamedTuple):
    """Where a model is cut.

    Attributes:
        kept: the parameters of ``z["x"]`` that stay with the client.
        order: all of them, as the net has them.
        buffers: whether what layers keep count of stays there too.

    """

    kept: frozenset[str]
    order: tuple[str, ...]
    buffers: bool = False

    def stays(self, z: Tree) -> Tree:
        """Return what a client keeps of a model, or of a direction."""
        mine = {"x": {name: leaf for name, leaf in z["x"].items() if name in self.kept}}
        return {**mine, BUFFERS: z[BUFFERS]} if self.buffers and BUFFERS in z else mine

    def travels(self, z: Tree) -> Tree:
        """Return what a client sends and is sent."""
        rest = {"x": {name: leaf for name, leaf in z["x"].items() if name not in self.kept}}
        return {**rest, BUFFERS: z[BUFFERS]} if not self.buffers and BUFFERS in z else rest

    def whole(self, travels: Tree, stays: Tree) -> Tree:
        """Return the model of both."""
        counted = {**travels, **stays}.get(BUFFERS)
        both = {**travels["x"], **stays["x"]}
        x = {"x": {name: both[name] for name in self.order}}
        return x if counted is None else {**x, BUFFERS: counted}

    def still(self, direction: Tree, *, kept: bool) -> Tree:
        """Return a direction that leaves what is kept, or the rest, as it is."""
        x = {name: T.zeros_like(leaf) if (name in self.kept) == kept else leaf for name, leaf in direction["x"].items()}
        return {**direction, "x": x}


def cut(task: Task, what: Kept, algorithm: str, needs: str | None = None) -> Cut:
    """Return where the model of a task is cut. Raises ConfigError where it has no such parts, or no objective of that name."""
    leaves: Mapping[str, frozenset[str]] | None = getattr(task, "leaves", None)
    if leaves is None:
        raise ConfigError(
            f"algorithm.name={algorithm!r}: it leaves part of the net with the clients, and the task does not say which "
            f"parts there are: use task.name=classification"
        )
    order = tuple(task.init(0)["x"])
    every = frozenset(order)
    head = leaves.get("head", frozenset())
    result = every - head if what == "body" else leaves.get(what, frozenset())
    if not result or result == every or (not head and what == "body"):
        raise ConfigError(f"algorithm.name={algorithm!r}: {MISSING[what]}")
    if needs is not None and needs not in task.objectives:
        raise ConfigError(
            f"algorithm.name={algorithm!r}: it learns from labels and from the net's features, and the task has no objective "
            f"{needs!r}: use task.name=classification, which takes a net of your own as task.model, too"
        )
    return Cut(result, order, buffers=what == "norm")


def matrix(head: Tree) -> Tensor:
    """Return the weight (classes, width) of a head, which tells how many classes there are, and how wide features are."""
    return next(leaf for leaf in head["x"].values() if leaf.dim() == 2)


class State(NamedTuple):
    """What travels of the model, and the initial values of what does not."""

    z: Tree
    initial: Tree


def initial(shared: Mapping[str, Any]) -> Tree:
    """Return what a client keeps that has not been asked before."""
    return shared["initial"]


def training(at: Cut, options: AveragingOptions, plan: BatchPlan, moves: Moves, place: int = 0) -> LocalLoop:
    """Return local steps of all of the model, of what is kept or of the rest, by the optimiser at this place of the work's."""
    rule = options.client_optimizer.build()

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, where: StepInfo, key: Key) -> Local:
        d = moving(ops.grad("train", local.z, batch, key)[0])
        d, after = rule.update(local.optimizer[place], d, local.z)
        moved = ops.step("train", local.z, shared["lr"], moving(d))
        return Local(moved, replaced(local.optimizer, place, after), local.client_state)

    def moving(d: Tree) -> Tree:  # before the optimiser, which clips, and after it, which lets weights decay
        return d if moves == "all" else at.still(d, kept=moves == "rest")

    return LocalLoop(step=step, batches=plan)


def keeping(
    options: AveragingOptions,
    task: Task,
    cohort: CohortOptions,
    at: Cut,
    stages: tuple[LocalLoop, ...],
    *,
    learns: bool = True,
    tuning: tuple[LocalLoop, ...] = (),
) -> Algorithm:
    """Build an algorithm that averages what travels.

    Args:
        options: how clients train, and count.
        task: the task.
        cohort: who is invited.
        at: where the model is cut.
        stages: a client's work in a round.
        learns: whether what is kept changes in a round; else it is what it was in the beginning, for all clients.
        tuning: what becomes of a client's model before it is evaluated as its own.

    """
    rule = options.client_optimizer.build()

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        z = at.whole(shared["z"], client_state if learns else shared["initial"])
        return Local(z, tuple(rule.init(z) for _ in stages), client_state)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        return Message({"z": at.travels(local.z)}), at.stays(local.z) if learns else client_state

    def whole(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local) -> tuple[Message, Tree]:
        return Message({"z": local.z}), client_state

    fresh = initial if learns else None
    work = Training(client_init=client_init, loops=stages, client_final=client_final)
    train = Phase(name="train", work=work, reduce={"z": Mean()}, weight=options.weight, client_state=fresh, model="z")

    own_model = LocalWork(client_init=client_init, loops=tuning, client_final=whole)
    return averaged(options, task, cohort, at, train, own_model)


def averaged(
    options: LocalOptions,
    task: Task,
    cohort: CohortOptions,
    at: Cut,
    train: Phase,
    own_model: LocalWork,
    config: Mapping[str, float] | None = None,
) -> Algorithm:
    """Build an algorithm whose server averages what travels.

    Args:
        options: clients' rates.
        task: the task.
        cohort: who is invited.
        at: where the model is cut.
        train: the one exchange of a round, of the slot "z".
        own_model: how a client's own model comes about.
        config: what clients are told besides.

    """

    def message(state: State, t: int) -> Message:
        told = {"lr": options.rates(t, task.parts), **(config or {})}
        return Message({"z": state.z}, told, {"initial": state.initial})

    def init(z: Tree, key: Key, problem: Problem) -> State:
        return State(at.travels(z), at.stays(z))

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        result = rnd.map_reduce(train, shared=message(state, rnd.index), cohort=rnd.invite(cohort.size))
        return state._replace(z=result["z"]), {}

    return Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda state: at.whole(state.z, state.initial))},
        minimises=True,
        buffers=True,
        personal=Personal(message, own_model, train.client_state),
    )
