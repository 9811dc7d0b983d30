"""Changes of styles by their definitions: cluster centres, copies of rare classes, who takes on what."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedfleet.simulator.arithmetic import rng
from fedfleet.tasks.styles import Change, balanced, centres, explored, shared, styles, with_room

DRAWS = 4000
KEYS = rng.fold(rng.key(0), torch.arange(DRAWS))
ALL = torch.ones(6) > 0
MAPS = 1 + 2 * rng.normal(rng.key(0), (6, 3, 4, 5), torch.float64)
Y = torch.tensor([2, 0, 2, 2, 1, 2])
ONES = torch.ones(6, dtype=torch.float64)
FOREIGN = torch.stack([torch.arange(6.0), torch.arange(6.0) + 0.5]).double()
ALWAYS = Change(1.0, 1.0, 4, 3.0, 0.4, FOREIGN)


def padded(x: Tensor, more: int, value: float) -> Tensor:
    return torch.cat([x, torch.full((more, *x.shape[1:]), value, dtype=x.dtype)])


LINE = torch.tensor([0.0, 1.0, 3.0, 50.0, 7.0], dtype=torch.float64)[:, None]  # the fourth does not count
COUNTS = torch.tensor([1, 1, 1, 0, 1]) > 0


def lloyd(seeds: tuple[float, ...]) -> tuple[float, ...]:
    real = [0.0, 1.0, 3.0, 7.0]
    of = [min(range(len(seeds)), key=lambda j, p=p: abs(p - seeds[j])) for p in real]
    groups = [[p for p, j in zip(real, of, strict=True) if j == i] for i in range(len(seeds))]
    return tuple(sum(g) / len(g) for g in groups)


@pytest.mark.parametrize("used", [1, 2, 3])
def test_centres_are_of_the_law_of_k_means(used, p_value):
    """Seeds in proportion to the squared distance from those before, then means of the nearest points."""
    real = [0.0, 1.0, 3.0, 7.0]
    wanted: dict[tuple[float, ...], float] = {}
    for seeds in itertools.permutations(real, used):
        p = 0.25
        for j in range(1, used):
            apart = [min((x - s) ** 2 for s in seeds[:j]) for x in real]
            p *= min((seeds[j] - s) ** 2 for s in seeds[:j]) / sum(apart)
        wanted[lloyd(seeds)] = wanted.get(lloyd(seeds), 0.0) + p
    found = vmap(lambda key: centres(key, LINE, COUNTS, torch.tensor(used), 3))(KEYS)[:, :used, 0]
    seen = dict.fromkeys(wanted, 0)
    for row in found.tolist():
        seen[min(wanted, key=lambda w: sum(abs(a - b) for a, b in zip(w, row, strict=True)))] += 1
    assert all(
        min(max(abs(a - b) for a, b in zip(w, row, strict=True)) for w in wanted) < 1e-12 for row in found.tolist()
    )
    if used > 1:
        assert p_value([*seen.values()], [DRAWS * p for p in wanted.values()]) > 1e-3


def test_equal_points_have_one_centre_again_and_again():
    found = centres(rng.key(3), torch.full((5, 2), 4.0), torch.tensor([1, 1, 0, 1, 1]) > 0, torch.tensor(2), 3)
    assert torch.equal(found[:2], torch.full((2, 2), 4.0))


def test_a_batch_of_one_keeps_its_style_and_one_of_none_is_left_alone():
    torch.testing.assert_close(shared(rng.key(1), MAPS[:1], ONES[:1], ALWAYS), MAPS[:1])
    assert shared(rng.key(1), MAPS, 0 * ONES, ALWAYS).isfinite().all()


@pytest.mark.parametrize("n", [5, 6])
def test_half_of_a_batch_takes_on_the_styles_of_another_client(n):
    """Half of the others, in random order, for an odd number one less, those of their clusters."""
    foreign = torch.stack([1e3 + torch.arange(6.0), torch.zeros(6)]).double()
    change, weight = ALWAYS._replace(foreign=foreign), (torch.arange(6) < n).double()
    seen = set()
    for k in range(30):
        with_one = change._replace(foreign=foreign + torch.tensor([[0.0], [1e-9]]))  # a deviation, or it were no style
        found = styles(shared(rng.key(k), MAPS, weight, with_one))[:n]
        foreigners = (found - foreign[0]).abs().amax(1) < 1
        assert int(foreigners.sum()) == n // 2
        seen.add(tuple(foreigners.tolist()))
        assert float(found[~foreigners].abs().max()) < 10
    assert len(seen) > 5


def test_deviations_that_are_drawn_below_zero_are_cut():
    low = torch.tensor([[0.0] * 3 + [-50.0] * 3, [1e-3] * 6], dtype=torch.float64)
    found = shared(rng.key(2), MAPS, ONES, ALWAYS._replace(foreign=low))
    flat = found.flatten(2).var(2).amax(1) < 1e-12
    assert int(flat.sum()) == 3
    assert float(found[flat].abs().max()) < 0.1


def test_styles_are_shared_with_a_probability_and_if_there_are_any():
    change = ALWAYS._replace(share=0.3)
    found = vmap(lambda key: shared(key, MAPS, ONES, change))(KEYS[:1000])
    changed = (found != MAPS).flatten(1).any(1).double().mean()
    assert float(changed) == pytest.approx(0.3, abs=0.05)
    none = ALWAYS._replace(foreign=torch.zeros_like(FOREIGN))
    assert torch.equal(shared(rng.key(1), MAPS, ONES, none), MAPS)


@pytest.mark.parametrize(
    ("copies", "number"), [(1, [0, 1, 0]), (2, [1, 1, 0]), (5, [3, 2, 0]), (6, [3, 3, 0]), (8, None)]
)
def test_copies_even_out_the_classes_that_there_are(copies, number, p_value):
    """Four of class 2, one of 0 and of 1; of class 3 there is none, and of what is padded none counts."""
    y, real = padded(Y, 2, 3), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]) > 0
    of = vmap(lambda key: balanced(key, y, real, 4, copies))(KEYS)
    assert real[of].all()
    dealt = torch.stack([(y[of] == c).sum(1) for c in range(4)], 1)
    after = dealt + torch.tensor([1, 1, 4, 0])
    assert (dealt.sum(1) == copies).all()
    assert (dealt[:, 3] == 0).all()
    if number is None:
        assert ((after[:, :3].amax(1) - after[:, :3].amin(1)) <= 1).all()
        twos = of[y[of] == 2]
        assert p_value(torch.bincount(twos, minlength=6)[[0, 2, 3, 5]].numpy()) > 1e-3
    else:
        assert (dealt[:, :3].sort(1, descending=True).values == torch.tensor(sorted(number, reverse=True))).all()
        assert (dealt[:, 2] == 0).all()
    if copies % 2:
        ones = int((dealt[:, 0] > dealt[:, 1]).sum())
        assert p_value([ones, DRAWS - ones]) > 1e-3


def explore(key: int, weight: Tensor, maps: Tensor, y: Tensor, change: Change = ALWAYS, times: int = 1):
    rows, of = with_room(rng.key(key), maps, y, weight, 4, change.copies)
    for i in range(times):
        rows = explored(rng.fold(rng.key(key), i), rows, of, change)
    return rows, of


@pytest.mark.parametrize("more", [1, 5])
def test_padding_changes_nothing_and_draws_nothing(more):
    weight, maps, y = padded(ONES, more, 0.0), padded(MAPS, more, 1e6), padded(Y, more, 2)
    for k in range(5):
        found = shared(rng.key(k), maps, weight, ALWAYS)
        torch.testing.assert_close(found[:6], shared(rng.key(k), MAPS, ONES, ALWAYS), rtol=1e-12, atol=1e-12)
        for change in (ALWAYS, ALWAYS._replace(explore=0.5)):
            (rows, of), (wanted, same) = (
                explore(k, *given, change, 2) for given in ((weight, maps, y), (ONES, MAPS, Y))
            )
            assert all(map(torch.equal, (of, rows.weight[:10], rows.y[:10]), (same, wanted.weight, wanted.y)))
            assert not rows.weight[10:].any()
            torch.testing.assert_close(rows.maps[:10], wanted.maps, rtol=1e-12, atol=1e-12)


def test_styles_of_copies_lie_beyond_those_of_the_batch():
    """With hardly any mixing, for a share of 0 or 1: each style is of one of the rows, and all of copies are factor away."""
    change = ALWAYS._replace(alpha=1e-3)
    rows, of = explore(4, ONES, MAPS, Y, change)
    before = styles(MAPS)
    beyond = before[of] + 3.0 * (before[of] - before.mean(0))
    pool, found = torch.cat([beyond, before]), rows.maps
    k = MAPS.shape[1]
    for row in found:
        mean = row.mean((1, 2))
        assert float((pool[:, :k] - mean).abs().amax(1).min()) < 1e-4
    assert all(map(torch.equal, (rows.y, rows.weight), (torch.cat([Y[of], Y]), torch.ones(10, dtype=torch.float64))))


def test_copies_count_from_the_first_place_that_is_drawn_on():
    change, seen = ALWAYS._replace(explore=0.5), set()
    for k in range(20):
        rows, of = with_room(rng.key(k), MAPS, Y, ONES, 4, 4)
        history = []
        for i in range(2):
            now = bool(rng.bernoulli(rng.fold(rng.key(k), i, "batch"), 0.5))
            after = explored(rng.fold(rng.key(k), i), rows, of, change)
            assert bool(after.explored) == (bool(rows.explored) or now)
            assert after.weight.tolist() == [float(after.explored)] * 4 + [1.0] * 6
            assert now == (not torch.equal(after.maps[4:], rows.maps[4:]))
            rows = after
            history.append(now)
        seen.add(tuple(history))
    assert len(seen) == 4


def test_nothing_flows_through_what_is_mixed_and_what_normalises_is_differentiated():
    x = MAPS.clone().requires_grad_()
    rows, of = explore(1, ONES, x, Y)
    fixed, _ = explore(1, ONES, MAPS, Y)
    source = torch.cat([x[of], x])
    flat, k = source.flatten(2), MAPS.shape[1]
    normal = (flat - flat.mean(2, keepdim=True)) / (flat.var(2, keepdim=True) + 1e-6).sqrt()
    target = styles(fixed.maps)
    old = styles(torch.cat([MAPS[of], MAPS]))
    scale = torch.sqrt((target[:, k:].square() - 1e-6) / (old[:, k:].square() - 1e-6)) * old[:, k:]
    sign = torch.sign((fixed.maps.flatten(2) * normal.detach()).sum(2) - target[:, :k] * normal.detach().sum(2))
    wanted = (normal * (scale * sign)[..., None]).view(source.shape) + target[:, :k, None, None]
    torch.testing.assert_close(rows.maps, wanted)
    weights = rng.normal(rng.key(2), tuple(rows.maps.shape), torch.float64)
    mine, theirs = (torch.autograd.grad((v * weights).sum(), x)[0] for v in (rows.maps, wanted))
    torch.testing.assert_close(mine, theirs)


def test_without_copies_styles_are_mixed_alone():
    rows, of = explore(1, ONES, MAPS, Y, ALWAYS._replace(copies=0))
    assert (len(of), rows.maps.shape) == (0, MAPS.shape)
    assert torch.equal(rows.weight, ONES)
    assert float((rows.maps - MAPS).abs().max()) > 0.1


def test_a_batch_of_padding_alone_makes_no_copies():
    rows, _ = explore(1, 0 * ONES, MAPS, Y)
    assert not rows.weight.any()
    assert rows.maps.isfinite().all()
