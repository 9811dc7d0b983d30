"""Standard normal draws by the million, such as noise that hides what is sent: of a key, and at less than half the cost of others.

An operation of torch's own, so that a capture of client code has it as one, and that works through its numbers a piece at a time,
which a cache holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng, vmap_internals
from fedfleet.simulator.arithmetic.rng import Key

PIECE = 1 << 15
"""Words that are worked on at once on a CPU."""


def normals(k: Key, shape: tuple[int, ...] | int = ()) -> Tensor:
    """Return standard normal float32 draws (*k.shape, *shape), other ones than ``rng.normal``: two of one word.

    The radius has 40 bits of it, so that none is further out than 7.4, the root of 2 log 2^40.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    size = math.prod(shape)
    if vmap_internals.level() is None:
        return _made(k, size).reshape((*k.shape, *shape))
    if vmap_internals.level() != 1:
        return torch.cat(_pair(rng.bits(k, (size + 1) // 2)), -1)[..., :size].reshape((*k.shape, *shape))
    below, own = vmap_internals.lower(k)
    with vmap_internals.beneath():
        result = _made(below, size).reshape((*below.shape, *shape))
    return vmap_internals.lift(result) if own else result


def _pair(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return two normal draws of each of some words, which it may write to (Box-Muller)."""
    u = ((word >> 24) & ((1 << 40) - 1)).add_(1).to(torch.float32).mul_(2.0**-40)
    angle = (word & 0xFFFFFF).to(torch.float32).mul_(2.0**-24).mul_(2.0 * math.pi)
    radius = u.log_().mul_(-2.0).sqrt_()
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


def _made(k: Tensor, size: int) -> Tensor:
    return _normals(k, size) if k.device.type == "cpu" else _drawn(k, size)  # elsewhere it is all one piece


@torch.library.custom_op("fedfleet::normals", mutates_args=())
def _normals(k: Tensor, size: int) -> Tensor:
    return _drawn(k, size)


def _drawn(k: Tensor, size: int) -> Tensor:
    keys, half = k.reshape(-1), (size + 1) // 2
    out = torch.empty(len(keys), 2, half, dtype=torch.float32, device=k.device)
    piece = PIECE if k.device.type == "cpu" else max(1, len(keys) * half)
    wide = min(piece, max(half, 1))
    steps = torch.arange(1, wide + 1, dtype=torch.int64, device=k.device) * rng._GAMMA
    many = max(1, piece // wide)
    for of in range(0, len(keys), many):
        rows = keys[of : of + many, None]
        for start in range(0, half, wide):
            stop = min(start + wide, half)
            word = rng.mixed_(rows + steps[: stop - start] + rng._signed(start * rng._GAMMA))
            out[of : of + many, 0, start:stop], out[of : of + many, 1, start:stop] = _pair(word)
    return out.reshape(*k.shape, 2 * half)[..., :size].clone() if size % 2 else out.reshape(*k.shape, size)


@_normals.register_fake
def _(k: Tensor, size: int) -> Tensor:
    return torch.empty(*k.shape, size, dtype=torch.float32, device=k.device)
