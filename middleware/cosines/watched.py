"""Measure how far clients' updates point where the model goes, by an algorithm that computes what it would unwatched.

The measure is the cosine between how client u's model moved and how the model moves in the round, as in Fig. 5 of
Nguyen et al., "Federated domain generalization with data-free on-server matching gradient", ICLR 2025:

    <theta_u - theta, theta' - theta> / (|theta_u - theta| |theta' - theta|)

theta' is the model after the round, whatever the server made of the updates. Where clients belong to domains, the
cosine is that of each domain's mean update, by the clients' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedfleet.middleware.facts import Fact, Need
from fedfleet.simulator.algorithm import Algorithm, Cohort, Exchanging, Reduced, Round, beneath
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Filling, Reduction, Rows, fillable
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.arithmetic.upload_matrix import UploadMatrix
from fedfleet.simulator.work import BUFFERS, Message, Phase


class Watched(NamedTuple):
    """An algorithm's state, and of its last round the cosine of each domain (p,) float64, NaN for those not heard."""

    state: Any
    cosine: Tensor


@dataclass(frozen=True)
class _Keeping(CollectUploads):
    """Keep every upload, and say besides what another reduction makes of them."""

    of: Reduction

    def block(self, values: Tree, rows: Rows) -> UploadMatrix:
        return super().block(values, rows)._replace(beside=self.of.block(values, rows))

    @property
    def fills(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return fillable([self.of])

    def unfilled(self, partial: UploadMatrix, clients: int) -> UploadMatrix:
        assert isinstance(self.of, Filling)  # or the block would not be filled
        return super().unfilled(partial, clients)._replace(beside=self.of.unfilled(partial.beside, clients))

    def merge(self, a: UploadMatrix, b: UploadMatrix) -> UploadMatrix:
        return super().merge(a, b)._replace(beside=self.of.merge(a.beside, b.beside))

    def final(self, partial: UploadMatrix) -> UploadMatrix:
        return partial._replace(beside=self.of.final(partial.beside))


class _Exchange(NamedTuple):
    """The clients heard (R,), what each sent, and the model that they started from; None where they sent differences."""

    clients: Tensor
    kept: UploadMatrix
    origin: Tree


def needs(asked: bool) -> Iterator[Need]:
    """Yield what it takes to measure how updates point, where that is ``asked`` for."""
    if asked:
        yield Need("evaluation.cosines=true", (Fact.MODELS, Fact.EACH_SEEN, Fact.COMPUTED))


def watched(algorithm: Algorithm, domains: int) -> Algorithm:
    """Return an algorithm that tells the cosines of its updates besides: to the bit it does what it would.

    In ``rounds.parquet`` are "cosine_worst", "cosine_mean" and "cosine_variance" over clients, or over domains where there are
    several, and in ``domains.parquet`` then "cosine", of the last round before the evaluation.
    """
    phases = {p.name: _keeping(p) for p in algorithm.phases}
    view = algorithm.views["global"].params

    def init(z: Tree, key: Any, problem: Any) -> Watched:
        return Watched(algorithm.init(z, key, problem), torch.full((domains,), torch.nan, dtype=torch.float64))

    def round(at: Watched, rnd: Round) -> tuple[Watched, Mapping[str, float]]:
        seen = _Watching(rnd, phases)
        state, metrics = algorithm.round(at.state, cast(Round, seen))  # the rest of it is the round's own
        if seen.exchange is None:
            return Watched(state, torch.full_like(at.cosine, torch.nan)), metrics
        of = torch.arange(len(seen.exchange.clients))
        if domains > 1 and rnd.problem.domains is not None:
            of = rnd.problem.domains.of(seen.exchange.clients)
        numbers, result = cosines(seen.exchange.kept, seen.exchange.origin, (view(at.state), view(state)), of)
        each = torch.full_like(at.cosine, torch.nan)
        if domains > 1:
            each[numbers] = result
        return Watched(state, each), {**metrics, **_summary(result)}

    def told(at: Watched) -> Mapping[str, Tensor]:
        return {**(algorithm.domains(at.state) if algorithm.domains else {}), "cosine": at.cosine}

    made = beneath(algorithm, lambda at: at.state)
    return made._replace(init=init, round=round, phases=tuple(phases.values()), domains=told if domains > 1 else None)


def cosines(kept: UploadMatrix, origin: Tree, models: tuple[Tree, Tree], of: Tensor) -> tuple[Tensor, Tensor]:
    """Return groups of clients (p,), rising, and the cosine of each one's mean update with the movement of a model (p,) float64.

    Args:
        kept: what clients (S,) sent.
        origin: the model they started from; None where they sent differences.
        models: before and after the round; what is in both and in the uploads counts, but not what layers count.
        of: which group each client is of (S,).

    """
    shared = [n for n, _ in T.named_leaves(kept.blocks[0]) if not n.startswith(f"{BUFFERS}.")]
    before, after = (dict(T.named_leaves(m)) for m in models)
    names = [n for n in shared if n in before]
    uploads = kept.of(lambda block: {n: leaf for n, leaf in T.named_leaves(block) if n in names})
    if origin is None:
        start, moved = None, {n: (after[n] - before[n])[None] for n in names}
    else:
        sent = dict(T.named_leaves(origin))
        start, moved = {n: sent[n] for n in names}, {n: (sent[n] + (after[n] - before[n]))[None] for n in names}
    none = torch.zeros(1, dtype=torch.float64)
    gram = uploads._replace(blocks=(*uploads.blocks, moved), weights=(*uploads.weights, none)).gram(start)
    groups, mine = of.unique(return_inverse=True)
    weight = torch.zeros(len(groups), len(of), dtype=torch.float64)
    weight[mine, torch.arange(len(of))] = kept.weight.double()
    norms = ((weight @ gram[:-1, :-1]) * weight).sum(1).clamp(min=0).sqrt()
    return groups, (weight @ gram[:-1, -1]) / (norms * gram[-1, -1].sqrt())


def _keeping(phase: Phase) -> Phase:
    slot = phase.model or phase.difference
    if slot is None or isinstance(phase.reduce[slot], CollectUploads):
        return phase
    return replace(phase, reduce={**phase.reduce, slot: _Keeping(phase.reduce[slot])})


class _Watching(Exchanging):
    """A round that sees what clients send."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase]):
        super().__init__(rnd, phases)
        self.exchange: _Exchange | None = None

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        result = super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps)
        phase = self._phases[phase.name]
        slot = phase.model or phase.difference
        if slot is None:
            return result
        kept: UploadMatrix = result[slot]
        self.exchange = _Exchange(result.received, kept, shared.send[slot] if phase.model else None)
        if not isinstance(phase.reduce[slot], _Keeping):
            return result
        return result._replace(values={**result.values, slot: kept.beside})


def _summary(result: Tensor) -> dict[str, float]:
    """Return the metrics of cosines (p,); none where the model has not moved."""
    known = result[result.isfinite()]
    if not len(known):
        return {}
    variance = float(known.var(correction=0))
    return {"cosine_worst": float(known.min()), "cosine_mean": float(known.mean()), "cosine_variance": variance}
