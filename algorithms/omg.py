"""FedOMG: on-server matching of gradients, in the place of the mean of any algorithm that averages models or differences.

Nguyen, Le, Nguyen, Kim, Truong & Hwang, "Federated domain generalization with data-free on-server matching gradient", ICLR 2025,
Algorithm 1; ``matching.py`` has its formulas.

    paper                here
    Delta_u              theta_u - theta_g, what client u's model moved by
    w_u                  the phase's weights: clients' numbers of examples, or alike, as ``of`` says
    kappa, eta_g         kappa, server_lr

    server    theta_g <- theta_g + eta_g g_IGD (divided by 1 + kappa^2 in the released code, rescale)

In the paper the sign of the step is the other, of updates of the same sign, which would be ascent (its Eq. 17); the released code
adds. What layers count is averaged, and enters no inner product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, ValidationInfo, field_validator

from fedfleet.algorithms.matching import coefficients, mixture
from fedfleet.algorithms.options import CohortOptions, Options
from fedfleet.simulator.author import (
    BUFFERS,
    Algorithm,
    Cohort,
    ConfigError,
    Mean,
    Message,
    Phase,
    Reduced,
    Round,
    Store,
    T,
    Task,
    Tree,
)

NAME = "omg"


class OmgOptions(Options):
    """Options of FedOMG."""

    algorithms: ClassVar[Mapping[str, Any]] = {}
    """What it can be put on: the registry, which has this algorithm, too."""
    of: dict[str, Any] = Field(default={"name": "fedavg"}, validate_default=True)
    """The algorithm whose mean is replaced: its name, or that and its options."""
    kappa: float = Field(default=0.5, ge=0, lt=1)
    """Radius, as a share of the mean update's norm, of where the step is sought; 0 is the algorithm itself."""
    server_lr: float = Field(default=1.0, gt=0)
    """What the step is multiplied by, eta_g: 0.05 in the paper's Table 4 for domains, 1 in the released code for clients."""
    rescale: Literal["none", "one_plus_kappa", "one_plus_kappa2"] = "none"
    """Divide the step by nothing, by 1 + kappa, which leaves equal updates as they are, or by 1 + kappa^2, as released."""
    updates: int = Field(default=20, ge=1)
    """Steps of the search for the mixture; one more evaluation is made."""
    buffers: Literal["mean", "frozen"] = "mean"
    """Average what layers keep count of, or leave it as it was in the beginning, as in the released code."""

    @field_validator("of", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> dict[str, Any]:
        given = {"name": value} if isinstance(value, str) else dict(value)
        name = given.pop("name", "fedavg")
        if name not in cls.algorithms or name == NAME:
            raise ValueError(
                f"{name!r} is no algorithm to put it on: choose fedavg, fedrod or another that averages models"
            )
        return {"name": name, **cls.algorithms[name].options(**given).model_dump(mode="json")}

    @property
    def inner(self) -> Any:
        """The options of the algorithm."""
        return self.algorithms[self.of["name"]].options(**{k: v for k, v in self.of.items() if k != "name"})

    @property
    def batch_size(self) -> int | None:
        """Examples a step of the algorithm, B."""
        return getattr(self.inner, "batch_size", 1)

    @property
    def dual_lr(self) -> float | None:
        """Its learning rate of a dual part, if it has one of its own."""
        return getattr(self.inner, "dual_lr", None)

    @property
    def steps(self) -> int | None:
        """Its local steps, if they are given."""
        return getattr(self.inner, "steps", None)

    @property
    def epochs(self) -> int | None:
        """Its passes over the local data, if they are."""
        return getattr(self.inner, "epochs", None)

    @property
    def shrink(self) -> float:
        """What the step is divided by."""
        return {"none": 1.0, "one_plus_kappa": 1 + self.kappa, "one_plus_kappa2": 1 + self.kappa**2}[self.rescale]


def omg(options: OmgOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build an algorithm with matching in the place of its mean."""
    name = options.of["name"]
    inner = options.algorithms[name].build(options.inner, task, cohort)
    if not any(p.model or p.difference for p in inner.phases):
        raise ConfigError(
            f"algorithm.of={name!r}: the server does not take a mean of models or differences for the next model, in whose place "
            f"matching could come: choose fedavg, fedprox, scaffold or a personalised one"
        )
    if options.buffers == "frozen" and BUFFERS not in task.parts:
        raise ConfigError("algorithm.buffers='frozen': the net's layers keep count of nothing: leave it out")
    if options.kappa == 0 and options.server_lr == 1 and options.buffers == "mean":
        return inner
    phases = tuple(stored(p) for p in inner.phases)
    by_name = {p.name: p for p in phases}

    def round(state: Any, rnd: Round) -> tuple[Any, Mapping[str, float]]:
        return inner.round(state, cast(Round, Matched(rnd, by_name, options)))  # the rest of it is the round's own

    return inner._replace(round=round, phases=phases, name=NAME)


def stored(phase: Phase) -> Phase:
    """Return a phase that keeps every upload of the slot that matters; a late one has moved from another model."""
    slot = phase.model or phase.difference
    if slot is None:
        return phase
    assert isinstance(phase.reduce[slot], Mean)
    return replace(phase, reduce={**phase.reduce, slot: Store()}, dated=True)


class Matched:
    """A round in which matching takes a mean's place."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase], options: OmgOptions):
        self._round, self._phases, self._options = rnd, phases, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, inbox: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Do as the round does, and match what the clients send."""
        phase = self._phases[phase.name]
        found = self._round.map_reduce(phase, shared=shared, cohort=cohort, inbox=inbox, steps=steps)
        slot = phase.model or phase.difference
        if slot is None:
            return found
        origin = shared.send[slot] if phase.model else None
        return found._replace(values={**found.values, slot: self._matched(found.values[slot], origin)})

    def _matched(self, uploads: Any, origin: Tree) -> Tree:
        """Return the model, or the difference, that the uploads come to; ``origin`` is the model they started from."""
        o, total = self._options, uploads.weight.sum()
        if float(total) == 0.0:
            raise ValueError("the weights of all heard clients are zero, so their mean does not exist")
        weights = uploads.weight / total
        learnt, start = uploads.of(_learnt), None if origin is None else _learnt(origin)
        gram = learnt.gram(start)
        step = coefficients(gram, weights, mixture(gram, weights, o.kappa, o.updates), o.kappa)
        move = learnt.combine(step * (o.server_lr / o.shrink), start)
        new = move if start is None else T.map(lambda m, z: m.add_(z), move, start)  # in place, to spare memory
        if BUFFERS not in uploads.blocks[0]:
            return new
        if origin is not None and o.buffers == "frozen":
            return {**new, BUFFERS: origin[BUFFERS]}
        return {**new, BUFFERS: uploads.of(lambda z: z[BUFFERS]).combine(weights)}


def _learnt(z: Tree) -> Tree:
    return {part: tree for part, tree in z.items() if part != BUFFERS}
