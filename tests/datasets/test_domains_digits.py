"""Five domains of digits: from files made here, and from the real ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.datasets import domains_digits
from fedfleet.datasets.domains_digits import MNIST, OPTICAL, PEN, Source, dealt, pen_domain, table
from fedfleet.datasets.examples import Dataset
from fedfleet.datasets.files import DataError
from fedfleet.datasets.resampling import enlarged
from fedfleet.simulator.arithmetic import rng
from tests.refusals import all_say, tells

SMALL = Source("small.csv", "https://example.org/small", 4, 3, 16)
ROWS = "0, 1, 2, 7\n16,0,0,9\n0,1,1,0\n 5, 5, 5, 5\n"


def write(folder: Path, text: str) -> Path:
    (folder / SMALL.file).write_text(text)
    return folder / SMALL.file


def test_a_table_is_read_in_one_order_whatever_that_of_its_rows(tmp_path: Path):
    numbers, y = table(write(tmp_path, ROWS), SMALL)
    assert (numbers.tolist(), y.tolist()) == ([[0, 1, 1], [0, 1, 2], [5, 5, 5], [16, 0, 0]], [0, 7, 5, 9])
    assert (numbers.dtype, y.dtype) == (torch.uint8, torch.int64)
    other, z = table(write(tmp_path, "\n".join(reversed(ROWS.splitlines()))), SMALL)
    assert all(map(torch.equal, (other, z), (numbers, y)))


def test_a_damaged_table(subtests, tmp_path):
    def call(text):
        path = write(tmp_path, text)
        table(path, SMALL)

    rows = [
        (ROWS + "1,1,1,1\n", "holds (5, 4) of int64, expected 4 rows of 4 whole numbers"),
        (ROWS.replace("9", "9.5"), "of float64, expected"), (ROWS.replace("9", "nine"), "of object, expected"),
        (ROWS.replace("16", "17"), "has numbers outside 0..16, or labels outside 0..9"),
        (ROWS.replace("16", "-1"), "has numbers outside 0..16"), (ROWS.replace("9", "10"), "labels outside 0..9"),
        (ROWS.replace("0,1,1,0", "16,0,0,9"), "has 1 rows more than once"),
        (ROWS.replace("5\n", "5, 5\n"), "cannot be read"), ("", "cannot be read"),
    ]  # fmt: skip
    all_say(subtests, call, [(row, f"small.csv … {SMALL.site} … {says}") for row, says in rows], DataError)


@pytest.mark.parametrize("missing", [MNIST, OPTICAL, PEN])
def test_the_missing_file_is_named_and_where_it_is_published(tmp_path: Path, missing: Source):
    (tmp_path / "digits").mkdir()
    for source in {MNIST, OPTICAL, PEN} - {missing}:
        (tmp_path / "digits" / source.file).write_text("1")
    tells(lambda: domains_digits.load(tmp_path), f"{tmp_path / 'digits' / missing.file} … {missing.site}", DataError)


@given(y=st.lists(st.integers(0, 4), min_size=1, max_size=60).map(torch.tensor), seed=st.integers(0, 99))
def test_dealt_by_class(y: Tensor, seed: int):
    parts = dealt(y, (2, 3), rng.key(seed))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(y)))
    for label in range(5):
        have = int((y == label).sum())
        sizes = [int((y[part] == label).sum()) for part in parts]
        assert sizes == [min(have, 2), min(max(have - 2, 0), 3), max(have - 5, 0)]


def test_pen_paths_stand_upright():
    """A seven: along the top to the right, then down to the left."""
    path = torch.tensor([[0, 100, 50, 100, 100, 100, 80, 75, 60, 50, 40, 25, 30, 10, 20, 0]], dtype=torch.uint8)
    y = torch.arange(10).repeat(210)
    _, test = pen_domain(path.expand(len(y), -1), y, rng.key(0))
    assert test.y.bincount().tolist() == [200] * 10
    image = test.x[0, 0].double() / 255
    width, height = domains_digits.PEN_BOX
    top, left = (32 - height) // 2, (32 - width) // 2
    assert image[top].sum() > width - 1  # the bar of the seven
    assert image[: top - 2].sum() == image[:, : left - 2].sum() == 0
    foot = image[32 - top - 1]
    assert foot[left : left + 6].sum() > 1
    assert foot[left + 8 :].sum() == 0


# The real ones
@pytest.fixture(scope="module")
def data(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    for source in (MNIST, OPTICAL, PEN):
        if not (data_folder / "digits" / source.file).is_file():
            pytest.skip(f"no real digits: {source.file} is not in {data_folder / 'digits'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        made = domains_digits.load(data_folder)
        patch.setattr(domains_digits, "_made", None)  # so the second time it is read
        kept = domains_digits.load(data_folder)
    assert all(map(torch.equal, (made.train.x, made.test.y), (kept.train.x, kept.test.y)))
    return kept


def test_sizes(data: Dataset):
    assert data.domains == ("mnist", "mnistm", "optdigits", "pendigits", "fonts")
    assert data.train.x.shape == (20_815, 3, 32, 32)
    assert data.train.domain.bincount().tolist() == [2_000, 2_000, 3_823, 8_992, 4_000]
    assert data.test.domain.bincount().tolist() == [500, 500, 1_797, 2_000, 1_000]
    for domain in range(5):
        counts = data.test.y[data.test.domain == domain].bincount()
        assert (counts - len(data.test.y[data.test.domain == domain]) / 10).abs().max() < 7


def test_no_image_is_there_twice(data: Dataset):
    images = [x.numpy().tobytes() for part in (data.train, data.test) for x in part.x]
    assert len(set(images)) == len(images)


def test_no_digit_of_a_file_is_in_two_places(data_folder: Path):
    """The rows of MNIST, each told by its number, and those of the pen, go to parts that share none."""
    numbers, y = table(data_folder / "digits" / MNIST.file, MNIST)
    assert len(np.unique(numbers.numpy(), axis=0)) == 5_000
    parts = dealt(y, domains_digits.MNIST_PARTS, rng.key(0))
    assert ([len(part) for part in parts], len(torch.cat(parts).unique())) == ([2_000, 500, 2_000, 500], 5_000)


def test_the_test_part_of_optdigits_is_scikit_learns(data: Dataset):
    from sklearn.datasets import load_digits

    known, labels = load_digits(return_X_y=True)
    levels = torch.from_numpy(np.floor(known * 255 / 16 + 0.5).astype(np.uint8)).view(-1, 1, 8, 8)
    wanted = {(x.numpy().tobytes(), y) for x, y in zip(enlarged(levels, 24), labels.tolist(), strict=True)}
    tests = data.test.domain == 2
    assert data.test.x[tests][..., [0, 1, 2, 3, -4, -3, -2, -1]].sum() == 0
    digits = zip(data.test.x[tests, :1, 4:-4, 4:-4], data.test.y[tests].tolist(), strict=True)
    assert {(x.numpy().tobytes(), y) for x, y in digits} == wanted


def test_an_optdigits_without_scikit_learns_is_refused(data_folder: Path, data: Dataset, tmp_path: Path):
    rows = (data_folder / "digits" / OPTICAL.file).read_text().splitlines()
    rows[-1] = rows[-1].replace("16", "15", 1)
    (tmp_path / OPTICAL.file).write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"has 1796 of the 1797 digits of UCI's test part"):
        domains_digits.optical_domain(tmp_path / OPTICAL.file, rng.key(0))


def test_grey_domains_are_grey_and_others_are_not(data: Dataset):
    coloured = (data.train.x[:, 0] != data.train.x[:, 2]).any(2).any(1)
    shares = [float(coloured[data.train.domain == k].double().mean()) for k in range(5)]
    assert shares[0] == shares[2] == shares[3] == 0
    assert min(shares[1], shares[4]) > 0.99


def test_labels_are_right(data: Dataset):
    """A digit is mostly of the class whose mean image is nearest, within its domain; of shapes where it has colours."""
    for domain, least in ((0, 0.75), (2, 0.85), (3, 0.7)):
        train, test = data.train.domain == domain, data.test.domain == domain
        x, y = data.train.x[train, 0].double().flatten(1), data.train.y[train]
        means = torch.stack([x[y == label].mean(0) for label in range(10)])
        found = torch.cdist(data.test.x[test, 0].double().flatten(1), means).argmin(1)
        assert (found == data.test.y[test]).double().mean() > least
