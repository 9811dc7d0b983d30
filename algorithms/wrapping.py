"""Shared code of algorithms that wrap another one and replace its mean.

The inner algorithm's own ``round`` runs on a round whose ``map_reduce`` returns something else than the mean of
models, or of their movements. A phase says which slot that is (``Phase.model``, ``difference``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, cast

from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.domain_participation import correction_of
from fedfleet.algorithms.options import AlgorithmOptions, CohortOptions, LocalData
from fedfleet.simulator.author import (
    BUFFERS,
    Algorithm,
    Cohort,
    CollectUploads,
    ConfigError,
    Exchanging,
    Key,
    Mean,
    Message,
    Phase,
    Reduced,
    Registry,
    Round,
    T,
    Task,
    Tree,
    UploadMatrix,
    trainable,
)

INNER = Registry("algorithm", {}, key="name", default="fedavg")
"""Algorithms that another can be put on; ``algorithms/registry.py`` enters them."""


class WrapperOptions(AlgorithmOptions):
    """Options of what is put on another algorithm."""

    of: Annotated[Any, INNER] = Field(default={"name": "fedavg"}, validate_default=True)
    """The algorithm whose mean is replaced: its name, or that and its options."""

    def local_data(self) -> LocalData | None:
        """Return how much of its data a client of the algorithm takes at once."""
        return self.of.local_data()

    def given_dual_lr(self) -> float | None:
        """Return its learning rate of a dual part, if one is given."""
        return self.of.given_dual_lr()


class Asked(NamedTuple):
    """What clients are asked for: the work of a phase, by its name, from what all are sent and what each, in so many steps."""

    phase: str
    shared: Message = Message()
    client_input: Tree = None
    steps: int | None = None


class Exchange(NamedTuple):
    """What a rule is given in the place of a mean.

    Attributes:
        uploads: what was sent, by S clients.
        origin: the model that they moved from; None where they sent differences.
        received: the clients (S,) in the order of the uploads.
        key: for draws of its own.
        asked: what clients were asked for.

    """

    uploads: UploadMatrix
    origin: Tree
    received: Tensor
    key: Key
    asked: Asked

    @property
    def shares(self) -> Tensor:
        """The clients' weights (S,) float64, whose sum is 1. Raises ValueError where all are zero."""
        weight = self.uploads.weight.double()
        if float(weight.sum()) == 0.0:
            raise ValueError("the weights of all heard clients are zero, so their mean does not exist")
        return weight / weight.sum()

    def without(self, there: Tensor) -> Tensor:
        """Return the clients' weights (S,) with 0 for those that are not there (S,) bool; as they are where nobody is."""
        left = self.shares.where(there, 0.0)
        return self.shares if bool(there.all()) or float(left.sum()) == 0.0 else left / left.sum()

    @property
    def trainable(self) -> tuple[UploadMatrix, Tree]:
        """The uploads and the origin without what layers count."""
        return self.uploads.of(trainable), None if self.origin is None else trainable(self.origin)

    def gram(self) -> Tensor:
        """Return the inner products (S, S) float64 of what models have moved by."""
        uploads, start = self.trainable
        return uploads.gram(start)

    def moved(self, step: Tensor, buffers: Tensor | None) -> Tree:
        """Return the model, or the difference, that what clients moved by comes to, times numbers (S,).

        What layers count is averaged with the weights ``buffers`` (S,); None leaves it as it was.
        """
        uploads, start = self.trainable
        move = uploads.combine(step, start)
        new = move if start is None else T.map(lambda m, z: m.add_(z), move, start)  # in place, to spare memory
        if BUFFERS not in self.uploads.blocks[0]:
            return new
        if buffers is None and self.origin is not None:
            return {**new, BUFFERS: self.origin[BUFFERS]}
        return {
            **new,
            BUFFERS: self.uploads.of(lambda z: z[BUFFERS]).combine(self.shares if buffers is None else buffers),
        }


Rule = Callable[[Exchange], Tree]
"""What was sent -> the model, or the difference, that it comes to."""


def wrapped(options: WrapperOptions, task: Task, cohort: CohortOptions, what: str) -> Algorithm:
    """Build the algorithm that ``what`` is put on. Raises ConfigError where it takes no mean in whose place that could come."""
    if (how := correction_of(options.of)) is not None and how.kind != "none":
        raise ConfigError(
            f"algorithm.of.correction={how.kind!r}: it corrects a mean, and {what} comes in its place: leave it out"
        )
    inner = INNER.build(options.of, task, cohort)
    if not any(p.model or p.difference for p in inner.phases):
        raise ConfigError(
            f"algorithm.of={options.of.name!r}: the server does not take a mean of models or differences for the next model, in "
            f"whose place {what} could come: choose fedavg, fedprox, scaffold or a personalised one"
        )
    return inner


def instead(inner: Algorithm, name: str, rule: Rule) -> Algorithm:
    """Return an algorithm with a rule in the place of its mean."""
    phases = stored(inner)

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        return inner.round(state, ruled(rnd, phases, rule))

    return inner._replace(round=round, phases=tuple(phases.values()), name=name)


def stored(inner: Algorithm) -> dict[str, Phase]:
    """Return an algorithm's phases by name, each keeping every upload of the slot that matters."""
    return {p.name: _stored(p) for p in inner.phases}


def _stored(phase: Phase) -> Phase:
    slot = phase.model or phase.difference
    if slot is None:
        return phase
    assert isinstance(phase.reduce[slot], Mean)
    # A late upload has moved from another model.
    return replace(phase, reduce={**phase.reduce, slot: CollectUploads()}, dated=True)


def ruled(rnd: Round, phases: Mapping[str, Phase], rule: Rule) -> Round:
    """Return a round in which a rule takes a mean's place."""
    return cast(Round, _Ruled(rnd, phases, rule))  # the rest of it is the round's own


class _Ruled(Exchanging):
    def __init__(self, rnd: Round, phases: Mapping[str, Phase], rule: Rule):
        super().__init__(rnd, phases)
        self._rule = rule

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        result = super().map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps)
        slot = phase.model or phase.difference
        if slot is None:
            return result
        origin = shared.send[slot] if phase.model else None
        asked = Asked(phase.name, shared, client_input, steps)
        given = Exchange(result.values[slot], origin, result.received, self._round.key, asked)
        return result._replace(values={**result.values, slot: self._rule(given)})
