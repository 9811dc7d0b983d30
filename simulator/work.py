"""The parts of an algorithm: the work of one client, the phase it belongs to, and the messages that travel.

An author writes the work of ONE client as pure functions. No algorithm code has a client axis. The engine runs many
clients at once, and reduces what they send by the phase's declared reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Scalar, Tree, axpy, neg
from fedfleet.simulator.secure import Secure

BUFFERS = "b"
"""The part of a model that no gradient moves: what its layers keep count of as they go, such as BatchNorm's statistics.

A loss returns it anew under this name in ``aux``, and ``ops.step`` puts it in its place.
"""


def trainable(tree: Tree) -> Tree:
    """Return what gradients move of a tree: all of it but a model's buffers."""
    return {part: below for part, below in tree.items() if part != BUFFERS} if isinstance(tree, Mapping) else tree


@dataclass(frozen=True)
class Message:
    """What travels one way between the server and a client.

    Attributes:
        send: slot name -> tree; counted in floats and in bytes.
        config: numbers that go with it (step sizes, weights), each for all or by part of the model; 8 bytes a name, and no floats.
        known: what the other side has without being told, such as initial values that a common seed gives; not counted.
        size: (floats, bytes) that ``send`` takes on its way, for all clients or (S,) each of a cohort; None for what it takes here.

    Raises ValueError for what is no number in ``config``.

    """

    send: Mapping[str, Tree] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, Tree] = field(default_factory=dict)
    size: tuple[int | Tensor, int | Tensor] | None = None

    def __post_init__(self) -> None:
        for name, value in self.config.items():
            for leaf in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(leaf, Mapping | tuple | list) or (isinstance(leaf, Tensor) and leaf.numel() != 1):
                    what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else "a tree"
                    raise ValueError(
                        f"its config has {name!r}, {what}: put it into send, which is counted in floats, too"
                    )

    def merged(self) -> dict[str, Any]:
        """Return slots and config as one mapping, as client code sees them."""
        return {**self.known, **self.send, **self.config}


@dataclass(frozen=True)
class Batch:
    """A minibatch of one client: ``data[name]`` is (B, ...), ``weight`` (B,) is 1 on real rows and 0 on padding."""

    data: Mapping[str, Tensor]
    weight: Tensor

    @property
    def x(self) -> Tensor:
        """Inputs (B, ...)."""
        return self.data["x"]

    @property
    def y(self) -> Tensor:
        """Labels (B,), or targets (B, ...)."""
        return self.data["y"]

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Cut into equal parts along the rows."""
        cut = {k: v.chunk(parts) for k, v in self.data.items()}
        return tuple(Batch({k: v[i] for k, v in cut.items()}, w) for i, w in enumerate(self.weight.chunk(parts)))

    def only(self, mask: Tensor) -> Batch:
        """Return the batch in which only the rows count where ``mask`` (B,) is true."""
        return Batch(self.data, self.weight * mask.to(self.weight.dtype))

    def count(self) -> Tensor:
        """Return the number of real rows, a zero-dimensional tensor."""
        return self.weight.sum()

    def mean(self, v: Tensor) -> Tensor:
        """Average ``v`` (B,) over the real rows; 0 where there is none. Padding is masked, so garbage in it does no harm."""
        return v.masked_fill(self.weight <= 0, 0.0).sum() / self.count().clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How a client walks through its own examples: random reshuffling, each epoch a fresh permutation, last batch short.

    Attributes:
        size: rows a batch (B); None takes the client's whole set as one batch.
        steps: local steps (K); give this or ``epochs``.
        epochs: passes over the local set; clients with more examples then take more steps.
        per_step: batches a step (Extra Step uses 2); the step then receives a tuple of them.
        shuffle: False walks in stored order.
        stratified: how batches of a client with labelled and unlabelled examples hold both. None: as they come. "spread": evenly
            along each pass, every example once. "proportional": in one proportion in every batch, labelled ones first, their
            number rounded down; each kind is gone through by itself, and no batch is short. "domains": as many of each domain that
            the client has, in the order of their numbers; each domain is gone through by itself. ``batch.data["domain"]``
            (B, p) bool then says which domain a row is of.
        held_out: walk through the examples that are held out of the client's work instead.
        free: a look that costs nothing beside training, such as at labels.
        drawn: each example is in each batch with probability size / examples, for itself (Poisson sampling); ``size`` is what a
            batch has on average, and an epoch has as many batches as else.

    Raises ValueError for what does not go together.

    """

    size: int | None
    steps: int | None = None
    epochs: int | None = None
    per_step: int = 1
    shuffle: bool = True
    stratified: Literal["spread", "proportional", "domains"] | None = None
    held_out: bool = False
    free: bool = False
    drawn: bool = False

    @property
    def works(self) -> bool:
        """Say whether its steps count as the client's work, and may be cut short."""
        return not (self.held_out or self.free)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a batch plan needs either steps or epochs: give exactly one of the two")
        for name, least in {"size": 1, "steps": 1, "epochs": 0}.items():  # FACT's tuning may have no epochs
            if isinstance(number := getattr(self, name), int) and number < least:
                raise ValueError(f"BatchPlan({name}={number}): it has to be {least} or more")
        if self.drawn and (self.size is None or self.per_step > 1 or self.stratified or not self.shuffle):
            raise ValueError(
                "a batch plan whose examples are drawn for themselves needs a size, and no order of any kind"
            )


class StepInfo(NamedTuple):
    """Where a local step stands: step ``k`` (int), epoch and epoch_end (tensors), the client's number of examples (tensor)."""

    k: int
    epoch: Tensor
    epoch_end: Tensor
    num_examples: Tensor


class Ops(Protocol):
    """What the engine gives client code: gradients and forward passes, whatever the leaves of a tree are."""

    def grad(
        self, objective: str, z: Tree, batch: Batch, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Mapping[str, Any]]:
        """Return ``(direction, aux)`` with direction = sign * gradient, so that every method steps ``z - eta * direction``.

        Args:
            objective: its name among the task's, such as "train".
            z: the point; the direction has leaves of its shapes.
            batch: the rows (B, ...) that the loss is the mean over.
            key: what the loss draws from.
            ctx: what else the loss is told, such as the means that it compares with.
            wrt: parts of ``z`` to move; all that the objective has a sign for, if not given.

        ``aux`` is what the loss returned beside its value.
        """
        ...

    def grads(
        self, objective: str, z: Tree, batch: Batch, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Tensor]:
        """Return the direction that each row of a batch would give alone, leaves (B, ...), and their losses (B,).

        Parts that no gradient moves are left out. Padding has some as well, of the row that it repeats. Args: as of ``grad``.
        """
        ...

    def clipped(
        self,
        objective: str,
        z: Tree,
        batch: Batch,
        key: Key,
        norm: float,
        *,
        ctx: Tree = None,
        wrt: tuple[str, ...] | None = None,
    ) -> tuple[Tree, Tensor]:
        """Return the sum of what ``grads`` gives for real rows, each cut to a Euclidean norm, and the losses (B,).

        Args: as of ``grad``.
        """
        ...

    def value(self, objective: str, z: Tree, batch: Batch, key: Key) -> Tensor:
        """Return the objective's value (), the first player's where each has its own, without gradient. Args: as of ``grad``."""
        ...

    def step(self, objective: str, z: Tree, lr: Scalar, direction: Tree) -> Tree:
        """Return the projection of ``z - lr * direction``; ``lr`` is a number, or a prefix tree of numbers, one a part.

        ``z["b"]``, where there is one, becomes what the last ``grad`` of this step with these buffers has made of it.
        """
        ...

    def apply(self, name: str, z: Tree, batch: Batch) -> Any:
        """Evaluate a task's forward function, without gradient."""
        ...


class Lasting(NamedTuple):
    """A client's state where its optimiser's lasts from round to round: that of its work, and the optimiser's."""

    client_state: Tree
    optimizer: Any


StepFn = Callable[[Ops, Mapping[str, Any], Tree, Any, StepInfo, Key], Tree]


@dataclass(frozen=True, kw_only=True)
class LocalLoop:
    """Local steps with no message between: ``step(ops, shared, carry, batch, at, key) -> carry``."""

    step: StepFn
    batches: BatchPlan


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """One client's work, pure.

    Attributes:
        client_init: ``(shared, client_state, client_input, key) -> carry``.
        loops: what is done with the local data, in order.
        client_final: ``(shared, client_state, client_input, carry) -> (Message, client_state)``.
        divisible: whether fewer steps are of use, so that a client may stop early; a sum over all its examples is not.

    """

    client_init: Callable[[Mapping[str, Any], Tree, Tree, Key], Tree]
    loops: tuple[LocalLoop, ...]
    client_final: Callable[[Mapping[str, Any], Tree, Tree, Tree], tuple[Message, Tree]]
    divisible: bool = True


Slots = Mapping[str, Mapping[str, Tensor]]
"""Slot -> path of a leaf -> floats, of one client."""


@dataclass(frozen=True)
class Encoding:
    """What a transform makes of slots.

    Attributes:
        residual: floats that the next transform is given; after the last they are sent as they are.
        decode: ``residual -> slots``: what the server makes of the residual, or of what later transforms have left of it.
        numbers, bits: what is sent besides the residual: values at whatever width, and the bits of all. Of shapes alone.
        scalars: scalars that the client tells the server besides, as those of its message's ``config``, and counted so.

    """

    residual: Slots
    decode: Callable[[Slots], Slots]
    numbers: int = 0
    bits: int = 0
    scalars: Mapping[str, Tensor] = field(default_factory=dict)


class Transform(Protocol):
    """One step on the way: clip, add noise, sparsify, quantise. Pure; draws from its key.

    One with ``linear = True`` only scales leaves, by numbers that may follow from their norms (``torch.linalg.vector_norm``).
    """

    @property
    def error_feedback(self) -> bool:
        """Whether the client adds next time what was lost from here on."""
        ...

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return what is made of one client's slots, or of the rest that the transform before has left.

        ``shared`` is what the client was sent; nothing on the way down.
        """
        ...


def only_scales(transform: Transform) -> bool:
    """Return whether a transform says that it is ``linear``."""
    return bool(getattr(transform, "linear", False))


class Forgery(Protocol):
    """What some clients send in the place of what they have computed. Pure; draws from its key."""

    def by(self, clients: Tensor) -> Tensor:
        """Return which of the clients (C,) int64 send it, a mask (C,)."""
        ...

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        """Return what stands in the place of one client's slot: path -> leaf, floats, a model's as what it moved by."""
        ...


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A constant description of one exchange with clients; per-round values travel in ``shared``.

    Attributes:
        name: unique within the algorithm; the name in ``phases.parquet``.
        work: what each heard client does.
        reduce: slot of the client's message -> reduction.
        weight: "uniform", "num_examples", or the name of a scalar in the client's message config.
        client_state: builds a client's state the first time it is needed, from ``shared``; None means clients are stateless.
        uplink: transforms applied in order to what a client sends, before it is reduced; what is counted is what they say is sent.
        forgery: what attackers among the clients send instead, before the transforms.
        secure: how the server sees the sum of it alone; what is reduced are integers then, and weights besides.
        dated: what is sent is of use in its own round alone, so that late answers cannot be kept.
        reweighted: whether the server gives answers weights of its own (``Cohort.weights``), so that one may count for many.
        model, difference: the slot whose mean over the clients is the next model, which they were sent under the same name, or
            how far it moves: where another rule may take the mean's place. None where there is no such.

    """

    name: str
    work: LocalWork
    reduce: Mapping[str, Any]
    weight: str = "uniform"
    client_state: Callable[[Mapping[str, Any]], Tree] | None = None
    uplink: tuple[Transform, ...] = ()
    forgery: Forgery | None = None
    secure: Secure | None = None
    dated: bool = False
    reweighted: bool = False
    model: str | None = None
    difference: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where the model, or how far it moves, is no slot."""
        for what, slot in (("model", self.model), ("difference", self.difference)):
            if slot is not None and slot not in self.reduce:
                raise ValueError(
                    f"phase {self.name!r}, {what}={slot!r}: reduce has no such slot, only {', '.join(self.reduce)}"
                )


LossFn = Callable[[Tree, Batch, Any, Key], tuple[Tensor | Mapping[str, Tensor], Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised and maximised.

    Attributes:
        loss: ``(z, batch, ctx, key) -> (value, aux)``. ``value`` is one scalar, or one scalar a part of ``z`` when the players
            have losses of their own (non-saturating GAN). Use ``batch.mean`` so that padding does not count.
        sign: part of ``z`` -> the factor of its gradient in a direction: +1 descend, -1 ascend, 0 frozen.
        project: applied after every step; None means unconstrained.

    """

    loss: LossFn
    sign: Mapping[str, float]
    project: Callable[[Tree], Tree] | None = None

    def step(self, z: Tree, lr: Scalar, direction: Tree) -> Tree:
        """Return the projection of ``z - lr * direction``; ``lr`` may be a prefix tree.

        Raises ValueError where ``project`` returns other parts than it was given.
        """
        moved = axpy(neg(lr), direction, z)
        if self.project is None:
            return moved
        found = self.project(moved)
        if isinstance(moved, Mapping) and (not isinstance(found, Mapping) or found.keys() != moved.keys()):
            parts = ", ".join(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise ValueError(f"project returned {parts}, and was given {', '.join(moved)}: return the whole tree")
        return found
