"""Unbiased transforms of any small vector: means are right and errors within bounds.

Vectors have zeros, equal numbers and wide ranges.

The deviations allowed are Bernstein's for a chance of 2 exp(-14). Take the mean of N draws of variance v, each at
most r off the mean. It may be off by sqrt(28 v / N), 5.3 standard errors, and 14 r / (3 N). v is as
docs/guides/compression.md bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from tests.middleware.compression.test_transforms import made, passed

DRAWS = 16384
KEYS = rng.fold(rng.key(11), torch.arange(DRAWS))
NUMBERS = st.one_of(
    st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.3]),  # zeros, and numbers of the same size
    st.builds(lambda sign, power: sign * 10.0**power, st.sampled_from([-1, 1]), st.floats(-4, 3)),
)
VECTORS = st.lists(NUMBERS, min_size=1, max_size=8).map(lambda x: torch.tensor(x, dtype=torch.float64))
FINENESS = st.integers(1, 8)


def random_k(x: Tensor, n: int) -> tuple[list[Any], float]:
    k = min(n, len(x))
    return [{"name": "random_k", "k": k}], len(x) / k - 1


def qsgd(x: Tensor, n: int) -> tuple[list[Any], float]:
    return [{"name": "qsgd", "levels": n}], min(len(x) / n**2, math.sqrt(len(x)) / n)


def ternary(x: Tensor, n: int) -> tuple[list[Any], float]:
    return ["ternary"], float(x.abs().max() * x.abs().sum() / x.square().sum()) - 1


def uniform(x: Tensor, n: int) -> tuple[list[Any], float]:
    return [{"name": "uniform", "levels": n + 1}], len(x) / (2 * n**2)


def rotated(x: Tensor, n: int) -> tuple[list[Any], float]:
    size = 2 ** math.ceil(math.log2(len(x)))
    return ["rotation", {"name": "uniform", "levels": n + 1}], (2 * math.log(size) + 2) / n**2


@pytest.mark.parametrize("bounded", [random_k, qsgd, ternary, uniform, rotated])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(x=VECTORS, n=FINENESS)
@example(x=torch.ones(8, dtype=torch.float64), n=1)
@example(x=torch.tensor([1, -1, 0, 0, 0, 0, 0, 0], dtype=torch.float64), n=2)
def test_the_mean_is_the_vector_and_the_error_within_the_bound(
    bounded: Callable[[Tensor, int], tuple[list[Any], float]], x: Tensor, n: int
):
    if not x.any():
        x = x + 1.0
    names, share = bounded(x, n)
    whole = float(x.square().sum())
    bound, there = max(share, 0.0) * whole, made(*names)
    y = torch.func.vmap(lambda key: passed(there, x, key).send["z"]["x"], randomness="error")(KEYS)
    allowed = far(bound, float((y - x).abs().max())) + 1e-12 * math.sqrt(whole)
    assert float((y.mean(0) - x).abs().max()) <= allowed
    errors = (y - x).square().sum(1)
    most = float(errors.max())
    assert float(errors.mean()) <= bound + far(bound * most, most) + 1e-12 * whole


def test_what_a_codec_says_of_its_error_is_the_bound():
    for bounded in (random_k, qsgd, uniform, rotated):
        for x, n in ((torch.ones(4), 4), (torch.ones(64), 2)):
            names, share = bounded(x, n)
            turned = bounded is rotated  # whose other bound is smaller for few numbers
            said = made(*names)[-1].error(len(x), turned=turned)
            assert said == (min(share, uniform(x, n)[1]) if turned else share)


def far(variance: float, most: float) -> float:
    return math.sqrt(28 * variance / DRAWS) + 14 * most / (3 * DRAWS)
