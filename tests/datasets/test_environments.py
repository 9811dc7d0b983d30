"""Rotated and Coloured MNIST: who is dealt where, how far it is turned, what its colour says of its label."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedfleet.datasets import environments
from fedfleet.datasets.examples import Dataset, Examples


def numbered(first: int, count: int) -> Examples:
    """Images of 4 x 4 that are all alike in themselves and tell their number; its last digit is the label."""
    number = torch.arange(first, first + count)
    x = torch.stack([number // 250, number % 250], 1).to(torch.uint8) + 1
    return Examples(x.repeat_interleave(8, 1).view(-1, 1, 4, 4), number % 10, 10)


def number_of(images: Tensor) -> Tensor:
    """Return the numbers of images (n, 1, 4, 4) that are not turned."""
    return (images[:, 0, 0, 0].long() - 1) * 250 + images[:, 0, 3, 3].long() - 1


MADE = Dataset("made", numbered(0, 900), numbered(900, 103))


def test_all_images_are_dealt_one_by_one_and_keep_their_labels():
    data = environments.rotated(MADE)
    assert (data.name, data.domains) == ("rotated_made", ("rot0", "rot15", "rot30", "rot45", "rot60", "rot75"))
    assert data.train.domain.bincount().tolist() == [168, 167, 167, 167, 167, 167]
    assert data.train.y.bincount().tolist() == MADE.train.y.bincount().add(MADE.test.y.bincount()).tolist()
    here = data.train.domain == 0
    number = number_of(data.train.x[here])
    assert len(number.unique()) == 168
    assert torch.equal(number % 10, data.train.y[here])
    assert int(number.max()) > 900  # some of MNIST's test images
    assert not torch.equal(number, number.sort().values)
    again = environments.rotated(MADE)
    assert torch.equal(again.train.x, data.train.x)
    assert data.test is data.train


def test_digits_are_turned_as_pillow_turns_them():
    i = torch.arange(28)
    grey = (128 + 100 * torch.sin(i[:, None] / 5 + 0.2) * torch.cos(i / 4)).to(torch.uint8)
    one = Examples(grey.expand(12, 1, 28, 28).contiguous(), torch.zeros(12, dtype=torch.int64), 10)
    data = environments.rotated(Dataset("made", one, one))
    for k, degrees in enumerate((0, 15, 30, 45, 60, 75)):
        wanted = Image.fromarray(grey.numpy()).rotate(degrees, Image.Resampling.BILINEAR)
        wanted = torch.from_numpy(np.array(wanted)).long()
        found = data.train.x[data.train.domain == k][0, 0].long()
        y, x = torch.meshgrid(i - 13.5, i - 13.5, indexing="ij")
        inside = x.square() + y.square() < 12**2
        assert (found - wanted).abs()[inside].max() <= 2


def test_colours_go_along_with_labels_as_often_as_published():
    many = Dataset("made", numbered(0, 40_000), numbered(40_000, 20_000))
    data = environments.coloured(many)
    assert (data.domains, data.train.x.shape) == (("plus90", "plus80", "minus90"), (60_000, 2, 4, 4))
    assert (data.train.classes, data.train.domain.bincount().tolist()) == (2, [20_000] * 3)
    assert data.test is data.train
    seen = data.train.x.flatten(2).amax(2) > 0
    assert (seen.sum(1) == 1).all()  # each image is in one channel alone
    channel = seen[:, 1].long()
    digit = (data.train.x.amax(1, keepdim=True)[:, 0, 3, 3].long() - 1) % 10
    small = (digit < 5).long()
    for k, apart in enumerate((0.1, 0.2, 0.9)):
        here = data.train.domain == k
        label = data.train.y[here]
        for share, wanted in (
            ((label != small[here]).double().mean(), 0.25),
            ((label != channel[here]).double().mean(), apart),
            # Both draws are on their own.
            ((label != channel[here])[label != small[here]].double().mean(), apart),
        ):
            assert float(share) == pytest.approx(wanted, abs=0.02)


def test_draws_of_one_domain_say_nothing_of_another():
    alike = Examples(torch.ones(30_000, 1, 2, 2, dtype=torch.uint8), torch.zeros(30_000, dtype=torch.int64), 10)
    data = environments.coloured(Dataset("made", alike, alike.rows(torch.arange(0))))
    flipped = [y == 0 for y in data.train.y.split(10_000)]
    apart = [x[:, 0, 0, 0] == y for x, y in zip(data.train.x.split(10_000), data.train.y.split(10_000), strict=True)]
    for draws, share in ((flipped, (0.25, 0.25)), (apart, (0.1, 0.2))):
        assert float((draws[0] & draws[1]).double().mean()) == pytest.approx(share[0] * share[1], abs=0.01)


def test_a_coloured_image_is_the_image():
    data = environments.coloured(MADE)
    number = number_of(data.train.x.amax(1, keepdim=True))
    assert torch.equal(number.sort().values, torch.arange(1003))
