"""Digits and clothes, turned or coloured: DomainBed's Rotated and Coloured MNIST, and Fashion-MNIST likewise.

I. Gulrajani, D. Lopez-Paz, "In search of lost domain generalization", ICLR 2021, arXiv:2007.01434, `domainbed/datasets.py`;
turned digits: M. Ghifary et al., ICCV 2015; coloured ones: M. Arjovsky et al., "Invariant risk minimization", arXiv:1907.02893.

All 70,000 images, those for training and for testing, in a random order, are dealt to the domains one by one, round and round.

| data set | domains | an image there |
|---|---|---|
| `rotated_*`: 1 x 28 x 28, 10 classes | `rot0`, `rot15` ... `rot75` | is turned by so many degrees, counterclockwise |
| `coloured_*`: 2 x 28 x 28, 2 classes | `plus90`, `plus80`, `minus90` | is in one of two channels, the other is black |

A coloured image has the label 1 if it was below 5, or else 0; then a quarter of all labels, at random, are the other way round.
It is in the channel 1 - label with a probability of 0.1, 0.2 and 0.9 in the three domains, or else in the channel of the label.

There is no split: DomainBed holds out a fifth of each domain for selection, and tests on images of a domain that was left out.
So the test examples are the training examples, as of `folders.py`. Where this departs from DomainBed: one permutation, and
one draw of labels and colours, for good, in place of one a seed; turned pixels are rounded half up from places rounded to
1/256 pixel, in place of Pillow's bilinear ones (bicubic in early versions of DomainBed).
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples, joined
from fedfleet.datasets.resampling import turned
from fedfleet.simulator.arithmetic import rng

DEGREES = (0, 15, 30, 45, 60, 75)
OTHER_CHANNEL = {"plus90": 0.1, "plus80": 0.2, "minus90": 0.9}
"""Domain -> probability of the channel that is not the label's."""
NOISE = 0.25  # of the labels


def load_rotated(folder: Path, *, of: Callable[[Path], Dataset]) -> Dataset:
    """Return the images of a data set shaped as MNIST, turned: uint8 (70,000, 1, 28, 28). Raises DataError."""
    return rotated(of(folder))


def load_coloured(folder: Path, *, of: Callable[[Path], Dataset]) -> Dataset:
    """Return the images of a data set shaped as MNIST, coloured: uint8 (70,000, 2, 28, 28). Raises DataError."""
    return coloured(of(folder))


def rotated(data: Dataset) -> Dataset:
    """Deal all images, grey, of a data set to domains, and turn them."""
    name = f"rotated_{data.name}"
    parts = _dealt(data, name, len(DEGREES))
    result = {
        f"rot{degrees}": Examples(turned(x, degrees), y, data.train.classes)
        for degrees, (x, y) in zip(DEGREES, parts, strict=True)
    }
    return _untested(name, result)


def coloured(data: Dataset) -> Dataset:
    """Deal all images, grey, of a data set to domains, and give them two classes and a colour that goes along with these."""
    name = f"coloured_{data.name}"
    result = {}
    for (domain, other), (x, y) in zip(OTHER_CHANNEL.items(), _dealt(data, name, len(OTHER_CHANNEL)), strict=True):
        flipped, apart = rng.uniform(rng.fold(rng.key(0), name, domain), (2, len(y)), torch.float64)
        label = (y < 5) ^ (flipped < NOISE)
        channel = (label ^ (apart < other)).long()
        images = torch.zeros(len(x), 2, *x.shape[2:], dtype=torch.uint8)
        images[torch.arange(len(x)), channel] = x[:, 0]
        result[domain] = Examples(images, label.long(), 2)
    return _untested(name, result)


def _dealt(data: Dataset, name: str, count: int) -> list[tuple[Tensor, Tensor]]:
    x, y = torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
    order = rng.permutation(rng.fold(rng.key(0), name), len(y))
    return [(x[order[i::count]], y[order[i::count]]) for i in range(count)]


def _untested(name: str, domains: dict[str, Examples]) -> Dataset:
    data = joined(name, {domain: (part, part) for domain, part in domains.items()})
    return Dataset(name, data.train, data.train, data.domains)
