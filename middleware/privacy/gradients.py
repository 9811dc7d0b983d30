"""An algorithm whose clients hide each of their examples from everybody else, whatever the algorithm: DP-SGD on every client.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar & Zhang, "Deep learning with differential privacy", CCS 2016, Algorithm 1; on each
client for itself as "silo-specific sample-level DP" in Liu, Hu, Wu & Smith, "On privacy and personalization in cross-silo federated
learning", NeurIPS 2022.

    paper        here
    C            norm, to which the gradient of each example is clipped, all parts of the model together
    sigma        multiplier
    L            batch_size: what a batch has on average
    g_t(x_i)     ``ops.clipped``, which adds them up, clipped

    every gradient of a client    (sum_i g_i min(1, C / |g_i|) + sigma C n) / L,   n standard normal

Whatever client code makes of its gradients is hidden with them; it gets to know nothing else of its examples but their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedfleet.middleware.privacy.invitation_limit import Asked
from fedfleet.simulator.algorithm import Algorithm, Cohort, Exchanging, Reduced, Round, beneath, layer
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.work import Batch, BatchPlan, LocalLoop, Message, Ops, Phase, StepInfo


class TooMany(ValueError):
    """Client code has asked for more gradients in a step than is reckoned with."""

    def __init__(self, phase: str, stage: int):
        self.place = phase, stage
        super().__init__(f"phase {phase!r}: more gradients in a step than are reckoned with")


class OtherLook(ValueError):
    """Client code looks at its examples in a way that nothing hides."""


class Gradients(NamedTuple):
    """How gradients are made private.

    Attributes:
        norm: C.
        multiplier: sigma.
        drawn: batches whose examples are shuffled are drawn example by example instead.
        calls: (phase, stage) -> gradients that a step takes of its batch, at most; 1 where nothing is said.
        exchanges: phase -> how often clients are asked there in a round, at most; 1 where nothing is said.
        invites: how many clients a round has to invite, by the selection; None where anybody may be asked.

    """

    norm: float
    multiplier: float
    drawn: bool
    calls: Mapping[tuple[str, int], int]
    exchanges: Mapping[str, int] = {}
    invites: int | None = None


class Answered(NamedTuple):
    """Who has answered: the numbers of clients (n,) rising, and how often each (n,) int64."""

    clients: Tensor
    times: Tensor

    @staticmethod
    def nothing() -> Answered:
        """Return who has before the first exchange."""
        none = torch.zeros(0, dtype=torch.int64)
        return Answered(none, none)

    def after(self, clients: Tensor) -> Answered:
        """Return who has after an exchange with the answers of clients (m,), of some perhaps several."""
        everybody, place = torch.cat([self.clients, clients]).unique(return_inverse=True)
        more = torch.cat([self.times, torch.ones_like(clients)])
        return Answered(everybody, torch.zeros_like(everybody).index_add_(0, place, more))


class Counted(NamedTuple):
    """An algorithm's state, and by phase who has answered how often."""

    state: Any
    phases: Mapping[str, Answered]


def counted(state: Any) -> Counted:
    """Return what is remembered of clients' exchanges in the state of an algorithm, which may be wrapped once more."""
    return layer(state, Counted)


def private_examples(algorithm: Algorithm, made: Gradients) -> Algorithm:
    """Return an algorithm whose clients' gradients are private.

    Its clients raise TooMany or OtherLook where that would not hide all.
    """
    phases = {p.name: _hidden(p, made) for p in algorithm.phases}

    def init(z: Tree, key: Key, problem: Any) -> Counted:
        return Counted(algorithm.init(z, key, problem), {})

    def round(at: Counted, rnd: Round) -> tuple[Counted, Mapping[str, float]]:
        turn: Any = _Counting(rnd, phases, made)  # the rest of it is the round's own
        state, metrics = algorithm.round(at.state, turn)
        return Counted(state, after(at.phases, [*turn.aborted, *turn.records])), metrics

    def skipped(at: Counted, rnd: Any) -> Counted:
        return Counted(algorithm.skipped(at.state, rnd), after(at.phases, rnd.records))

    result = beneath(algorithm, lambda at: at.state)
    return result._replace(init=init, round=round, skipped=skipped, phases=tuple(phases.values()))


def _hidden(phase: Phase, made: Gradients) -> Phase:
    stages = (_stage(phase.name, i, stage, made) for i, stage in enumerate(phase.work.loops))
    return replace(phase, work=replace(phase.work, loops=tuple(stages)))


def private_plan(stage: LocalLoop, made: Gradients) -> BatchPlan:
    """Return a stage's batches: drawn example by example where that is asked for, they are shuffled, and smaller than all."""
    plan = stage.batches
    drawn = made.drawn and plan.shuffle and plan.size is not None and plan.per_step == 1
    return replace(plan, drawn=True, stratified=None) if drawn else plan


def _stage(phase: str, number: int, stage: LocalLoop, made: Gradients) -> LocalLoop:
    plan = private_plan(stage, made)
    calls = made.calls.get((phase, number), 1)

    def step(ops: Ops, shared: Mapping[str, Any], carry: Tree, batch: Any, at: StepInfo, key: Key) -> Tree:
        size = at.num_examples.clamp(max=plan.size) if plan.drawn else None
        many = TooMany(phase, number) if plan.works else OtherLook("takes gradients of examples that are held out")
        hiding = _Hiding(ops, made, calls if plan.works else 0, many, size, key)
        return stage.step(cast(Ops, hiding), shared, carry, _sealed(batch, drawn=plan.drawn), at, key)

    return LocalLoop(step=step, batches=plan)


class _Sealed:
    """A batch that client code may hand on, and look into no further than to see how many rows it has where that is no secret."""

    def __init__(self, batch: Batch, *, drawn: bool):
        self.sealed, self._drawn = batch, drawn

    def count(self) -> Tensor:
        """Return the number of real rows. Raises OtherLook where it was drawn."""
        if self._drawn:
            raise OtherLook("counts the examples of a batch")
        return self.sealed.count()

    def __getattr__(self, name: str) -> Any:
        raise OtherLook("looks at its examples")


def _sealed(batch: Any, *, drawn: bool) -> Any:
    return tuple(_Sealed(b, drawn=drawn) for b in batch) if isinstance(batch, tuple) else _Sealed(batch, drawn=drawn)


class _Untold(dict[str, Any]):
    """What an objective tells besides: nothing."""

    def __missing__(self, name: str) -> Any:
        raise OtherLook(f"looks at the {name} of its examples")

    def get(self, name: str, default: Any = None) -> Any:
        """Raises OtherLook."""
        return self[name]

    def __contains__(self, name: object) -> bool:
        raise OtherLook(f"looks at the {name} of its examples")


class _Hiding:
    """What a step may do with its examples: take private gradients.

    ``size`` is what a sum is divided by, None for its examples; ``key`` the step's own, which client code may not have passed on.
    """

    def __init__(self, ops: Ops, made: Gradients, calls: int, too_many: ValueError, size: Tensor | None, key: Key):
        self._ops, self._made, self._left, self._too_many, self._size = ops, made, calls, too_many, size
        self._draws = rng.fold(key, "hide examples")

    def grad(
        self, objective: str, z: Tree, batch: _Sealed, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Mapping[str, Any]]:
        """Return the private direction, and nothing of what else the objective tells."""
        if self._left == 0:
            raise self._too_many
        self._left -= 1
        rows = batch.sealed
        sums, _ = self._ops.clipped(objective, z, rows, key, self._made.norm, ctx=ctx, wrt=wrt)
        size = rows.count().clamp(min=1.0) if self._size is None else self._size
        std = self._made.multiplier * self._made.norm
        draws, leaves = rng.fold(self._draws, self._left), []
        for name, total in T.named_leaves(sums):
            noise = normals(rng.fold(draws, name), tuple(total.shape)).to(total.dtype)
            leaves.append((total + std * noise) / size.to(total.dtype))
        moving = T.unflatten(sums, leaves)
        return {p: moving[p] if p in moving else T.zeros_like(below) for p, below in z.items()}, _Untold()

    def step(self, objective: str, z: Tree, lr: Any, direction: Tree) -> Tree:
        """Do as the engine does."""
        return self._ops.step(objective, z, lr, direction)

    def grads(self, *args: Any, **given: Any) -> Any:
        """Raises OtherLook."""
        raise OtherLook("looks at its examples' own gradients")

    clipped = grads

    def value(self, *args: Any) -> Any:
        """Raises OtherLook."""
        raise OtherLook("looks at the loss of its examples")

    def apply(self, *args: Any) -> Any:
        """Raises OtherLook."""
        raise OtherLook("looks at what the model says of its examples")


class _Counting(Exchanging):
    """A round whose exchanges are those that are reckoned with."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase], made: Gradients):
        super().__init__(rnd, phases)
        self._left, self._asked = dict(made.exchanges), Asked(made.invites, "privacy of examples")

    def invite(self, size: int, **given: Any) -> Cohort:
        """Do as the round does. Raises FedfleetError where others may be asked than is reckoned with."""
        return self._asked.invite(self._round, size, **given)

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Do as the round does. Raises FedfleetError for what is not reckoned with."""
        if steps is not None:
            raise FedfleetError("clients take other numbers of steps from round to round, which is not reckoned with")
        self._asked.check(cohort)
        self._left[phase.name] = self._left.get(phase.name, 1) - 1
        if self._left[phase.name] < 0:
            raise FedfleetError(
                f"clients are asked in phase {phase.name!r} more often in a round than is reckoned with"
            )
        return super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input)


def after(answered: Mapping[str, Answered], records: Sequence[PhaseRecord]) -> dict[str, Answered]:
    """Return who has answered how often after some exchanges: also those whose answers came too late, or to an aborted attempt."""
    result = dict(answered)
    for record in records:
        outcome = record.responses.outcome
        mine = record.clients[(outcome != Outcome.UNAVAILABLE) & (outcome != Outcome.FAILED)]
        result[record.phase] = result.get(record.phase, Answered.nothing()).after(mine)
    return result


def calls_of(trial: Callable[[Mapping[tuple[str, int], int]], None], most: int = 8) -> dict[tuple[str, int], int]:
    """Return how many gradients a step of each stage takes, where that is more than one. Raises FedfleetError.

    ``trial`` runs client code with so many allowed, and raises what client code does.
    """
    result: dict[tuple[str, int], int] = {}
    while True:
        try:
            trial(result)
        except FedfleetError as e:
            if not isinstance(e.__cause__, TooMany) or result.get(e.__cause__.place, 1) >= most:
                raise
            result[e.__cause__.place] = result.get(e.__cause__.place, 1) + 1
        else:
            return result
