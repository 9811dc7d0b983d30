import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.noise import normals

pytestmark = pytest.mark.quick

MASK = (1 << 64) - 1
GOLDEN = {
    "0": 2488344525752971010,
    "1, 2": 5372829851938624400,
    "-1": -5982383498344761604,
    "train, 3": 3639969782180024704,
    "-5: client": 4525253697337594417,
}
"""Keys folded from the root key 0 (or -5), as signed integers."""
words = st.integers(0, MASK)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def splitmix64(seed: int, count: int) -> list[int]:
    """The reference generator, on Python's unbounded integers."""
    out = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        out.append(mix(seed))
    return out


def fold(key: int, word: int | str) -> int:
    if isinstance(word, str):
        word = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    word = (word * 0x9E3779B97F4A7C15 + 0xBF58476D1CE4E5B9) & MASK
    return mix(mix((key + 0xD1B54A32D192ED03) & MASK) ^ word)


def unsigned(t: torch.Tensor) -> list[int]:
    return [v & MASK for v in t.flatten().tolist()]


def test_known_answers_of_splitmix64():
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(1234567, 5) == known
    assert unsigned(rng.bits(rng.key(1234567), 5)) == known


@given(words)
def test_bits_are_the_reference_stream_from_any_key(seed):
    assert unsigned(rng.bits(rng.key(seed), (2, 3))) == splitmix64(seed, 6)


def test_known_answers_of_fold():
    root = rng.key(0)
    assert int(rng.fold(root, 0)) == GOLDEN["0"]
    assert int(rng.fold(root, 1, 2)) == GOLDEN["1, 2"]
    assert int(rng.fold(root, -1)) == GOLDEN["-1"]
    assert int(rng.fold(root, "train", 3)) == GOLDEN["train, 3"]
    assert int(rng.fold(rng.key(-5), "client")) == GOLDEN["-5: client"]


@given(words, st.lists(st.one_of(words, st.text(max_size=8)), max_size=4))
def test_fold_is_the_reference_formula_in_order(seed, data):
    expected = seed
    for word in data:
        expected = fold(expected, word)
    assert unsigned(rng.fold(rng.key(seed), *data)) == [expected]


def test_fold_broadcasts_tensors_as_integers_one_by_one():
    k = rng.key(9)
    clients, copies = torch.tensor([4, 10**12, -1]), torch.tensor([0, 1, 0])
    together = rng.fold(k, "phase", clients, copies)
    assert together.tolist() == [
        int(rng.fold(k, "phase", int(c), int(d))) for c, d in zip(clients, copies, strict=True)
    ]
    assert torch.equal(rng.fold(rng.fold(k, "phase", clients), copies), together)


def test_purposes_rounds_and_clients_give_different_streams():
    root = rng.key(3)
    keys = {
        int(rng.fold(root, purpose, t, attempt, client, copy))
        for purpose, t, attempt, client, copy in itertools.product(
            ("client", "invite", "server", "responses"), range(6), range(3), range(12), range(2)
        )
    }
    assert len(keys) == 4 * 6 * 3 * 12 * 2
    first = torch.tensor(sorted(keys))
    assert len(rng.bits(first, 8).unique()) == 8 * len(keys)
    assert int(rng.fold(root, 1, 2)) != int(rng.fold(root, 2, 1))


@pytest.mark.parametrize(
    "draw",
    [
        lambda k: rng.bits(k, (2, 3)),
        lambda k: rng.uniform(k, (5,)),
        lambda k: rng.uniform(k, 3, torch.float64),
        lambda k: rng.normal(k, (2, 2), torch.float64),
        lambda k: rng.bernoulli(k, 0.3, 7),
        lambda k: rng.permutation(k, 6),
        lambda k: rng.fold(k, "step", 3, torch.arange(4)),
    ],
    ids=["bits", "uniform", "uniform64", "normal", "bernoulli", "permutation", "fold"],
)
def test_vmapped_mapped_and_one_by_one_are_equal(draw):
    keys = rng.fold(rng.key(1), torch.arange(5))
    one_by_one = torch.stack([draw(k) for k in keys])
    torch.testing.assert_close(torch.func.vmap(draw)(keys), one_by_one, rtol=1e-12, atol=1e-12)


def test_drawing_for_many_keys_is_drawing_for_each():
    keys = rng.fold(rng.key(1), torch.arange(6)).reshape(2, 3)
    assert rng.bits(keys, (4, 2)).shape == (2, 3, 4, 2)
    assert torch.equal(rng.bits(keys, (4, 2))[1, 2], rng.bits(keys[1, 2], (4, 2)))
    assert torch.equal(rng.permutation(keys, 5)[0, 1], rng.permutation(keys[0, 1], 5))
    assert torch.equal(rng.bits(keys)[0, 1], rng.bits(keys[0, 1], 1)[0])


def test_draws_leave_torch_generator_alone():
    before = torch.get_rng_state()
    rng.normal(rng.key(0), 10)
    rng.sample(rng.key(0), 1000, 10)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 24), (torch.float64, 53)])
def test_uniform_is_the_top_bits_of_the_stream(dtype, width):
    u = rng.uniform(rng.key(11), 100, dtype)
    assert u.dtype == dtype
    assert (u.double() * 2.0**width).tolist() == [b >> (64 - width) for b in splitmix64(11, 100)]


def test_uniform_moments_and_range():
    n = 100_000
    u = rng.uniform(rng.key(5), n).double()
    assert u.min() >= 0
    assert u.max() < 1
    for power in (1, 2, 3, 4):
        mean, spread = 1 / (power + 1), math.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / n)
        assert abs(float((u**power).mean()) - mean) < 4 * spread
    lagged = float(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) * 12
    assert abs(lagged) < 4 / math.sqrt(n)


def test_streams_of_neighbouring_clients_are_uncorrelated():
    keys = rng.fold(rng.key(5), torch.arange(2000))
    u = rng.uniform(keys, 50, torch.float64) - 0.5
    between = float((u[1:] * u[:-1]).mean()) * 12
    assert abs(between) < 4 / math.sqrt(2000 * 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_moments(dtype):
    n = 100_000
    x = rng.normal(rng.key(6), n, dtype)
    assert x.dtype == dtype
    assert torch.isfinite(x).all()
    x = x.double()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - mean) < 4 * math.sqrt(variance / n)
    inside = float((x.abs() < 1).double().mean())
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 4 * math.sqrt(0.25 / n)


def test_many_normals_have_the_moments_too_and_come_in_pairs_of_one_word():
    n = 100_001
    x = normals(rng.fold(rng.key(6), torch.arange(2)), (n,))
    assert x.dtype == torch.float32
    assert 4 < x.abs().max() < 7.5
    first, second = x.double()
    for one in (first, second):
        for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(float((one**power).mean()) - mean) < 4 * math.sqrt(variance / n)
    half = n // 2 + 1
    for a, b in ((first, second), (first[: half - 1], first[half:])):
        for p in (1, 2):  # squares too: those of a pair have a radius in common
            of = torch.stack([a**p, b**p]).corrcoef()[0, 1]
            assert abs(float(of)) < 4 / math.sqrt(len(a))
    assert torch.equal(normals(rng.fold(rng.key(6), 1), (n,)), x[1])
    assert normals(rng.key(6), (3, 5)).shape == (3, 5)
    assert normals(rng.key(6)).shape == ()


def test_bernoulli_rate():
    n = 50_000
    for p in (0.0, 0.1, 0.7, 1.0):
        found = rng.bernoulli(rng.key(8), p, n)
        assert found.dtype == torch.bool
        assert abs(float(found.double().mean()) - p) <= 4 * math.sqrt(p * (1 - p) / n)


@given(words, st.integers(1, 200))
def test_permutation_is_one(seed, n):
    assert rng.permutation(rng.key(seed), n).sort().values.tolist() == list(range(n))


def test_all_orders_of_three_are_alike(p_value):
    orders = rng.permutation(rng.fold(rng.key(2), torch.arange(6000)), 3)
    code = orders @ torch.tensor([9, 3, 1])
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 6
    assert p_value(counts.numpy()) > 1e-3


@given(words, st.integers(1, 300), st.data())
def test_sample_is_distinct_and_in_range(seed, n, data):
    size = data.draw(st.integers(0, n))
    found = rng.sample(rng.key(seed), n, size)
    assert found.dtype == torch.int64
    assert found.shape == (size,)
    assert len(found.unique()) == size
    assert all(0 <= v < n for v in found.tolist())


def test_sample_of_all_is_a_permutation():
    assert rng.sample(rng.key(4), 50, 50).sort().values.tolist() == list(range(50))


def test_sample_from_an_enormous_population_is_cheap_and_spread_out():
    n = 10**12
    found = rng.sample(rng.key(4), n, 10_000)  # anything proportional to n would not fit in memory
    assert len(found.unique()) == 10_000
    assert abs(float(found.double().mean()) / n - 0.5) < 4 / math.sqrt(12 * 10_000)
    assert int(rng.sample(rng.key(4), 2**53, 1000).max()) < 2**53


def test_sample_draws_on_until_it_has_enough_distinct_values(monkeypatch):
    mix = rng._mix
    monkeypatch.setattr(rng, "_mix", lambda x: mix(x) & (-1 << 60))  # 16 values only, so 46 draws often miss a few
    for seed in range(40):
        assert len(rng.sample(torch.tensor(seed), 100, 15).unique()) == 15


def test_a_sample_is_uniform_in_inclusion_and_in_order(p_value):
    n, size, draws = 50, 5, 3000  # below a quarter: drawn with rejection
    found = torch.stack([rng.sample(rng.fold(rng.key(5), i), n, size) for i in range(draws)])
    assert p_value(found[:, 0].bincount(minlength=n).numpy()) > 1e-3
    assert p_value(found[:, -1].bincount(minlength=n).numpy()) > 1e-3
    # Counts without replacement vary less than Poisson ones, so scale the statistic by 1 - size / n.
    counts = found.flatten().bincount(minlength=n).double()
    expected = draws * size / n
    statistic = float(((counts - expected) ** 2).sum() / expected / (1 - size / n) * (n - 1) / n)
    assert 20 < statistic < 95  # chi-square with 49 degrees of freedom: 1e-4 on either side
    rising = float((found[:, 0] < found[:, 1]).double().mean())
    assert abs(rising - 0.5) < 4 * math.sqrt(0.25 / draws)


def test_a_large_sample_is_uniform_in_inclusion(p_value):
    found = torch.stack([rng.sample(rng.fold(rng.key(6), i), 6, 2) for i in range(3000)])  # drawn by permutation
    pairs = (found.sort(1).values @ torch.tensor([6, 1])).unique(return_counts=True)[1]
    assert len(pairs) == 15
    assert p_value(pairs.numpy()) > 1e-3


def test_sample_with_replacement_repeats_and_is_uniform(p_value):
    found = rng.sample(rng.key(7), 10, 5000, replace=True)
    assert p_value(found.bincount(minlength=10).numpy()) > 1e-3
    assert int(rng.sample(rng.key(7), 1, 3, replace=True).sum()) == 0
    assert len(rng.sample(rng.key(7), 3, 40, replace=True)) == 40


def test_sample_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="cannot draw 4 of 3 without replacement"):
        rng.sample(rng.key(0), 3, 4)


def test_a_draw_out_of_the_middle_of_a_stream():
    keys = rng.fold(rng.key(3), torch.arange(50))
    whole = rng.uniform(keys, 20, torch.float64)
    index = torch.arange(50) % 20
    assert torch.equal(rng.uniform_at(keys, index), whole[torch.arange(50), index])
