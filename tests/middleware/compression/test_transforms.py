"""Each transform by itself: its mean, its error beside the constants of its paper, what it sends, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.middleware.compression.codecs.registry import TRANSFORMS
from fedfleet.middleware.compression.codecs.rotation import hadamard
from fedfleet.middleware.compression.codecs.sparse import largest
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.block.uplink import nothing_owed, through
from tests.middleware.compression.complete import complete

DRAWS = 4096
SEVERAL = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40).map(lambda x: torch.tensor(x).double())
SPIKY = torch.cat([torch.tensor([5.0, -3.0]), torch.linspace(-0.4, 0.3, 27)]).double()


def made(*names: Any) -> tuple[Any, ...]:
    given = [{"name": n} if isinstance(n, str) else dict(n) for n in names]
    return tuple(TRANSFORMS[t.pop("name")].options(**t) for t in given)


def passed(transforms: tuple[Any, ...], x: Tensor, key: Tensor, memory: Any = None) -> Any:
    return through(transforms, {"z": {"x": x}}, {}, memory, key)


def drawn(transforms: tuple[Any, ...], x: Tensor) -> Tensor:
    """What the server has, of many keys (DRAWS, d)."""
    keys = rng.fold(rng.key(7), torch.arange(DRAWS))
    one = lambda key: passed(transforms, x, key).send["z"]["x"]  # noqa: E731
    return torch.func.vmap(one, randomness="error")(keys)


def of(y: Tensor, x: Tensor) -> Tensor:
    """The mean of |y - x|^2 over draws, as a share of |x|^2."""
    return (y - x).square().sum(-1).mean() / x.square().sum()


D = len(SPIKY)
L1, TOP, L2 = float(SPIKY.abs().sum()), float(SPIKY.abs().max()), float(SPIKY.square().sum())
UNBIASED = {
    "random_k": ([{"name": "random_k", "share": 0.25}], (D / 8 - 1, "exact")),  # 8 of 29: rounded up
    "qsgd, many": ([{"name": "qsgd", "levels": 8}], (D / 64, "bound")),
    "qsgd, one": ([{"name": "qsgd", "levels": 1}], (math.sqrt(D), "bound")),
    "qsgd, max": ([{"name": "qsgd", "levels": 1, "norm": "max"}], (TOP * L1 / L2 - 1, "exact")),
    "ternary": (["ternary"], (TOP * L1 / L2 - 1, "exact")),
    "uniform": ([{"name": "uniform", "levels": 5}], (D / (2 * 4**2), "bound")),
    "rotated": (["rotation", {"name": "uniform", "levels": 5}], ((2 * math.log(32) + 2) / 4**2, "bound")),
}


@pytest.mark.parametrize("case", UNBIASED)
def test_the_mean_is_right_and_the_error_within_its_papers_bound(case):
    names, (constant, kind) = UNBIASED[case]
    y = drawn(made(*names), SPIKY)
    error = of(y, SPIKY)
    assert 0 < error < constant * 1.05
    if kind == "exact":
        assert error == pytest.approx(constant, rel=0.05)
    # A mean of so many draws is off by the root of error / DRAWS; a factor of 2 in the root is far from chance over 29 numbers.
    assert of(y.mean(0, keepdim=True), SPIKY) < 4 * error / DRAWS


def test_a_rotation_loses_nothing_and_makes_the_range_small():
    assert torch.allclose(drawn(made("rotation"), SPIKY)[:3], SPIKY, atol=1e-12)
    spike = torch.zeros(500).double()
    spike[17] = 1.0
    spike[18:] = 1e-3
    plain, turned = (of(drawn(made(*n, "uniform"), spike), spike) for n in ([], ["rotation"]))
    assert turned < plain / 3


def test_the_hadamard_transform_is_the_matrix():
    h = torch.ones(1, 1).double()
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)]) / math.sqrt(2)
    x = torch.randn(16, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(hadamard(x), h @ x, atol=1e-12)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-12)


@given(SEVERAL, st.integers(1, 45))
def test_top_k_keeps_the_largest_and_loses_no_more_than_its_share(x, k):
    y = passed(made({"name": "top_k", "k": k}), x, rng.key(0)).send["z"]["x"]
    kept = min(k, len(x))
    assert (x - y).square().sum() <= (1 - kept / len(x)) * x.square().sum() * (1 + 1e-12)
    assert torch.equal(y.abs().sort().values[-kept:], x.abs().sort().values[-kept:])
    assert int((y != x).sum()) <= len(x) - kept
    assert bool(((y == x) | (y == 0)).all())


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30).map(torch.tensor), st.integers(1, 30))
def test_of_equally_large_ones_the_first_are_kept_alone_and_among_many(x, k):
    k = min(k, len(x))
    want = torch.argsort(x.abs(), descending=True, stable=True)[:k].sort().values
    assert torch.equal(largest(x.abs().double(), k), want)
    many = torch.func.vmap(lambda v: largest(v, k))(torch.stack([x.abs(), x.abs()]).double())
    assert torch.equal(many, torch.stack([want, want]))


@given(SEVERAL)
def test_sign_loses_what_its_paper_says(x):
    y = passed(made("sign"), x, rng.key(0)).send["z"]["x"]
    assert float((x - y).square().sum()) == pytest.approx(
        float(x.square().sum() - x.abs().sum() ** 2 / len(x)), rel=1e-9, abs=1e-9
    )


@given(st.lists(st.floats(2.0**-14, 60000, width=32), min_size=1, max_size=20))
def test_half_precision_is_off_by_half_a_unit_at_most(numbers):
    x = torch.tensor(numbers)
    for name, unit in (("fp16", 2**-11), ("bf16", 2**-8)):
        y = passed(made(name), x, rng.key(0)).send["z"]["x"]
        assert bool(((x - y).abs() <= unit * x.abs()).all())


def spectrum(*values: float) -> Tensor:
    """A convolution's weight (8, 3, 4) with these singular values as a matrix (8, 12)."""
    gen = torch.Generator().manual_seed(4)
    u, v = (torch.linalg.qr(torch.randn(n, len(values), generator=gen).double()).Q for n in (8, 12))
    return (u * torch.tensor(values).double() @ v.T).reshape(8, 3, 4)


def test_a_product_of_thin_matrices_is_a_projection_within_the_bound_of_its_best():
    values = (9.0, 5.0, 3.0, 1.0, 0.5, 0.2)
    x, tail = spectrum(*values), lambda k: sum(s * s for s in values[k:])
    y = drawn(made({"name": "low_rank", "rank": 4, "iterations": 1}), x).flatten(1)
    lost = (x.flatten() - y).square().sum(1)
    assert torch.allclose(lost, x.square().sum() - y.square().sum(1))
    assert bool((lost >= tail(4) * (1 - 1e-9)).all())
    # Halko, Martinsson & Tropp 2011, Theorem 10.5
    assert lost.mean() <= min((1 + k / (4 - k - 1)) * tail(k) for k in range(3))
    ranks = torch.linalg.matrix_rank(y[:50].reshape(-1, 8, 12), rtol=1e-9)
    assert ranks.tolist() == [4] * 50
    more = drawn(made({"name": "low_rank", "rank": 4, "iterations": 3}), x).flatten(1)
    assert (x.flatten() - more).square().sum(1).mean() < tail(4) * 1.1 < lost.mean()
    m, q = x.reshape(8, 12), normals(rng.fold(rng.key(5), "z", "x"), (12, 4)).double()
    for iterations, seen in ((1, m @ q), (2, m @ m.T @ m @ q)):
        (t,) = made({"name": "low_rank", "rank": 4, "iterations": iterations})
        found = t.encode({"z": {"x": x}}, rng.key(5), {}).decode({})["z"]["x"]
        assert torch.allclose(found.reshape(8, 12), seen @ torch.linalg.pinv(seen) @ m, atol=1e-9)
    exact = drawn(made({"name": "low_rank", "rank": 2}), spectrum(4.0, 2.0))
    assert torch.allclose(exact[:9], spectrum(4.0, 2.0), atol=1e-12)


def test_random_k_without_scaling_contracts_by_its_share():
    y = drawn(made({"name": "random_k", "k": 8, "error_feedback": True}), SPIKY)
    assert of(y, SPIKY) == pytest.approx(1 - 8 / D, rel=0.05)
    assert bool(((y == 0) | (y == SPIKY)).all())
    assert torch.equal((y != 0).sum(1), torch.full((DRAWS,), 8))
    plain = drawn(made({"name": "random_k", "k": 8, "unbiased": False}), SPIKY)
    assert torch.equal(plain, y)


SHAPES = {"x": {"w": (20, 10), "v": (20,)}}  # 220 floats
COUNTS = {  # numbers, bits
    "top_k": ([{"name": "top_k", "share": 0.01}], 3, 3 * 32 + 3 * 8),  # of 220, three places of 8 bits
    "top_k, a map": ([{"name": "top_k", "k": 110}], 110, 110 * 32 + 220),  # a bit a float is less than 110 places
    "random_k": ([{"name": "random_k", "k": 5}], 5, 5 * 32 + 64),
    "qsgd": ([{"name": "qsgd", "levels": 7}], 221, 220 * (1 + 3) + 32),
    "qsgd, by leaf": ([{"name": "qsgd", "levels": 8, "by": "leaf"}], 222, 220 * (1 + 4) + 2 * 32),
    "ternary": (["ternary"], 222, 8 * 40 + 8 * 4 + 2 * 32),  # 200 and 20, five a byte
    "uniform": ([{"name": "uniform", "levels": 16}], 222, 220 * 4 + 2 * 32),
    "sign": (["sign"], 221, 220 + 32),
    "rotated": (["rotation", {"name": "uniform", "levels": 2}], 258, 256 + 2 * 32 + 64),
    "rotation": (["rotation"], 256, 256 * 32 + 64),
    "low_rank": ([{"name": "low_rank", "rank": 2}], 80, 80 * 32),  # 2 (20 + 10), and the vector as it is
    "low_rank, no smaller": ([{"name": "low_rank", "rank": 7}], 220, 220 * 32),
    "fp16": (["fp16"], 220, 220 * 16),
    "bf16": (["bf16"], 220, 220 * 16),
    "one after another": ([{"name": "top_k", "k": 5}, {"name": "qsgd", "levels": 3}], 6, 5 * 8 + 5 * 3 + 32),
    "places alone": ([{"name": "top_k", "k": 5}, "fp16"], 5, 5 * 8 + 5 * 16),
}


@pytest.mark.parametrize("case", COUNTS)
def test_what_is_sent_is_counted_to_the_bit(case):
    names, numbers, bits = COUNTS[case]
    gen = torch.Generator().manual_seed(0)
    send = {"z": {"x": {n: torch.randn(s, generator=gen) for n, s in SHAPES["x"].items()}}}
    found = through(made(*names), send, {}, None, rng.key(0))
    assert (found.numbers, found.bits) == (numbers, bits)
    alone = through(made(*names), {**send, "steps": torch.tensor([3, 4])}, {}, None, rng.key(0))
    assert (alone.numbers, alone.bits) == (numbers + 2, bits + 128)  # whole numbers go as they are


def test_a_share_is_rounded_up_and_rounding_errors_are_not():
    (t,) = made({"name": "top_k", "share": 0.1})
    assert [t.kept(d) for d in (1, 9, 10, 11, 30)] == [1, 1, 1, 2, 3]  # 0.1 * 30 is a little more than 3


@pytest.mark.parametrize("name", sorted({*TRANSFORMS} - {"delta"}))
def test_nothing_stays_nothing_and_what_is_no_number_stays_none(name):
    t = made(complete(name, 2))
    shape = (6, 6) if name == "low_rank" else (6,)
    assert torch.equal(passed(t, torch.zeros(shape), rng.key(0)).send["z"]["x"], torch.zeros(shape))
    for bad in (torch.nan, torch.inf):
        x = torch.ones(shape)
        x[5] = bad
        assert not passed(t, x, rng.key(0)).send["z"]["x"].isfinite().all()


@pytest.mark.parametrize("name", ["qsgd", "ternary", "uniform", "rotation", {"name": "random_k", "k": 3}])
def test_slots_and_leaves_draw_apart(name):
    x = torch.linspace(0.1, 1.0, 12).double()
    leaves = {"name": name, "by": "leaf"} if name in ("qsgd", "uniform") else name
    found = through(made(leaves), {"a": {"x": x, "y": x}, "b": {"x": x, "y": x}}, {}, None, rng.key(3)).send
    if name != "rotation":
        assert not torch.equal(found["a"]["x"], found["b"]["x"])
        assert not torch.equal(found["a"]["x"], found["a"]["y"])
    else:
        turned = made(name)[0].encode({"a": {"x": x}, "b": {"x": x}}, rng.key(3), {}).residual
        assert not torch.equal(turned["a"][""], turned["b"][""])


def test_a_model_is_sent_as_what_it_has_moved_and_its_buffers_as_they_are():
    at = {"x": {"w": torch.tensor([1.0, 2.0, 3.0])}, "b": {"mean": torch.tensor([4.0, 5.0]), "seen": torch.tensor(6)}}
    now = {"x": {"w": torch.tensor([1.5, 2.1, 2.0])}, "b": {"mean": torch.tensor([7.0, 7.5]), "seen": torch.tensor(8)}}
    found = through(made({"name": "top_k", "k": 1}), {"z": now}, {"z": at, "lr": 0.1}, None, rng.key(0))
    assert found.send["z"]["x"]["w"].tolist() == [
        1.0,
        2.0,
        2.0,
    ]  # the last has moved the furthest, though it is not the largest
    assert torch.equal(found.send["z"]["b"]["mean"], now["b"]["mean"])
    assert int(found.send["z"]["b"]["seen"]) == 8
    assert (found.numbers, found.bits) == (1 + 3, 32 + 2 + 2 * 32 + 64)
    as_it_is = through(made({"name": "top_k", "k": 1}), {"d": now}, {"z": at}, None, rng.key(0))
    assert as_it_is.send["d"]["x"]["w"].tolist() == [0.0, pytest.approx(2.1), 0.0]


FED = {
    "top_k": [{"name": "top_k", "k": 2, "error_feedback": True}],
    "random_k": [{"name": "random_k", "k": 2, "error_feedback": True}],
    "sign": [{"name": "sign", "error_feedback": True}],
    "fp16": [{"name": "fp16", "error_feedback": True}],
    "quantised, too": [{"name": "top_k", "k": 4, "error_feedback": True}, {"name": "qsgd", "levels": 4}],
}


@pytest.mark.parametrize("case", FED)
def test_with_feedback_all_arrives_but_for_what_is_still_owed(case):
    t, gen = made(*FED[case]), torch.Generator().manual_seed(2)
    send = {"z": {"x": torch.zeros(8).double()}}
    memory, came, gone = nothing_owed(t, send), torch.zeros(8).double(), torch.zeros(8).double()
    assert torch.equal(memory["0"]["z"]["x"], came)
    for r in range(30):
        x = torch.randn(8, generator=gen).double() + 1.0
        found = passed(t, x, rng.fold(rng.key(1), r), memory)
        came, gone, memory = came + found.send["z"]["x"], gone + x, found.memory
    owed = memory["0"]["z"]["x"]
    assert torch.allclose(came + owed, gone, atol=1e-9)
    assert 0 < float(owed.norm()) < 0.5 * 30 * math.sqrt(8)  # what was forgotten would be more
