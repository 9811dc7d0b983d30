"""The uplink of one client: transforms in order, what is really sent, and what the client still owes.

A model is sent as its difference from the model that the client was sent under the same name, and every other slot as
it is. Only floats travel through the transforms. A model's buffers and whole numbers go as they are.

    x_1 = d (+ e_1)                         the difference d, plus what this client still owes at the first transform
    (residual_i, side_i) = encode_i(x_i)    x_{i+1} = residual_i (+ e_{i+1}); all sides and the last residual are sent
    y_i = decode_i(y_{i+1}, side_i)         what the server makes of it; y_{n+1} is the last residual
    e_i <- x_i - y_i                        error feedback, where transform i uses it

The server has origin + y_1. The origin is the server's own model, also where transforms on the way down have made
another of it. Feedback is that of Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014, as in Karimireddy, Rebjock, Stich & Jaggi,
"Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019, Algorithm 2. Its error e_i is of all
transforms from i on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.factored import Factored
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.work import Slots, Transform, only_scales, trainable

SERVERS = "the server's own"
"""Of what a client was sent by that name: slot -> the server's own model, where transforms have made another of it."""


class Remembering(NamedTuple):
    """A client's state where something on its way up remembers: that of its work, and by phase and transform what it owes."""

    client_state: Tree
    memory: Mapping[str, Mapping[str, Slots]]


class Passed(NamedTuple):
    """What the server has of one client's slots, what the client owes, the numbers and bits sent, scalars told besides."""

    send: dict[str, Tree]
    memory: dict[str, Slots]
    numbers: int
    bits: int
    scalars: dict[str, Tensor]


def through(
    transforms: tuple[Transform, ...],
    send: Mapping[str, Tree],
    shared: Mapping[str, Any],
    memory: Mapping[str, Slots] | None,
    key: Key,
) -> Passed:
    """Pass what a client sends through transforms.

    Args:
        transforms: in order.
        send: the client's slots.
        shared: what it was sent.
        memory: what it owes, by the transform's place; None for nothing yet.
        key: of its draws.

    """
    own = shared.get(SERVERS, {})
    if not transforms and not own:
        return Passed(dict(send), {}, T.count(send), 8 * T.num_bytes(send), {})
    origins = {slot: shared[slot] for slot in send if alike(send[slot], shared.get(slot))}
    kept = all(map(only_scales, transforms))  # then factored leaves stay so
    moved = {s: compressible(moved_by(send[s], origins.get(s))) for s in send}
    moved = {s: {n: x if kept else _dense(x) for n, x in leaves.items()} for s, leaves in moved.items()}
    moved = {slot: leaves for slot, leaves in moved.items() if leaves}
    result, owed, numbers, bits, scalars = coded(transforms, 0, moved, shared, memory, key)
    came = {}
    for slot, tree in send.items():
        mine, origin = (
            result.get(slot, {}),
            dict(T.named_leaves(own.get(slot, origins[slot]) if slot in origins else None)),
        )
        leaves = []
        for name, leaf in T.named_leaves(tree):
            if name in mine:
                y = mine[name]
                if not isinstance(y, Factored):
                    # Nothing that is not finite may get lost on its way, or the client would not be found at fault.
                    y = y.to(leaf.dtype) + (moved[slot][name] * 0.0).sum()
                leaves.append(origin[name] + y if origin else y)
            else:
                leaves.append(leaf)
                numbers, bits = numbers + leaf.numel(), bits + 8 * leaf.numel() * leaf.element_size()
        came[slot] = T.unflatten(tree, leaves)
    return Passed(came, owed, numbers, bits, scalars)


def coded(
    transforms: tuple[Transform, ...],
    at: int,
    given: Slots,
    shared: Mapping[str, Any],
    memory: Mapping[str, Slots] | None,
    key: Key,
) -> tuple[Slots, dict[str, Slots], int, int, dict[str, Tensor]]:
    """Return what the server makes of slots from transform ``at`` on, what is owed, the numbers and bits sent, what is told."""
    if at == len(transforms):
        return given, {}, T.count(given), 8 * T.num_bytes(given), {}
    transform = transforms[at]
    if transform.error_feedback and memory is not None:
        given = T.add(given, memory[str(at)])
    code = transform.encode(given, rng.fold(key, at), shared)
    rest, owed, numbers, bits, scalars = coded(transforms, at + 1, code.residual, shared, memory, key)
    back = code.decode(rest)
    if transform.error_feedback:
        owed[str(at)] = T.sub(given, back)
    return back, owed, numbers + code.numbers, bits + code.bits, {**code.scalars, **scalars}


def compressible(tree: Tree) -> dict[str, Tensor]:
    """Return the leaves of a slot that travel through transforms, by path: its floats, but for a model's buffers."""
    return {n: x for n, x in T.named_leaves(trainable(tree)) if x.is_floating_point() and x.numel()}


def sizes(send: Mapping[str, Tree]) -> dict[str, int]:
    """Return how many floats of each slot travel through transforms, where there are any."""
    result = {slot: T.count(compressible(tree)) for slot, tree in send.items()}
    return {slot: n for slot, n in result.items() if n}


def nothing_owed(transforms: tuple[Transform, ...], send: Mapping[str, Tree]) -> dict[str, Slots]:
    """Return the memory of a client that owes nothing, from the shapes of what it sends."""
    zeros = T.map(lambda x: torch.zeros(x.shape, dtype=x.dtype), dict(send))
    return T.zeros_like(through(transforms, zeros, {}, None, rng.key(0)).memory)


def alike(tree: Tree, origin: Tree) -> bool:
    """Say whether a slot has the structure and the shapes of what was sent under its name: then it is a model that has moved."""
    if not isinstance(origin, Mapping) or T.structure(tree) != T.structure(origin):
        return False
    return all(a.shape == b.shape for a, b in zip(T.leaves(tree), T.leaves(origin), strict=True))


def moved_by(tree: Tree, origin: Tree) -> Tree:
    """Return a model's difference from what it was sent as; of what was not sent it itself."""
    return tree if origin is None else T.sub(tree, origin)


def _dense(x: Tensor) -> Tensor:
    return x.multiplied_out() if isinstance(x, Factored) else x
