"""Counter-based hashed randomness: every draw is a pure function of a key, so nothing depends on the order of work.

A key is an int64 tensor. ``bits`` is the output stream of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) started at the key, written in torch integer ops: it is vectorised, works inside
``torch.func.vmap``, and gives equal integers on every device. Keys are derived by ``fold``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Key = Tensor
"""An int64 tensor; zero-dimensional for one stream."""


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >= 1 << 63 else x


_WORD = (1 << 64) - 1
_GAMMA = _signed(0x9E3779B97F4A7C15)
_M1 = _signed(0xBF58476D1CE4E5B9)
_M2 = _signed(0x94D049BB133111EB)
_FOLD = _signed(
    0xD1B54A32D192ED03
)  # an odd constant other than gamma, so that fold(k, i) is no point of k's own stream


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    if _on_host(x):
        return _tensor(_words(x) >> np.uint64(n)).view(x.shape)
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    if _on_host(x):
        return _tensor(_mix_on_host(_words(x).copy())).view(x.shape)
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


def mixed_(x: Tensor) -> Tensor:
    """Mix words in place, on any device."""
    for n, factor in ((30, _M1), (27, _M2)):
        x.bitwise_xor_((x >> n).bitwise_and_((1 << (64 - n)) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


# On the host, and outside vmap, NumPy gives the same integers in a fraction of the time: most draws are of a few numbers.


def _on_host(*tensors: Tensor) -> bool:
    return all(x.device.type == "cpu" for x in tensors) and not torch._C._are_functorch_transforms_active()


def _words(x: Tensor) -> Words:
    """Return a tensor's words, an array of at least one axis: numbers alone would warn that they overflow."""
    return np.atleast_1d(x.numpy() if x.is_contiguous() else x.contiguous().numpy()).view(np.uint64)


def _tensor(x: Words) -> Tensor:
    return torch.from_numpy(x.view(np.int64))


_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_G, _1, _2, _F = (np.uint64(c & _WORD) for c in (_GAMMA, _M1, _M2, _FOLD))


def _mix_on_host(x: Words) -> Words:
    """Mix a fresh array, which is written to."""
    x ^= x >> _30
    x *= _1
    x ^= x >> _27
    x *= _2
    x ^= x >> _31
    return x


def _fold_on_host(k: Key, data: tuple[int | str | Tensor, ...]) -> Key:
    x: int | Words = _words(k) if k.dim() else int(k)
    for d in data:
        of = int(d) if isinstance(d, Tensor) and not d.dim() else d
        if isinstance(x, int):  # a single key, for which Python's integers are faster than arrays
            if not isinstance(of, Tensor):
                x = _mix_one(_mix_one((x + _FOLD) & _WORD) ^ ((_number(of) * _GAMMA + _M1) & _WORD))
                continue
            x = np.array([x & _WORD], dtype=np.uint64)
        word = _words(of.to(torch.int64)) * _G + _1 if isinstance(of, Tensor) else _word(of)
        x = _mix_on_host(_mix_on_host(x + _F) ^ word)
    return torch.tensor(_signed(x)) if isinstance(x, int) else _tensor(x)


def _mix_one(x: int) -> int:
    x = ((x ^ (x >> 30)) * _M1) & _WORD
    x = ((x ^ (x >> 27)) * _M2) & _WORD
    return x ^ (x >> 31)


@functools.lru_cache
def _word(d: int | str) -> np.uint64:
    return np.uint64((_number(d) * _GAMMA + _M1) & _WORD)


def key(seed: int, device: torch.device | str = "cpu") -> Key:
    """Return the root key of a seed."""
    return torch.tensor(_signed(seed), dtype=torch.int64, device=device)


def fold(k: Key, *data: int | str | Tensor) -> Key:
    """Derive a key from ``k`` and the data, in order. Integers and int64 tensors broadcast; a string is hashed by SHA-256."""
    if _on_host(k, *(d for d in data if isinstance(d, Tensor))):
        return _fold_on_host(k, data)
    for d in data:
        word = d.to(torch.int64) * _GAMMA + _M1 if isinstance(d, Tensor) else _signed(_number(d) * _GAMMA + _M1)
        k = _mix(_mix(k + _FOLD) ^ word)
    return k


def _number(d: int | str) -> int:
    return _hashed(d) if isinstance(d, str) else d


@functools.cache
def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def bits(k: Key, shape: tuple[int, ...] | int = ()) -> Tensor:
    """Return 64 random bits a draw, as int64; draw i is SplitMix64's i-th output from state ``k``.

    Args:
        k: keys of any shape.
        shape: the shape drawn for each key.

    Returns:
        int64 tensor (*k.shape, *shape).

    """
    shape = (shape,) if isinstance(shape, int) else shape
    if _on_host(k):
        counter = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
        return _tensor(_mix_on_host(_words(k)[..., None] + counter * _G)).reshape((*k.shape, *shape))
    steps = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device=k.device)
    return _mix(k.unsqueeze(-1) + steps * _GAMMA).reshape((*k.shape, *shape))


def uniform(k: Key, shape: tuple[int, ...] | int = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return draws from U[0, 1), exact multiples of 2^-24 (float32) or 2^-53 (float64)."""
    width = 53 if dtype == torch.float64 else 24
    return _shift(bits(k, shape), 64 - width).to(dtype) * (2.0**-width)


def uniform_at(k: Key, index: Tensor) -> Tensor:
    """Return the draw number ``index`` (int64, from 0) of each stream: ``uniform(k, n, torch.float64)[..., index]`` at once."""
    return _shift(_mix(k + (index + 1) * _GAMMA), 11).to(torch.float64) * (2.0**-53)


def normal(k: Key, shape: tuple[int, ...] | int = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal draws (Box-Muller; one pair of uniforms a draw)."""
    shape = (shape,) if isinstance(shape, int) else shape
    u, v = uniform(k, (*shape, 2), dtype).unbind(-1)
    radius = torch.sqrt(-2.0 * torch.log(1.0 - u))  # 1 - u is in (0, 1]
    return radius * torch.cos((2.0 * math.pi) * v)


def bernoulli(k: Key, p: float | Tensor, shape: tuple[int, ...] | int = ()) -> Tensor:
    """Return booleans, true with probability ``p``."""
    return uniform(k, shape, torch.float64) < p


def permutation(k: Key, n: int) -> Tensor:
    """Return a uniformly random permutation of range(n)."""
    return torch.argsort(bits(k, n), dim=-1, stable=True)


def partners(k: Key, real: Tensor) -> Tensor:
    """Return a random permutation (B,) that takes rows that are ``real`` (B,) to such rows."""
    shuffled, padding = permutation(k, len(real)), (~real).to(torch.int64)
    drawn = shuffled.gather(0, padding.gather(0, shuffled).argsort(stable=True))  # real ones first, in random order
    return torch.empty_like(drawn).scatter(0, padding.argsort(stable=True), drawn)


def sample(k: Key, n: int, size: int, *, replace: bool = False) -> Tensor:
    """Draw ``size`` of ``range(n)``, in random order, in O(size) however large ``n`` is.

    Args:
        k: a scalar key.
        n: size of the population, up to 2^53.
        size: number of draws, at most ``n`` without replacement.
        replace: whether an element may be drawn twice.

    Returns:
        int64 tensor (size,).

    """
    if not replace and size > n:
        raise ValueError(f"cannot draw {size} of {n} without replacement")
    if not replace and size * 4 >= n:
        return permutation(k, n)[:size]

    def draw(start: int, m: int) -> Tensor:
        index = torch.arange(start, start + m, dtype=torch.int64, device=k.device)
        return (uniform_at(k, index) * n).to(torch.int64)

    if replace:
        return draw(0, size)
    # The first `size` distinct values of the stream are a uniform draw without replacement.
    found: dict[int, None] = {}
    so_far, more = 0, size + size // 4 + 16
    while len(found) < size:
        found |= dict.fromkeys(draw(so_far, more).tolist())
        so_far += more
    return torch.tensor(list(itertools.islice(found, size)), dtype=torch.int64, device=k.device)
