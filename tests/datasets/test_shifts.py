"""Shifts: what each does to an image, and that no image is in two domains."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.datasets import shifts
from fedfleet.datasets.blending import package_photographs, patches
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.registry import load
from fedfleet.simulator.arithmetic import rng
from tests.datasets.layouts import small_mnist

images = st.builds(
    lambda seed, channels, height, width: torch.randint(
        0, 256, (2, channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    ),
    st.integers(0, 2**31),
    st.sampled_from([1, 3]),
    st.integers(2, 9),
    st.integers(2, 9),
)


@given(x=images)
def test_every_shift_gives_colour_images_of_the_size_and_leaves_what_it_is_given(x: Tensor):
    before = x.clone()
    for shift in shifts.SHIFTS.values():
        found = shift(x[..., :2, :2], rng.key(0))
        assert (found.shape, found.dtype) == ((2, 3, 2, 2), torch.uint8)
    assert torch.equal(x, before)


@given(x=images)
def test_inverted_twice_is_the_image(x: Tensor):
    assert torch.equal(shifts.inverted(x).long() + x, torch.full_like(shifts.inverted(x), 255).long())
    assert torch.equal(shifts.inverted(shifts.inverted(x)), shifts.SHIFTS["identity"](x, rng.key(0)))


@given(x=images, quarters=st.integers(-4, 4))
def test_quarter_turns_are_exact_and_counterclockwise(x: Tensor, quarters: int):
    side = min(x.shape[2:])
    square = x[:, :, :side, :side]
    assert torch.equal(shifts.rotated(square, 90 * quarters), square.rot90(quarters, (2, 3)).expand(-1, 3, -1, -1))
    half = x.flip(2, 3) if quarters % 2 else x
    assert torch.equal(shifts.rotated(x, 180 * quarters), half.expand(-1, 3, -1, -1))


@given(x=images, degrees=st.integers(-180, 180))
def test_turning_mixes_neighbours_and_black(x: Tensor, degrees: int):
    found = shifts.rotated(x, degrees)
    assert found.max() <= x.max()
    assert torch.equal(shifts.rotated(torch.zeros_like(x), degrees), torch.zeros_like(found))
    flat = shifts.rotated(torch.full((1, 1, 15, 15), 200, dtype=torch.uint8), degrees)
    assert (flat[..., 4:-4, 4:-4] == 200).all()  # what is far from the border stays flat


def test_turned_by_hand():
    x = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    x[0, 0, 1, 2] = 254  # to the right of the middle
    found = shifts.rotated(x, 45)[0, 0]
    assert found.argmax() == 2  # at the upper right
    # cos 45 is 181/256, so that corner comes from 1.414 = 362/256 to the right, which is 106/256 beyond.
    assert found[0, 2] == round(254 * (256 - 106) / 256) == 149


@given(x=images, levels=st.integers(2, 256))
def test_posterised_has_even_levels_near_the_image(x: Tensor, levels: int):
    found = shifts.posterised(x, levels)
    assert set(found.unique().tolist()) <= {k * 255 // (levels - 1) for k in range(levels)}
    if 255 % (levels - 1) == 0:
        assert torch.equal(shifts.posterised(found, levels), found)
    order = x[:, 0].flatten().argsort()
    assert (found[:, 0].flatten()[order].int().diff() >= 0).all()
    assert (found.int() - x.int()).abs().max() <= 256 / levels + 1
    if levels == 256:
        assert torch.equal(found, x.expand_as(found))


@given(x=images)
def test_edges_do_not_depend_on_brightness_or_sign(x: Tensor):
    dark = x // 2
    assert torch.equal(shifts.edges(dark), shifts.edges(dark + 100))
    assert torch.equal(shifts.edges(x), shifts.edges(255 - x))
    assert torch.equal(shifts.edges(x).transpose(2, 3), shifts.edges(x.transpose(2, 3)))
    assert (shifts.edges(torch.full_like(x, 77)) == 0).all()


def test_edges_by_hand():
    x = torch.tensor([0, 0, 0, 100, 100, 100], dtype=torch.uint8).expand(1, 1, 5, 6)
    assert shifts.edges(x)[0, 0].tolist() == [[0, 0, 100, 100, 0, 0]] * 5
    corner = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    corner[0, 0, 0, 0] = 40  # which goes on outside: 40 to the right and down count once at each diagonal
    assert shifts.edges(corner)[0, 0, 1, 1] == int((40**2 + 40**2) ** 0.5 / 4)
    assert shifts.edges(x // 100 * 255).max() == 255  # and not 1,020 / 4 wrapped


def test_blended_takes_patches_of_the_packages_photographs():
    x = torch.randint(0, 256, (6, 1, 10, 10), dtype=torch.uint8)
    found = shifts.SHIFTS["blended"](x, rng.key(5))
    before = patches(package_photographs(), rng.key(5), 6, 10)
    assert torch.equal(found.int(), (before.int() - x.int()).abs())


def numbered(count: int) -> Examples:
    """Images that are all alike in themselves, and tell their number by it."""
    x = torch.arange(count).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    return Examples(x, torch.arange(count) % 7, 7)


def test_each_image_is_in_one_domain():
    given_set = Dataset("made", numbered(103), numbered(50))
    data = shifts.shifted(given_set)
    assert data.name == "made_shifts"
    assert data.domains == ("identity", "inverted", "rotated", "blended", "posterised", "edges")
    assert data.train.domain.bincount().tolist() == [18, 17, 17, 17, 17, 17]
    assert data.test.domain.bincount().tolist() == [9, 9, 8, 8, 8, 8]
    # The middle pixel of the first three domains tells which image it was; its label goes along.
    number = data.train.x[:, 0, 2, 2].long()
    number = torch.where(data.train.domain == 1, 255 - number, number)[data.train.domain < 3]
    assert len(number.unique()) == len(number) == 52
    assert torch.equal(data.train.y[data.train.domain < 3], number % 7)
    assert not torch.equal(number, number.sort().values)
    assert torch.equal(shifts.shifted(given_set).train.x, data.train.x)
    assert sorted(data.train.y.tolist()) == sorted((torch.arange(103) % 7).tolist())


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_published_images_are_shifted_turned_and_coloured(tmp_path: Path, name: str):
    small_mnist(tmp_path, name)
    shifted, turned, coloured = (load(of, tmp_path) for of in (f"{name}_shifts", f"rotated_{name}", f"coloured_{name}"))
    assert (shifted.name, turned.name) == (f"{name}_shifts", f"rotated_{name}")
    assert (shifted.train.x.shape, shifted.test.x.shape) == ((12, 3, 28, 28), (6, 3, 28, 28))
    assert (turned.train.x.shape, turned.train.domain.bincount().tolist()) == ((18, 1, 28, 28), [3] * 6)
    assert (coloured.train.x.shape, coloured.domains) == ((18, 2, 28, 28), ("plus90", "plus80", "minus90"))
