"""The sum of what each row of a batch alone would have as its direction, cut to a norm: of all clients of a block at once.

Each row is a lane of its own under one ``vmap``, and sees weights as its client has them. The weights of linear layers and
convolutions have no copy a row (``simulator.arithmetic.single``); other leaves have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic import vmap_internals
from fedfleet.simulator.arithmetic.single import Single, squares, summed
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.arithmetic.weight import Weight
from fedfleet.simulator.work import Batch, Objective


def one_row(objective: Objective, z: Tree, row: Mapping[str, Tensor], weight: Tensor, ctx: Tree, key: Tensor) -> Tensor:
    """Return the loss of a row (...) of a batch by itself. Raises ValueError where players have losses of their own."""
    one = Batch({name: v[None] for name, v in row.items()}, torch.ones_like(weight[:1]))
    value, _ = objective.loss(z, one, ctx, key)
    if isinstance(value, Mapping):
        raise ValueError("players with losses of their own have no gradients of single examples here")
    return value


def clipped(
    objective: Objective,
    z: Tree,
    active: tuple[str, ...],
    batch: Batch,
    ctx: Tree,
    keys: Tensor,
    norm: float,
    dense: set[str],
) -> tuple[Tree, Tensor]:
    """Return the sum over real rows of their gradients, each cut to ``norm``, of the ``active`` parts; and the losses (B,).

    Args:
        objective: whose gradients.
        z: a client's parts, none of them factored.
        active: the parts that are cut together.
        batch: its rows (B, ...).
        ctx: what the loss gets besides.
        keys: (B,), a row's own.
        norm: C.
        dense: leaves that are not only weights of layers.

    Raises NotLinear for another such leaf.

    """
    clients, rows = vmap_internals.clients(), len(batch.weight)
    assert clients is not None
    named = [(path, path.split(".", 1)[0] in active, *vmap_internals.lower(leaf)) for path, leaf in T.named_leaves(z)]
    weight, others = vmap_internals.lower(batch.weight), [_below(x) for x in T.leaves(ctx)]
    data = {name: vmap_internals.lower(v) for name, v in batch.data.items()}
    below = vmap_internals.lower(keys)
    with vmap_internals.beneath():
        points: list[Single | Tensor] = []
        for i, (path, trained, value, own) in enumerate(named):
            if value.dim() - own in (2, 4) and path not in dense:
                points.append(Single(i, value, shared=not own, clients=clients, rows=rows, trained=trained))
            elif own or trained:
                points.append(_a_lane(value, own, clients, rows).detach().requires_grad_(trained))
            else:
                points.append(value)
        mapped = {i: p for i, p in enumerate(points) if isinstance(p, Tensor) and (named[i][1] or named[i][3])}
        told = {i: _a_lane(x, True, clients, rows) for i, (x, own) in enumerate(others) if own}
        lines = {name: _everybody(v, own, clients).flatten(0, 1) for name, (v, own) in data.items()}
        like = weight[0].flatten()[:1]

        def loss(mapped: dict[int, Tensor], told: dict[int, Tensor], row: Mapping[str, Tensor], key: Tensor) -> Tensor:
            leaves = [Weight.of(p) if isinstance(p, Single) else mapped.get(i, p) for i, p in enumerate(points)]
            given = T.unflatten(ctx, [told.get(i, x) for i, (x, _) in enumerate(others)])
            return one_row(objective, T.unflatten(z, leaves), row, like, given, key)

        with torch.enable_grad():
            flat = torch.func.vmap(loss, randomness="error")(mapped, told, lines, _everybody(*below, clients).flatten())
        moving = [i for i, (_, trained, _, _) in enumerate(named) if trained]
        each = dict(zip(moving, _gradients(flat, [points[i] for i in moving]), strict=True))
        signs = {i: objective.sign[named[i][0].split(".", 1)[0]] for i in moving}
        norms = [signs[i] ** 2 * (g.squares() if isinstance(g, Single) else squares(g)) for i, g in each.items()]
        factor = (norm / torch.stack(norms).sum(0).sqrt()).clamp(max=1.0).view(clients, rows)
        factor = factor * _everybody(*weight, clients)
        cut = {i: signs[i] * factor if signs[i] != 1 else factor for i in moving}
        sums = [g.summed(cut[i]) if isinstance(g, Single) else summed(cut[i], g) for i, g in each.items()]
        losses = flat.detach().view(clients, rows)
    return T.unflatten({p: z[p] for p in active}, [vmap_internals.lift(x) for x in sums]), vmap_internals.lift(losses)


def _gradients(losses: Tensor, points: list[Single | Tensor]) -> list[Single | Tensor]:
    """Return the rows' gradients (N, ...) by tensors; layers have recorded theirs."""
    inputs = [p.tap if isinstance(p, Single) else p for p in points]
    result: Any = [None] * len(inputs)
    if losses.requires_grad:  # or nothing that is trained has been used
        result = torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True)
    pairs = zip(points, result, strict=True)
    return [p if isinstance(p, Single) else torch.zeros_like(p) if g is None else g for p, g in pairs]


def _below(x: Any) -> tuple[Any, bool]:
    """Return a leaf of what the loss gets besides, a tensor or a number, as ``vmap_internals.lower`` does."""
    return vmap_internals.lower(x) if isinstance(x, Tensor) else (x, False)


def _everybody(x: Tensor, own: bool, clients: int) -> Tensor:
    """Return a tensor with a first axis of clients."""
    return x if own else x.expand(clients, *x.shape)


def _a_lane(x: Tensor, own: bool, clients: int, rows: int) -> Tensor:
    """Return a client's tensor for each of its rows, (N, ...)."""
    one = _everybody(x, own, clients)
    return one[:, None].expand(clients, rows, *one.shape[1:]).flatten(0, 1)
