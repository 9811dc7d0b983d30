"""The one seam between client code and the engine: ``ops.grad``.

The whole local loop of a block of clients runs under one ``torch.func.vmap``. ``ops.grad`` reaches beneath it, to the
parameters of all clients of the block at once, and plain autograd on the sum of their losses gives each client its own
gradient, since client i's loss depends on client i's parameters alone. With a ``Ledger`` (the factored executor) the weights
of linear layers and convolutions stay combinations, and their gradients are recorded as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedfleet.simulator import authored
from fedfleet.simulator.arithmetic import rng, vmap_internals
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import Combination, PerClient
from fedfleet.simulator.arithmetic.factored import Factored, Ledger, Notes
from fedfleet.simulator.arithmetic.layers import Layer, pays
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.single import squares
from fedfleet.simulator.arithmetic.tree import Scalar, Tree
from fedfleet.simulator.arithmetic.weight import NotLinear, Weight
from fedfleet.simulator.block.clipped import clipped, one_row
from fedfleet.simulator.work import BUFFERS, Batch, Objective

V = TypeVar("V")


class _Found(NamedTuple):
    """Gradients in the order of the leaves of z, the first player's value, aux, the floats of leaves that are no layers."""

    gradients: list[Tensor]
    value: Tensor
    aux: Mapping[str, Any]
    rest: int


class _Call:
    """One gradient evaluation: of one client, or under ``vmap`` of a block.

    ``dense`` are the leaves that are not only weights of layers; one found on the way is added.
    """

    def __init__(
        self, objective: Objective, z: Tree, wrt: tuple[str, ...] | None, ledger: Ledger | None, dense: set[str]
    ):
        self.objective, self.tree, self.ledger, self.dense = objective, z, ledger, dense
        active = _active(objective, z, wrt)
        named = list(T.named_leaves(z))
        self.paths, self.z = [path for path, _ in named], [leaf for _, leaf in named]
        self.parts = [path.split(".", 1)[0] for path in self.paths]
        self.trained = [part in active for part in self.parts]

    def evaluate(self, batch: Batch, ctx: Tree, key: Key) -> _Found:
        """Return the gradients."""
        while True:
            if self.ledger is not None:
                self.ledger.products = 0
            try:
                return self._attempt(batch, ctx, key)
            except NotLinear as e:
                self.dense.add(self.paths[e.index])
                assert self.ledger is not None
                self.ledger.notes.reasons.setdefault(self.paths[e.index], set()).add(f"{e.operation} in the loss")

    def _attempt(self, batch: Batch, ctx: Tree, key: Key) -> _Found:
        contents = [self._content(i) for i in range(len(self.z))]
        plain = {i: vmap_internals.lower(self.z[i]) for i, content in enumerate(contents) if content is None}
        clients = vmap_internals.clients()
        with vmap_internals.beneath():
            points = [
                self._tensor(i, *plain[i], clients) if content is None else self._parameter(i, content)
                for i, content in enumerate(contents)
            ]
        leaves = [Weight.of(p) if isinstance(p, Layer) else self._leaf(i, p) for i, p in enumerate(points)]
        with torch.enable_grad():
            found = self.objective.loss(T.unflatten(self.tree, leaves), batch, ctx, key)
        value, aux = authored.pair(found, "the objective's loss", "(value, aux), such as batch.mean(each), {}")
        players: dict[str | None, Tensor] = {**value} if isinstance(value, Mapping) else {None: value}
        if strangers := [p for p in players if p is not None and p not in self.tree]:
            raise ValueError(f"the objective has losses for {strangers}, but the parts are {list(self.tree)}")
        with torch.enable_grad():
            values = {p: vmap_internals.lower(v)[0] for p, v in players.items()}
            with vmap_internals.beneath():
                result = self._differentiate(points, values)
        gradients = [self._gradient(i, p, g) for i, (p, g) in enumerate(zip(points, result, strict=True))]
        first = next(iter(players.values()))
        rest = sum(leaf.numel() for leaf, p in zip(self.z, points, strict=True) if not isinstance(p, Layer))
        return _Found(gradients, first.detach(), T.map(Tensor.detach, dict(aux)), rest)

    def _parameter(self, i: int, content: Combination) -> Layer | Tensor:
        """Return a combination as a layer, or multiplied out where the loss uses it in another way."""
        leaf, path, trained = self.z[i], self.paths[i], self.trained[i]
        assert self.ledger is not None
        if not pays(content, last=self.ledger.last):
            value = content.dense()
            if isinstance(leaf, Factored):
                leaf.fold(value)
            content = Combination(content.clients, leaf, [(PerClient(value), 1.0)])
        if path in self.dense:
            return content.dense().detach().requires_grad_(trained)
        return Layer(i, self.ledger, path, content, trained)

    def _tensor(self, i: int, value: Tensor, batched: bool, clients: int | None) -> Tensor:
        """Return a tensor to differentiate with respect to; one shared by all still has one gradient a client."""
        if self.trained[i] and clients is not None and not batched:
            value = value.expand(clients, *value.shape)
        return value.detach().requires_grad_(self.trained[i])

    def _content(self, i: int) -> Combination | None:
        """Return leaf ``i`` as a combination, if it is one or can be the weight of a layer."""
        leaf, ledger = self.z[i], self.ledger
        if isinstance(leaf, Factored):
            return leaf.combination()
        if ledger is None or leaf.dim() not in (2, 4) or self.paths[i] in self.dense:
            return None
        value, batched = vmap_internals.lower(leaf)
        return Combination(ledger.clients, leaf, [(PerClient(value) if batched else ledger.shared(leaf), 1.0)])

    def _leaf(self, i: int, point: Tensor) -> Tensor:
        """Return what the loss sees of a tensor."""
        leaf = self.z[i]
        return (
            vmap_internals.lift(point)
            if self.trained[i] or isinstance(leaf, Factored) or vmap_internals.is_batched(leaf)
            else point
        )

    def _differentiate(self, points: list[Layer | Tensor], values: Mapping[str | None, Tensor]) -> list[Tensor | None]:
        """Differentiate the summed losses, each player's for its own leaves; frozen and unused leaves get None."""
        grads: list[Tensor | None] = [None] * len(points)
        last = list(values)[-1]
        for player, value in values.items():
            mine = [i for i, p in enumerate(self.parts) if self.trained[i] and player in (None, p)]
            if not mine or not value.requires_grad:  # a frozen player, or a loss that depends on nothing trained
                continue
            for i, p in enumerate(points):
                if isinstance(p, Layer):
                    p.recording = i in mine
            inputs = [p.tap if isinstance(p, Layer) else p for p in (points[i] for i in mine)]
            each = torch.ones_like(value)
            result = torch.autograd.grad(value, inputs, each, allow_unused=True, retain_graph=player != last)
            for i, g in zip(mine, result, strict=True):
                grads[i] = g if g is None or g.layout == torch.strided else g.to_dense()
        return grads

    def _gradient(self, i: int, point: Layer | Tensor, result: Tensor | None) -> Tensor:
        if isinstance(point, Layer):
            return Factored.of(point.ledger, self.paths[i], self.z[i], dict.fromkeys(point.pairs, 1.0))
        if result is None:
            return torch.zeros_like(self.z[i])
        return vmap_internals.lift(result)


class EngineOps:
    """The engine's ``Ops``, one a local step; remembers the loss it finds first as the training loss.

    With a ``ledger``, gradients stay factored. ``notes`` are what the process has found out about layers.
    """

    def __init__(
        self,
        objectives: Mapping[str, Objective],
        functions: Mapping[str, Callable[[Tree, Batch], Any]],
        ledger: Ledger | None = None,
        notes: Notes | None = None,
    ):
        self._objectives = objectives
        self._functions = functions
        self._ledger = ledger
        self._notes = notes or (Notes() if ledger is None else ledger.notes)
        self.loss: Tensor | None = None
        self._kept: list[tuple[Tree, Tree]] = []  # buffers as they were given, and what became of them

    def grad(
        self, objective: str, z: Tree, batch: Batch, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Mapping[str, Any]]:
        """Return ``(direction, aux)``; ``aux["loss"]`` is the value (the first player's where each has its own)."""
        chosen = self._objective(objective)
        ctx = _dense(ctx, "ctx")
        ledger = self._ledger
        result = _Call(chosen, z, wrt, ledger, self._notes.dense.setdefault(objective, set())).evaluate(batch, ctx, key)
        if ledger is not None:
            rows = len(batch.weight)
            ledger.notes.products.setdefault(objective, ledger.products // max(1, rows))
            # A multiplication and an addition each, forward once and backward twice; no layer: each float once an example.
            ledger.flop += 6 * (ledger.products + rows * result.rest)
        if self.loss is None:
            self.loss = result.value
        if BUFFERS in result.aux:
            self._kept.append((z[BUFFERS], result.aux[BUFFERS]))
        gradient = T.unflatten(z, result.gradients)
        direction = {
            p: g if chosen.sign.get(p, 0) in (0, 1) else T.scale(chosen.sign[p], g) for p, g in gradient.items()
        }
        return direction, {**result.aux, "loss": result.value}

    def grads(
        self, objective: str, z: Tree, batch: Batch, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Tensor]:
        """Return the direction of each row alone, leaves (B, ...), and losses (B,). Raises ValueError for layers with buffers.

        The keys of real rows are those of their places among real rows.
        """
        chosen = self._objective(objective)
        if BUFFERS in z:
            raise ValueError(
                "layers such as BatchNorm look at a whole batch, whose rows have no gradients of their own"
            )
        z, ctx = _dense(z, "gradients of single examples"), _dense(ctx, "ctx")
        active = {p: z[p] for p in _active(chosen, z, wrt)}

        def loss(moving: Tree, row: Mapping[str, Tensor], key: Key) -> tuple[Tensor, Tensor]:
            value = one_row(chosen, {**z, **moving}, row, batch.weight, ctx, key)
            return value, value

        each = torch.func.vmap(torch.func.grad(loss, has_aux=True), in_dims=(None, 0, 0), randomness="error")
        result, losses = each(active, dict(batch.data), _keys(key, batch))
        if self.loss is None:
            self.loss = batch.mean(losses)
        return {p: T.scale(chosen.sign[p], result[p]) for p in active}, losses

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
        """Return the sum of the directions of real rows, each cut to ``norm``, and losses (B,). Raises ValueError as ``grads``."""
        if vmap_internals.level() == 1 and not vmap_internals.differentiated() and BUFFERS not in z:
            chosen = self._objective(objective)
            # By how it is asked, too, so that what a process has seen elsewhere decides nothing.
            dense = self._notes.dense.setdefault(f"{objective} {wrt} {T.structure(ctx)}", set())
            z, ctx = _dense(z, "gradients of single examples"), _dense(ctx, "ctx")
            active = _active(chosen, z, wrt)
            keys = _keys(key, batch)
            while True:
                try:
                    sums, losses = clipped(chosen, z, active, batch, ctx, keys, norm, dense)
                    break
                except NotLinear as e:
                    dense.add([path for path, _ in T.named_leaves(z)][e.index])
            if self.loss is None:
                self.loss = batch.mean(losses)
            return sums, losses
        each, losses = self.grads(objective, z, batch, key, ctx=ctx, wrt=wrt)
        total = torch.stack([squares(g) for g in T.leaves(each)]).sum(0)
        factor = (norm / total.sqrt()).clamp(max=1.0) * batch.weight
        return T.map(lambda g: torch.tensordot(factor.to(g.dtype), g, 1), each), losses

    def value(self, objective: str, z: Tree, batch: Batch, key: Key) -> Tensor:
        """Return the objective's value without gradient."""
        self._count_forward(z, batch)
        value = self._objective(objective).loss(z, batch, None, key)[0]
        value = next(iter(value.values())) if isinstance(value, Mapping) else value
        if self.loss is None:
            self.loss = value
        return value

    def step(self, objective: str, z: Tree, lr: Scalar, direction: Tree) -> Tree:
        """Return the projection of ``z - lr * direction``, with what layers keep count of as it is by now."""
        moved = self._objective(objective).step(z, lr, authored.direction(direction, z))
        if BUFFERS not in z:
            return moved
        return {**moved, BUFFERS: next((new for old, new in reversed(self._kept) if old is z[BUFFERS]), z[BUFFERS])}

    def apply(self, name: str, z: Tree, batch: Batch) -> Any:
        """Evaluate a forward function of the task."""
        self._count_forward(z, batch)
        return _known("function", name, self._functions)(z, batch)

    def _objective(self, name: str) -> Objective:
        return _known("objective", name, self._objectives)

    def _count_forward(self, z: Tree, batch: Batch) -> None:
        if (ledger := self._ledger) is not None:
            ledger.flop += 2 * len(batch.weight) * max(ledger.notes.products.values(), default=T.count(z))


def _active(objective: Objective, z: Tree, wrt: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the parts that a gradient moves."""
    return tuple(p for p in z if objective.sign.get(p, 0) != 0 and (wrt is None or p in wrt))


def _keys(key: Key, batch: Batch) -> Tensor:
    """Return each row's own key (B,): of real ones, that of their place among them."""
    return rng.fold(key, (batch.weight > 0).cumsum(0) - 1)


def _dense(tree: Tree, reason: str) -> Tree:
    """Return a tree without factored leaves."""
    return T.map(lambda x: x.multiplied_out(reason) if isinstance(x, Factored) else x, tree)


def _known(what: str, name: str, there: Mapping[str, V]) -> V:
    """Return what the task has under a name. Raises ValueError."""
    if name not in there:
        raise ValueError(f"the task has no {what} {name!r}, only {', '.join(there)}")
    return there[name]
