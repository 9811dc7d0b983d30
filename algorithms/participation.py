"""Corrections for unequal participation: a mean over the clients heard becomes an estimate of the mean over all.

Clients that are online less often are heard less often, so the plain mean has the optimum, or the saddle point, of other weights. A
correction applies to one slot of one phase that is reduced by a mean: models, changes of them, or gradients, of one player or two.

    known_p   the inverse chance of being online (Horvitz & Thompson 1952; Hajek 1971), which has to be known
    fedau     Wang & Ji, "A lightweight method for tackling unknown participation statistics in federated averaging", ICLR 2024
    mifa      Gu, Huang, Zhang & Huang, "Fast federated learning in the presence of arbitrary device unavailability", NeurIPS 2021
    fedvarp   Jhunjhunwala et al., "FedVARP: tackling the variance due to partial client participation", UAI 2022

    symbol           here
    N, S             problem.clients, len(cohort)
    H                found.received, the clients heard
    p_i, 1/p_i       Round.chances, Cohort.weights
    omega_i, K       Counts.weights of fedau.py, or Tally.weights by domain; cutoff
    v_i, y_i         what a client sends in the slot (of a model: how far it moved), own["last"]
    e_i = v_i - y_i  what it sends instead, so that the server keeps one tree in the place of N
    y-bar            Memory.mean = (1/N) sum_i y_i, float64

    known_p, fedau   (1/S) sum_H w_i v_i, of fedau's intervals (1/N); normalised: sum_H w_i v_i / sum_H w_i
    mifa             y-bar + (1/N) sum_H e_i
    fedvarp          y-bar + (1/|H|) sum_H e_i, or with known chances y-bar + (1/S) sum_H e_i / p_i

Where clients count by their examples, n_i over its mean stands before each term of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.fedau import Counts, Tally
from fedfleet.algorithms.local import carried
from fedfleet.algorithms.options import ByName, refuse_others
from fedfleet.simulator.author import (
    Algorithm,
    Cohort,
    ConfigError,
    Domains,
    Exchanging,
    Key,
    LocalWork,
    Mean,
    Message,
    Phase,
    Problem,
    Reduced,
    Round,
    Rows,
    T,
    Tree,
    beneath,
    trainable,
)


class Correction(ByName):
    """How a mean over the clients heard is corrected for those who are heard less often than others."""

    naming = "kind"
    used = MappingProxyType(
        {
            "none": (),
            "known_p": ("normalise", "cap"),
            "fedau": ("normalise", "cutoff", "count", "pool"),
            "mifa": ("start",),
            "fedvarp": ("chances", "cap"),
        }
    )
    kind: Literal["none", "known_p", "fedau", "mifa", "fedvarp"] = "none"
    """none; known_p: divide by the chance of being online; fedau: multiply by the mean interval between answers; mifa, fedvarp: use
    the last answer of each client that is not heard."""
    normalise: bool = False
    """known_p and fedau: divide by the sum of the weights of those heard, not by the number invited. Less noise, some bias."""
    cap: float = Field(default=100.0, ge=1, le=1e9)
    """known_p, and fedvarp with ``chances``: the largest 1/p_i. Clients online less often count by it, and are told in "capped"."""
    cutoff: int | None = Field(default=50, ge=1)
    """fedau: K, the longest interval that is counted; null: none. A short one gives less noise and more bias."""
    count: Literal["intervals", "invitations"] = "intervals"
    """fedau: what intervals are counted in: rounds, for cohorts of all clients; or a client's invitations, for samples of them."""
    pool: Literal["client", "domain"] = "client"
    """fedau with count: invitations: whose invitations and answers are counted together; domain: where nobody is met twice."""
    start: Literal["zeros", "wait", "completed"] = "zeros"
    """mifa: clients never heard count as zeros; or the model waits until all have been heard; or the mean is over those heard."""
    chances: bool = False
    """fedvarp: divide differences by the chance of being online, so that each step has the right mean."""

    @model_validator(mode="after")
    def _applies(self) -> Correction:
        idle = (
            {"cutoff"} if self.pool == "domain" else {"cap"} if self.kind == "fedvarp" and not self.chances else set()
        )
        refuse_others(self, self.kind, {*self.used[self.kind]} - idle, self._of_some())
        if self.pool == "domain" and self.count != "invitations":
            raise ValueError("pool=domain: it counts invitations: set count=invitations")
        return self

    @property
    def remembers(self) -> bool:
        """Whether clients keep their last answers."""
        return self.kind in ("mifa", "fedvarp")

    @property
    def asks(self) -> Literal["relative", "absolute"] | None:
        """How the clients' chances have to be known, as ``Algorithm.chances``."""
        if self.kind == "known_p" or self.chances:
            return "relative" if self.normalise else "absolute"
        return None


class Memory(NamedTuple):
    """The mean of what all clients last sent, float64, and the part of all clients that have been heard, up to N."""

    mean: Tree
    heard: float


class Corrected(NamedTuple):
    """An algorithm's state, and what its correction remembers: ``Counts``, a ``Tally``, a ``Memory``, or None."""

    state: Any
    memory: Any


@dataclass(frozen=True)
class Twice(Mean):
    """The mean with the weights of the server, and the mean without them, of one slot."""

    def block(self, values: Tree, rows: Rows) -> Any:
        """Sum a block twice."""
        plain = torch.where(rows.unit > 0, rows.weight / rows.unit, 0.0)
        return super().block(values, rows), super().block(values, rows._replace(weight=plain))

    def merge(self, a: Any, b: Any) -> Any:
        """Add both sums."""
        return super().merge(a[0], b[0]), super().merge(a[1], b[1])

    def final(self, partial: Any) -> Tree:
        """Return both means."""
        return super().final(partial[0]), super().final(partial[1])


def correcting(
    how: Correction,
    algorithm: Algorithm,
    phase: str,
    slot: str,
    *,
    model: bool = False,
    rates: bool = False,
    also: str | None = None,
) -> Algorithm:
    """Return an algorithm with the mean of one slot corrected.

    Args:
        how: the correction.
        algorithm: one that makes at most one exchange of the phase a round.
        phase: its name; clients keep no state in it.
        slot: one that is reduced by ``Mean``.
        model: whether it has points, which began at what was sent under that name; else differences, or gradients.
        rates: mifa divides by the client's ``shared["lr"]`` what it remembers, and multiplies by today's.
        also: another phase, whose means have the same weights, normalised.

    Of metrics there is "capped", the clients invited whose 1/p_i was cut. Raises ConfigError where the slot is no mean.
    """
    if how.kind == "none":
        return algorithm
    (plain,) = (p for p in algorithm.phases if p.name == phase)
    if type(plain.reduce[slot]) is not Mean or plain.client_state is not None:
        raise ConfigError(
            f"algorithm.correction={how.kind!r}: it corrects a mean over clients that keep no state, and slot {slot!r} of "
            f"phase {phase!r} is none: leave it out"
        )
    of = _Slot(how, plain, slot, model, rates and how.kind == "mifa", also)
    phases = {p.name: of.changed(p) for p in algorithm.phases}

    def init(z: Tree, key: Key, problem: Problem) -> Corrected:
        counts = Tally.nothing() if how.pool == "domain" else Counts.nothing()
        return Corrected(algorithm.init(z, key, problem), counts if how.kind == "fedau" else None)

    def round(at: Corrected, rnd: Round) -> tuple[Corrected, Mapping[str, float]]:
        turn = _Correcting(rnd, phases, of, at.memory)
        state, metrics = algorithm.round(at.state, cast(Round, turn))  # the rest of it is the round's own
        return Corrected(state, turn.memory), {**metrics, **turn.metrics}

    def skipped(at: Corrected, rnd: Round) -> Corrected:
        steps = how.kind == "mifa" and len(phases) == 1  # also where nobody is heard
        memory = at.memory
        if steps and memory is not None:
            state, _ = algorithm.round(at.state, cast(Round, _Recalling(rnd, phases, of, memory)))
            return Corrected(state, memory)
        if how.count == "invitations":
            for record in cast(Any, rnd).records:
                if record.phase == phase:
                    memory = _invited(memory, record.clients, rnd.problem)
        return Corrected(algorithm.skipped(at.state, rnd), memory)

    result = beneath(algorithm, lambda at: at.state)
    return result._replace(init=init, round=round, skipped=skipped, phases=tuple(phases.values()), chances=how.asks)


def remembering(
    work: LocalWork, differing: Callable[[Message, Mapping[str, Any], Tree], tuple[Message, Tree]]
) -> LocalWork:
    """Return work that keeps no state made to remember.

    ``differing`` makes of a message, of what the server has sent and of what the client remembers what it sends, and remembers.
    """

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Tree:
        return work.client_init(shared, None, client_input, key)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, carry: Tree
    ) -> tuple[Message, Tree]:
        message, _ = work.client_final(shared, None, client_input, carry)
        return differing(message, shared, client_state)

    return replace(work, client_init=client_init, client_final=client_final)


def inverse_chances(rnd: Round, phase: Phase, cap: float, *, cohort: Cohort, **asked: Any) -> tuple[Tensor, float]:
    """Return 1/p_i (S,) of a cohort, at most ``cap``, and how many are cut; ``asked`` is what ``map_reduce`` is given besides."""
    p = rnd.chances(phase, cohort=cohort, **asked)
    return 1 / p.clamp(min=1 / cap), float((p * cap < 1).sum())


def _invited(memory: Any, clients: Tensor, problem: Problem) -> Counts | Tally:
    """Return the counts after an invitation."""
    if isinstance(memory, Tally):
        return memory.invited(_domains(problem).of(clients))
    return memory.with_new(clients).invited(clients)


def _domains(problem: Problem) -> Domains:
    """Return the domains, of which there is at least one wherever clients come from a population."""
    if problem.domains is None:
        raise ValueError("the problem has no domains")
    return problem.domains


def share_completed(result: Reduced, problem: Problem, weight: str) -> float:
    """Return the share of all clients that a phase has heard, or with the weight "num_examples" of all examples."""
    return float(_parts(result, problem, weight).sum()) / problem.clients


def _parts(result: Reduced, problem: Problem, weight: str) -> Tensor:
    of = problem.num_examples
    if weight == "uniform" or of is None:
        return torch.ones(len(result.received), dtype=torch.float64)
    return of(result.received).double() / problem.mean_examples


class _Slot(NamedTuple):
    """What is corrected, and how."""

    how: Correction
    phase: Phase
    slot: str
    model: bool
    rates: bool
    also: str | None

    @property
    def sent(self) -> str:
        """The slot as clients send it. What is new of a memory has a name under which they are sent nothing, for it is no model."""
        return f"new_{self.slot}" if self.how.remembers else self.slot

    @property
    def weighs(self) -> bool:
        """Whether the server has weights of its own."""
        return self.how.kind in ("known_p", "fedau") or self.how.chances

    def recalled(self, heard: float, before: float, whole: float) -> float:
        """Return how much of the mean of what is remembered MIFA steps by; so many of all have been heard, and before the round."""
        if self.how.start == "wait":
            return float(before > whole * (1 - 1e-9))
        return whole / heard if self.how.start == "completed" else 1.0

    def moved(self, step: Tree, shared: Message, like: Tree) -> Tree:
        """Return the model that was sent, moved by a step, with the buffers of ``like``; or the step, in the types of ``like``."""
        if not self.model:
            return T.map(lambda d, x: d.to(x.dtype), step, trainable(like))
        if self.rates:
            step = T.scale({p: shared.config["lr"][p] for p in step}, step)
        z = T.map(lambda z, d: (z.double() + d).to(z.dtype), trainable(shared.send[self.slot]), step)
        return carried(z, like)

    def changed(self, phase: Phase) -> Phase:
        """Return a phase of the algorithm as it has to be."""
        if phase.name == self.also and self.weighs:
            return replace(phase, dated=True, reweighted=True)
        if phase.name != self.phase.name:
            return phase
        if not self.how.remembers:
            return replace(phase, dated=True, reweighted=True)
        others = {slot: reduction for slot, reduction in phase.reduce.items() if slot != self.slot}
        reduce = {**others, self.sent: Twice() if self.weighs else Mean()}
        return replace(
            phase,
            work=self._remembering(phase.work),
            reduce=reduce,
            client_state=self._nothing_yet,
            reweighted=self.weighs,
            model=None,
            difference=None,
        )

    def _nothing_yet(self, shared: Mapping[str, Any]) -> Tree:
        zeros = T.zeros_like(trainable(shared["z"]))
        return {"last": zeros, "completed": T.leaves(zeros)[0].new_zeros(())}

    def _remembering(self, work: LocalWork) -> LocalWork:
        """Return the work of a client that sends by how much its answer differs from its last one."""

        def differing(message: Message, shared: Mapping[str, Any], last: Tree) -> tuple[Message, Tree]:
            sent = message.send[self.slot]
            v = T.sub(trainable(sent), trainable(shared[self.slot])) if self.model else sent
            if self.rates:
                v = T.scale({p: 1.0 / shared["lr"][p] for p in v}, v)
            e = T.sub(v, last["last"])
            others = {slot: tree for slot, tree in message.send.items() if slot != self.slot}
            send = {**others, self.sent: carried(e, sent)}
            first = {"first": 1.0 - last["completed"]} if self.how.start != "zeros" else {}
            new = {"last": v, "completed": torch.ones_like(last["completed"])}
            return replace(message, send=send, config={**message.config, **first}), new

        return remembering(work, differing)


class _Correcting(Exchanging):
    """A round in which the mean of one slot is corrected."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase], of: _Slot, memory: Any):
        super().__init__(rnd, phases)
        self._of = of
        self.memory: Any = memory
        self.metrics = dict[str, float]()

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        of, given = self._of, {"client_input": client_input, "steps": steps}
        if phase.name not in (of.phase.name, of.also):
            return super().map_reduce(phase, shared=shared, cohort=cohort, **given)
        if of.weighs:
            cohort = replace(cohort, weights=self._weights(phase, shared, cohort, given))
        result = super().map_reduce(phase, shared=shared, cohort=cohort, **given)
        if phase.name == of.also:
            return result
        origin = shared.send[of.slot] if of.model else None
        now = (
            self._remembered(result, shared, len(cohort)) if of.how.remembers else self._counted(result, cohort, origin)
        )
        others = {slot: value for slot, value in result.values.items() if slot != of.sent}
        return result._replace(values={**others, of.slot: now})

    def _weights(self, phase: Phase, shared: Message, cohort: Cohort, given: Mapping[str, Any]) -> Tensor:
        """Return by how much the server multiplies each answer of a cohort (S,)."""
        how = self._of.how
        if how.pool == "domain":
            return self.memory.weights(_domains(self.problem).of(cohort.clients))
        if how.kind == "fedau":
            counts: Counts = self.memory.with_new(cohort.clients)
            return counts.weights(cohort.clients, self._now(counts, cohort.clients), how.cutoff)
        phase = self._phases[phase.name]
        weights, capped = inverse_chances(self._round, phase, how.cap, shared=shared, cohort=cohort, **given)
        if phase.name == self._of.phase.name:
            self.metrics["capped"] = self.metrics.get("capped", 0.0) + capped
        return weights

    def _now(self, counts: Counts, clients: Tensor) -> Tensor:
        """Return the time (S,) that intervals are counted in."""
        if self._of.how.count == "invitations":
            return counts.asked[torch.searchsorted(counts.clients, clients)]
        return torch.full_like(clients, self.index)

    def _parts(self, result: Reduced) -> Tensor:
        """Return what each client heard is of all (R,) float64: 1, or its examples over their mean."""
        return _parts(result, self.problem, self._of.phase.weight)

    def _counted(self, result: Reduced, cohort: Cohort, origin: Tree) -> Tree:
        """Return the mean with weights, of which there is as much as they add up to."""
        of = self._of
        if of.how.kind == "fedau":
            after = self.memory
            if isinstance(after, Tally):
                after = after.answered(_domains(self.problem).of(result.received))
            else:
                after = after.with_new(cohort.clients)
                after = after.answered(result.received, self._now(after, result.received), of.how.cutoff)
            self.memory = _invited(after, cohort.clients, self.problem)
        mean = result[of.slot]
        if of.how.normalise:
            return mean
        intervals = of.how.kind == "fedau" and of.how.count == "intervals"
        whole = self.problem.clients if intervals else len(cohort)
        share = float(self._parts(result) @ result.unit) / whole
        if origin is None:
            return T.scale(share, mean)
        moved = T.axpy(share, T.sub(trainable(mean), trainable(origin)), trainable(origin))
        return carried(moved, mean)

    def _remembered(self, result: Reduced, shared: Message, invited: int) -> Tree:
        """Return what is remembered of all clients with what is new of those heard, and remember that."""
        of, whole = self._of, float(self.problem.clients)
        slot = result[of.sent]
        weighted, plain = slot if of.weighs else (slot, slot)
        e, parts = T.map(Tensor.double, trainable(plain)), self._parts(result)
        before = Memory(T.zeros_like(e), 0.0) if self.memory is None else self.memory
        mean = T.axpy(float(parts.sum()) / whole, e, before.mean)
        heard = before.heard + (float(parts @ result.config["first"]) if "first" in result.config else 0.0)
        self.memory = Memory(mean, heard)
        if of.weighs:
            share = float(parts @ result.unit) / invited
            step = T.axpy(share, T.map(Tensor.double, trainable(weighted)), before.mean)
        elif of.how.kind == "fedvarp":
            step = T.add(before.mean, e)
        else:
            step = T.scale(of.recalled(heard, before.heard, whole), mean)
        return of.moved(step, shared, plain)


class _Recalling(_Correcting):
    """A round in which nobody is asked, and what is remembered is all there is."""

    def invite(self, size: int, **given: Any) -> Cohort:
        none = torch.zeros(0, dtype=torch.int64)
        return Cohort(none, none)

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        of, memory = self._of, self.memory
        step = T.scale(of.recalled(memory.heard, memory.heard, float(self.problem.clients)), memory.mean)
        value = of.moved(step, shared, shared.send["z"])
        return Reduced({of.slot: value}, cohort.clients, {}, cohort.clients.double())
