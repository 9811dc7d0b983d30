"""Recipes of images: resampling, blending, drawn lines, printed digits; and the cache of what was made."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont
from torch import Tensor

from fedfleet.datasets import cached_arrays, glyphs
from fedfleet.datasets.blending import blended, package_photographs, patches, silhouettes
from fedfleet.datasets.files import DataError
from fedfleet.datasets.resampling import enlarged, rgb
from fedfleet.datasets.strokes import drawn
from fedfleet.simulator.arithmetic import rng
from tests.refusals import tells

seeds = st.integers(0, 2**31)


def pixels(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# Resampling
@given(seed=seeds, height=st.integers(1, 12), width=st.integers(1, 12), more=st.integers(0, 25))
def test_enlarged_as_pillow_does_to_a_level(seed: int, height: int, width: int, more: int):
    images, side = pixels(seed, 3, 2, height, width), max(height, width) + more
    found = enlarged(images, side)
    assert found.shape == (3, 2, side, side)
    for mine, image in zip(found.flatten(0, 1), images.flatten(0, 1), strict=True):
        wanted = Image.fromarray(image.numpy()).resize((side, side), Image.Resampling.BILINEAR)
        assert (mine.int() - torch.from_numpy(np.array(wanted)).int()).abs().max() <= 1


def test_enlarged_by_hand():
    images = torch.tensor([[[[0, 100], [200, 40]]]], dtype=torch.uint8)
    rows = [[0, 25, 75, 100], [50, 59, 76, 85], [150, 126, 79, 55], [200, 160, 80, 40]]
    assert enlarged(images, 4)[0, 0].tolist() == rows  # 58.75, 76.25, 126.25 and 78.75 are rounded
    assert enlarged(torch.tensor([[[[0, 2]]]], dtype=torch.uint8), 4)[0, 0, 0].tolist() == [0, 1, 2, 2]  # halves go up
    assert torch.equal(enlarged(images, 2), images)
    assert enlarged(images[:0], 4).shape == (0, 1, 4, 4)
    tells(lambda: enlarged(images, 1), "side is 1: images of", ValueError)


def test_images_are_enlarged_alone():
    images = pixels(1, 5000, 1, 3, 3)  # more than are taken at a time
    assert torch.equal(enlarged(images, 4)[3000:3005], enlarged(images[3000:3005], 4))


def test_grey_images_get_three_equal_channels():
    grey = pixels(2, 4, 1, 5, 6)
    assert torch.equal(rgb(grey), torch.cat([grey, grey, grey], 1))
    colour = pixels(2, 4, 3, 5, 6)
    assert torch.equal(rgb(colour), colour)


# Blending
@given(seed=seeds)
def test_every_patch_is_of_a_photograph(seed: int):
    photographs = [pixels(seed, 3, 6, 9), pixels(seed + 1, 3, 5, 5)]
    found = patches(photographs, rng.key(seed), 20, 4)
    every = {
        p[:, i : i + 4, j : j + 4].numpy().tobytes()
        for p in photographs
        for i in range(p.shape[1] - 3)
        for j in range(p.shape[2] - 3)
    }
    assert {patch.numpy().tobytes() for patch in found} <= every
    assert torch.equal(found, patches(photographs, rng.key(seed), 20, 4))


def test_patches_are_drawn_uniformly():
    photographs = [torch.arange(12).to(torch.uint8).view(1, 3, 4).expand(3, 3, 4) + 100 * k for k in range(2)]
    corners = patches(photographs, rng.key(0), 24_000, 2)[:, 0, 0, 0]
    counts = corners.bincount(minlength=112)
    places = [100 * k + 4 * i + j for k in range(2) for i in range(2) for j in range(3)]
    assert counts.sum() == counts[places].sum()
    assert (counts[places] - 2000).abs().max() < 5 * math.sqrt(2000)
    tells(lambda: patches(photographs, rng.key(0), 1, 4), "a photograph of (3, 4) holds no patch of 4 x 4", ValueError)


@given(seed=seeds)
def test_blended_is_the_absolute_difference(seed: int):
    digit, patch = pixels(seed, 3, 1, 4, 4), pixels(seed + 1, 3, 3, 4, 4)
    found = blended(digit, patch)
    assert torch.equal(found.int(), (patch.int() - digit.int()).abs())
    assert torch.equal(blended(torch.zeros_like(digit), patch), patch)
    assert torch.equal(blended(torch.full_like(digit, 255), patch), 255 - patch)


def test_silhouettes_are_black_and_white():
    assert silhouettes(torch.tensor([0, 1, 128, 255], dtype=torch.uint8)).tolist() == [0, 255, 255, 255]


def test_the_photographs_are_colour_images():
    for image in package_photographs():
        assert (image.shape, image.dtype) == ((3, 427, 640), torch.uint8)
        assert image.double().std() > 30
        assert not torch.equal(image[0], image[2])


# Lines
def test_a_line_is_as_wide_as_asked_for_and_fades_over_a_pixel():
    (image,) = drawn(torch.tensor([[[-5.0, 4.0], [20.0, 4.0]]], dtype=torch.float64), 8, 2.5)[0]
    assert image[:, 3].tolist() == [0, 0, 64, 255, 255, 64, 0, 0]  # a quarter of a pixel sticks out at either side
    assert image.unique(dim=1).shape[1] == 1


def test_a_resting_pen_draws_a_dot_and_y_points_downwards():
    (image,) = drawn(torch.tensor([[[1.5, 5.5], [1.5, 5.5]]], dtype=torch.float64), 8, 1.0)[0]
    assert (image.nonzero().tolist(), image[5, 1]) == ([[5, 1]], 255)


@given(seed=seeds, turn=st.integers(0, 3))
def test_lines_turn_with_their_points(seed: int, turn: int):
    points = torch.rand(3, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 16
    turned = points
    for _ in range(turn):  # counterclockwise, where y points downwards
        turned = torch.stack([turned[..., 1], 16 - turned[..., 0]], -1)
    assert torch.equal(drawn(turned, 16, 2.0), drawn(points, 16, 2.0).rot90(turn, (2, 3)))
    assert torch.equal(drawn(points.flip(1), 16, 2.0), drawn(points, 16, 2.0))


# Printed digits
def test_printed_digits_are_their_labels_in_every_face():
    """The shapes of one digit, over all faces, are nearer to its own mean than those of others are."""
    middle = (16.0, 16.0)
    shapes = torch.stack(
        [
            torch.from_numpy(np.array(glyphs.shape(str(d), ImageFont.truetype(face, 26), 0.0, middle, 1.0, 32)).copy())
            for face in glyphs.package_faces()
            for d in range(10)
        ]
    ).double()
    shapes = shapes.view(len(glyphs.FACES), 10, -1)
    distance = (shapes[:, :, None] - shapes.mean(0)).square().sum(-1)
    assert (distance.argmin(-1) == torch.arange(10)).double().mean() > 0.9
    assert (shapes.view(-1, 32, 32)[:, [0, 1, -2, -1]] == 0).all()  # none is cut off


def test_shapes_turn_counterclockwise_and_move():
    font = ImageFont.truetype(glyphs.package_faces()[0], 26)

    def ink(turn: float, place: tuple[float, float]) -> Tensor:
        return torch.from_numpy(np.array(glyphs.shape("1", font, turn, place, 0.0, 32)).copy()).double()

    def middle(image: Tensor) -> tuple[float, float]:
        down, right = (torch.arange(n).double() + 0.5 for n in image.shape)
        return float((image.sum(0) * right).sum() / image.sum()), float((image.sum(1) * down).sum() / image.sum())

    upright = ink(0.0, (16.0, 16.0))
    assert middle(upright) == pytest.approx((16, 16), abs=1.5)
    x, y = middle(upright)
    assert middle(ink(0.0, (18.0, 13.0))) == pytest.approx((x + 2, y - 3), abs=0.2)
    assert middle(ink(15.0, (16.0, 16.0))[:14])[0] < middle(upright[:14])[0] - 1  # its upper end goes to the left


def test_printed_digits_are_a_function_of_the_key_and_differ():
    y, faces = torch.tensor([0, 1, 1, 9]), glyphs.package_faces()
    found = glyphs.rendered(y, faces, rng.key(3), 32)
    assert (found.shape, found.dtype) == ((4, 3, 32, 32), torch.uint8)
    assert torch.equal(found, glyphs.rendered(y, faces, rng.key(3), 32))
    assert not torch.equal(found[1], found[2])
    assert not torch.equal(found, glyphs.rendered(y, faces, rng.key(4), 32))


@given(seed=seeds)
def test_colours_are_apart(seed: int):
    ink, paper = glyphs.colours(rng.key(seed), 50)
    assert ((ink - paper).sum(1).abs() >= 3 * glyphs.CONTRAST).all()
    assert min(int(ink.min()), int(paper.min())) >= 0
    assert max(int(ink.max()), int(paper.max())) <= 255


@given(seed=seeds)
def test_ink_covers_paper(seed: int):
    ink, paper = pixels(seed, 2, 3).long(), pixels(seed + 1, 2, 3).long()
    shapes = torch.tensor([0, 255, 127], dtype=torch.uint8).expand(2, 1, 1, 3)
    found = glyphs.over(shapes, ink, paper)[:, :, 0].long()
    assert all(map(torch.equal, (found[..., 0], found[..., 1]), (paper, ink)))
    assert torch.equal(found[..., 2], torch.floor((127 * ink + 128 * paper) / 255 + 0.5).long())


def test_noise_is_uniform_and_of_different_strength():
    grey = torch.full((400, 3, 8, 8), 128, dtype=torch.uint8)
    noise = glyphs.noisy(grey, rng.key(1)).int() - 128
    strongest = noise.abs().flatten(1).max(1).values
    assert (strongest.min(), strongest.max()) == (0, glyphs.NOISE)
    assert noise.double().mean().abs() < 0.1
    white = glyphs.noisy(torch.full_like(grey, 255), rng.key(1))
    assert torch.equal(white.int() - 255, noise.clamp(max=0))


# The cache
@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedfleet" / "made"


def test_what_was_made_is_kept_until_what_it_is_of_changes(cache: Path, capsys: pytest.CaptureFixture[str]):
    calls = []

    def make() -> dict[str, Tensor]:
        calls.append(1)
        return {"x": torch.arange(len(calls))}

    first = cached_arrays.kept("a", {"code": "1", "file": "2"}, make)
    assert "fedfleet: making a, once, to keep it as " in capsys.readouterr().err
    again = cached_arrays.kept("a", {"file": "2", "code": "1"}, make)
    assert len(calls) == 1
    assert torch.equal(first["x"], again["x"])
    assert not capsys.readouterr().err
    (file,) = cache.iterdir()  # and nothing beside it
    cached_arrays.kept("a", {"code": "1", "file": "3"}, make)
    cached_arrays.kept("b", {"code": "1", "file": "2"}, make)
    assert len(calls) == 3
    file.write_bytes(file.read_bytes()[:-3])
    assert len(cached_arrays.kept("a", {"code": "1", "file": "2"}, make)["x"]) == 4
    assert len(cached_arrays.kept("a", {"code": "1", "file": "2"}, make)["x"]) == 4


def test_what_cannot_be_kept_is_made_again(cache: Path):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder should be")
    for _ in range(2):
        assert cached_arrays.kept("a", {}, lambda: {"x": torch.ones(2)})["x"].sum() == 2


def test_nothing_is_kept_of_what_fails(cache: Path):
    with pytest.raises(ZeroDivisionError):
        cached_arrays.kept("a", {}, lambda: {"x": torch.ones(1 // 0)})
    assert not cache.exists()


def test_digests_follow_files_and_code(tmp_path: Path):
    path = tmp_path / "a"
    tells(lambda: cached_arrays.digest_of(path, "a site"), "a is not there", DataError)
    tells(lambda: cached_arrays.digest_of(tmp_path, "a site"), "cannot be read", DataError)
    path.write_text("one")
    one = cached_arrays.digest_of(path, "a site")
    path.write_text("two")
    assert cached_arrays.digest_of(path, "a site") != one
    found = cached_arrays.code([glyphs.__name__, cached_arrays.__name__])
    assert found[glyphs.__name__] == cached_arrays.digest_of(Path(str(sys.modules[glyphs.__name__].__file__)), "")
    assert (len(set(found.values())), cached_arrays.versions(["pillow"]).keys()) == (2, {"pillow"})
