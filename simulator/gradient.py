"""The one seam between client code and the engine: ``ops.grad``.

The whole local loop of a block of clients runs under one ``torch.func.vmap``. ``ops.grad`` is an autograd Function whose vmap
rule is the engine: it sees all clients of the block at once, and plain autograd on the sum of their losses gives each
client its own gradient, since client i's loss depends on client i's parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import tree as T
from fedfleet.simulator.rng import Key
from fedfleet.simulator.tree import Scalar, Tree
from fedfleet.simulator.work import Batch, Objective


class _Call:
    """One gradient evaluation: the structure of its arguments, so that tensors alone pass through autograd."""

    def __init__(self, objective: Objective, z: Tree, batch: Batch, ctx: Tree, wrt: tuple[str, ...] | None):
        self.objective = objective
        self.args = (z, dict(batch.data), batch.weight, ctx)
        self.num_z = len(T.leaves(z))
        active = tuple(p for p in z if objective.sign.get(p, 0) != 0 and (wrt is None or p in wrt))
        self.trained = [path.split(".")[0] in active for path, _ in T.named_leaves(z)]
        self.aux_names: list[str] = []

    def value(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return (value of each leaf's player ..., aux ...) of one client; values are zero-dimensional."""
        *flat, key = tensors
        z, data, weight, ctx = T.unflatten(self.args, flat)
        value, aux = self.objective.loss(z, Batch(data, weight), ctx, key)
        self.players = list(value) if isinstance(value, Mapping) else [None]
        if strangers := [p for p in self.players if p is not None and p not in z]:
            raise ValueError(f"the objective has losses for {strangers}, but the parts are {list(z)}")
        self.aux_names = list(aux)
        values = list(value.values()) if isinstance(value, Mapping) else [value]
        return (*values, *aux.values())

    def gradients(self, z: list[Tensor], values: tuple[Tensor, ...]) -> list[Tensor]:
        """Differentiate the summed losses, each player's for its own leaves; frozen and unused leaves get zeros."""
        paths = [path.split(".")[0] for path, _ in T.named_leaves(self.args[0])]
        grads = [torch.zeros_like(leaf) for leaf in z]
        for player, value in zip(self.players, values, strict=False):
            mine = [i for i, p in enumerate(paths) if self.trained[i] and player in (None, p)]
            if not mine or not value.requires_grad:  # a frozen player, or a loss that depends on nothing trained
                continue
            found = torch.autograd.grad(
                value.sum(), [z[i] for i in mine], allow_unused=True, retain_graph=player != self.players[-1]
            )
            for i, g in zip(mine, found, strict=True):
                if g is not None:
                    grads[i] = g
        return grads


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _Gradient.evaluate(call, call.value, tensors)

    @staticmethod
    def evaluate(
        call: _Call, value: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            z = [t.detach().requires_grad_(r) for t, r in zip(tensors, call.trained, strict=False)]
            out = value(*z, *tensors[call.num_z :])
            grads = call.gradients(z, out)
        return (*grads, *(o.detach() for o in out))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: client code does not differentiate through a gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *tensors: Tensor) -> tuple[Any, Any]:  # type: ignore[override]
        dims = list(in_dims[1:])
        args = list(tensors)
        for i, trained in enumerate(call.trained):
            dim = dims[i]
            if dim is not None:
                args[i], dims[i] = args[i].movedim(dim, 0), 0
            elif trained:  # a leaf shared by all still has one gradient a client
                args[i], dims[i] = args[i].expand(info.batch_size, *args[i].shape), 0
        value = torch.func.vmap(call.value, in_dims=tuple(dims), randomness="error")
        out = _Gradient.evaluate(call, value, tuple(args))
        out_dims = tuple(dims[: call.num_z]) + (0,) * (len(out) - call.num_z)
        return out, out_dims


class EngineOps:
    """The engine's ``Ops``, one a local step; remembers the loss at the step's first gradient as the training loss."""

    def __init__(self, objectives: Mapping[str, Objective], functions: Mapping[str, Callable[[Tree, Batch], Any]]):
        self._objectives = objectives
        self._functions = functions
        self.loss: Tensor | None = None

    def grad(
        self, objective: str, z: Tree, batch: Batch, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Mapping[str, Tensor]]:
        """Return ``(direction, aux)``; ``aux["loss"]`` is the value (the first player's where each has its own)."""
        call = _Call(self._objectives[objective], z, batch, ctx, wrt)
        out = _Gradient.apply(call, *T.leaves(call.args), key)
        gradient = T.unflatten(z, out[: call.num_z])
        values = out[call.num_z : call.num_z + len(call.players)]
        aux = dict(zip(call.aux_names, out[call.num_z + len(call.players) :], strict=True), loss=values[0])
        if self.loss is None:
            self.loss = values[0]
        sign = call.objective.sign
        ascending = {p: sign.get(p, 0) for p in z}
        return {p: T.scale(s, gradient[p]) if s < 0 else gradient[p] for p, s in ascending.items()}, aux

    def step(self, objective: str, z: Tree, lr: Scalar, direction: Tree) -> Tree:
        """Return the projection of ``z - lr * direction``."""
        return self._objectives[objective].step(z, lr, direction)

    def apply(self, name: str, z: Tree, batch: Batch) -> Any:
        """Evaluate a forward function of the task."""
        return self._functions[name](z, batch)
