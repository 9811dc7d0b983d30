"""CelebA from files of the published layout, made here."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from fedfleet.datasets.celeba import KEPT, load_celeba
from fedfleet.datasets.files import DataError
from fedfleet.datasets.published import Published
from fedfleet.datasets.registry import load
from tests.datasets import layouts
from tests.refusals import all_say, tells

PEOPLE = [30, 7, 30, 12, 7, 7, 99]
PARTS = [0, 0, 1, 0, 2, 0, 2]
GREY = [10, 60, 110, 160, 210, 250, 30]


@pytest.fixture
def folder(tmp_path) -> Path:
    return layouts.small_celeba(tmp_path, PEOPLE, PARTS, GREY)


def test_photographs_are_scaled_cropped_and_split(folder):
    data = load("celeba", folder)
    assert (data.train.x.shape, data.test.x.shape, data.train.x.dtype) == ((4, 3, 64, 64), (2, 3, 64, 64), torch.uint8)
    # people 7, 12, 30, 99 are 0 to 3; the validation part is left out
    assert (data.train.y.tolist(), data.test.y.tolist(), data.train.classes) == ([2, 0, 1, 0], [0, 3], 4)
    for image, grey in zip([*data.train.x, *data.test.x], [10, 60, 160, 250, 210, 30], strict=True):
        assert (image[:, 2:].float() - grey).abs().max() < 12  # 178 x 218 becomes 64 x 78, and 7 rows go at each end


def test_an_archive_is_read_as_the_folder_is(folder):
    unpacked = load_celeba(folder)
    root = folder / "celeba"
    (root / KEPT).unlink()
    with zipfile.ZipFile(root / "img_align_celeba.zip", "w") as archive:
        for path in (root / "img_align_celeba").iterdir():
            archive.write(path, f"img_align_celeba/{path.name}")
    shutil.rmtree(root / "img_align_celeba")
    packed = load_celeba(folder)
    assert all(map(torch.equal, (packed.train.x, packed.test.x), (unpacked.train.x, unpacked.test.x)))


def test_what_was_read_is_kept_as_long_as_it_is_of_these_photographs(folder):
    first = load_celeba(folder)
    shutil.rmtree(folder / "celeba" / "img_align_celeba")
    assert torch.equal(load_celeba(folder).train.x, first.train.x)
    lists = folder / "celeba" / "list_eval_partition.txt"
    lists.write_text(lists.read_text().replace("000003.jpg 1", "000003.jpg 0"))
    tells(lambda: load_celeba(folder), "img_align_celeba.zip is there: fetch the aligned photographs", DataError)


def test_broken_files(subtests, folder, tmp_path_factory):
    def call(row):
        file, text = row
        at = Path(shutil.copytree(folder, tmp_path_factory.mktemp("row") / "at"))
        path = at / "celeba" / file
        path.unlink() if text is None else path.write_text(text)
        load_celeba(at)

    rows = [
        (("identity_CelebA.txt", None), "identity_CelebA.txt is not there: fetch it from https"),
        (("identity_CelebA.txt", "000001.jpg x\n"), "line 1 is '000001.jpg x', not a file name and a number"),
        (("identity_CelebA.txt", "../000001.jpg 1\n"), "line 1 is"),
        (("identity_CelebA.txt", "000001.jpg 1\n"), "000002.jpg is in one of the lists alone"),
        (("list_eval_partition.txt", "".join(f"{i + 1:06}.jpg 3\n" for i in range(7))), "has the line '000001.jpg 3'"),
        (("list_eval_partition.txt", "".join(f"{i + 1:06}.jpg 0\n" for i in range(7))), "no photograph of part 2"),
        (("img_align_celeba/000002.jpg", "no image"), "000002.jpg: is no image"),
        (("img_align_celeba/000002.jpg", None), "000002.jpg: is not there"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


BLOND, MALE = [1, 0, 0, 1, 1, 0, 0], [1, 0, 1, 0, 0, 1, 1]


@pytest.fixture
def with_attributes(folder) -> Path:
    return layouts.with_attributes(folder, BLOND, MALE)


def test_groups_are_of_hair_and_sex_and_so_may_the_sexes_be(with_attributes):
    data = load("celeba_blond", with_attributes)
    assert (data.train.y.tolist(), data.test.y.tolist(), data.train.classes) == ([1, 0, 1, 0], [1, 0], 2)
    assert data.domains == ("not_blond_female", "not_blond_male", "blond_female", "blond_male")
    assert (data.train.domain.tolist(), data.test.domain.tolist()) == ([3, 0, 2, 1], [2, 1])
    people = load("celeba", with_attributes)
    assert all(map(torch.equal, (data.train.x, data.test.x), (people.train.x, people.test.x)))
    by_sex = load("celeba_blond", with_attributes, Published(domain="Male"))
    assert by_sex.domains == ("female", "male")
    assert (by_sex.train.domain.tolist(), by_sex.test.domain.tolist()) == ([1, 0, 0, 1], [0, 1])


def test_broken_attributes(subtests, with_attributes):
    text = (with_attributes / "celeba" / "list_attr_celeba.txt").read_text()

    def call(change):
        path = with_attributes / "celeba" / "list_attr_celeba.txt"
        path.write_text(text)
        path.unlink() if change is None else path.write_text(text.replace(*change))
        load("celeba_blond", with_attributes)

    rows = [
        (None, "list_attr_celeba.txt is not there: fetch it from https"),
        (("Blond_Hair", "Blonde"), "names no attribute Blond_Hair in its second line"),
        (("000002.jpg   1 -1", "000002.jpg   1 0"), "line 4 is not a file name and 4 times 1 or -1"),
        (("000002.jpg   1 ", "000002.jpg  "), "line 4 is not"),
        (("000002.jpg", "000009.jpg"), "000002.jpg is in one of the lists alone"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)
