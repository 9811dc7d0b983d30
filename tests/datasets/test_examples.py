"""Examples, decoding, digits, and the registry."""

import re
from pathlib import Path

import pytest
import torch

from fedfleet.datasets import folders
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import DataError
from fedfleet.datasets.registry import PUBLISHED, load
from tests.refusals import all_say, tells


def test_examples_refuse_columns_that_disagree(subtests):
    def call(row):
        x, y, domain = row
        Examples(x, y, 10, domain)

    rows = [
        ((torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), None), "x is torch.float64"),
        ((torch.zeros(3), torch.zeros(3, dtype=torch.uint8), None), "y is torch.uint8"),
        ((torch.zeros(3), torch.zeros(2, dtype=torch.int64), None), "y is torch.int64 (2,)"),
        ((torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)), "domain is"),
    ]  # fmt: skip
    all_say(subtests, call, rows, ValueError)


def test_digits(tmp_path: Path):
    digits = load("digits", tmp_path / "absent")
    train, test = digits.train, digits.test
    assert (len(train) + len(test), train.x.shape[1:], train.x.dtype) == (1797, (1, 8, 8), torch.float32)
    assert (train.x.min(), train.x.max()) == (-1, 1)
    for label in range(10):
        held_out, all_ = int((test.y == label).sum()), int((train.y == label).sum() + (test.y == label).sum())
        assert held_out == all_ // 5
    # Published: the first ten rows are the digits 0..9 in order, and the first pixels of the first are 0 0 5 13 9 1.
    assert train.y[:10].tolist() == list(range(10))
    assert ((train.x[0, 0, 0, :6] + 1) * 8).tolist() == [0, 0, 5, 13, 9, 1]
    again = load("digits", tmp_path)
    assert torch.equal(again.test.x, test.x)


def test_digits_test_set_is_the_end_of_each_class():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    threes = pixels[labels == 3]
    digits = load("digits", Path())
    held_out = digits.test.x[digits.test.y == 3].reshape(-1, 64).double()
    torch.testing.assert_close((held_out + 1) * 8, torch.from_numpy(threes[-len(held_out) :]))


def test_fashion_mnist(fashion_mnist: Dataset):
    assert fashion_mnist.name == "fashion_mnist"
    for examples, size in ((fashion_mnist.train, 60_000), (fashion_mnist.test, 10_000)):
        assert (examples.x.shape, examples.x.dtype) == ((size, 1, 28, 28), torch.uint8)
        assert torch.equal(examples.y.bincount(), torch.full((10,), size // 10))
    assert fashion_mnist.train.y[:5].tolist() == [9, 0, 0, 3, 0]  # an ankle boot comes first
    mean = fashion_mnist.train.x.double().mean() / 255
    assert mean == pytest.approx(0.2860, abs=1e-4)  # as widely published for its normalisation


@pytest.mark.parametrize(("wrong", "meant"), [("fashion-mnist", "fashion_mnist"), ("cifar-10", "cifar10")])
def test_unknown_name_gives_the_nearest(wrong: str, meant: str):
    tells(lambda: load(wrong, Path()), f"'{wrong}' … did you mean '{meant}'", DataError)


def test_unknown_name_far_from_all_lists_them():
    with pytest.raises(DataError, match="use one of " + re.escape(", ".join(PUBLISHED))):
        load("zzzzzz", Path())


BY_HAND = {"small_texts", "cornell_ptb", "celeba", "domains_digits", "digit_five", "mnistm", "mnistm_unpaired"}
BY_HAND |= {"celeba_blond", *folders.SETS}
"""Data sets that are not downloaded."""


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith(("digits", "rect4"))])
def test_every_loader_says_what_is_missing(name: str, tmp_path: Path, no_network: list[str]):
    with pytest.raises(DataError, match=r"FEDFLEET_DATA") as caught:
        load(name, tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "data") in str(caught.value)
    assert no_network or name in BY_HAND
    assert not (tmp_path / "data").exists()
