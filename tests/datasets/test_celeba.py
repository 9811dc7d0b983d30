"""CelebA from files of the published layout, made here."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedfleet.datasets.celeba import KEPT, load_celeba
from fedfleet.datasets.files import DataError
from fedfleet.datasets.registry import load

PEOPLE = [30, 7, 30, 12, 7, 7, 99]
PARTS = [0, 0, 1, 0, 2, 0, 2]
GREY = [10, 60, 110, 160, 210, 250, 30]


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "celeba"
    (root / "img_align_celeba").mkdir(parents=True)
    names = [f"{i + 1:06}.jpg" for i in range(len(PEOPLE))]
    for name, grey in zip(names, GREY, strict=True):
        image = Image.new("RGB", (178, 218), (grey, grey, grey))
        image.paste((255, 0, 0), (0, 0, 178, 20))  # a strip that the crop leaves out
        image.save(root / "img_align_celeba" / name, quality=95)
    for file, column in (("identity_CelebA.txt", PEOPLE), ("list_eval_partition.txt", PARTS)):
        (root / file).write_text("".join(f"{n} {v}\n" for n, v in zip(names, column, strict=True)))
    return tmp_path


def test_photographs_are_scaled_cropped_and_split(folder):
    data = load("celeba", folder)
    assert data.train.x.shape == (4, 3, 64, 64)
    assert data.test.x.shape == (2, 3, 64, 64)
    assert data.train.x.dtype == torch.uint8
    # people 7, 12, 30, 99 are 0 to 3; the validation part is left out
    assert data.train.y.tolist() == [2, 0, 1, 0]
    assert data.test.y.tolist() == [0, 3]
    assert data.train.classes == 4
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
    assert torch.equal(packed.train.x, unpacked.train.x)
    assert torch.equal(packed.test.x, unpacked.test.x)


def test_what_was_read_is_kept_as_long_as_it_is_of_these_photographs(folder):
    first = load_celeba(folder)
    shutil.rmtree(folder / "celeba" / "img_align_celeba")
    assert torch.equal(load_celeba(folder).train.x, first.train.x)
    lists = folder / "celeba" / "list_eval_partition.txt"
    lists.write_text(lists.read_text().replace("000003.jpg 1", "000003.jpg 0"))
    with pytest.raises(DataError, match=r"img_align_celeba\.zip is there: fetch the aligned photographs"):
        load_celeba(folder)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("identity_CelebA.txt", None, "identity_CelebA.txt is not there: fetch it from https"),
        ("identity_CelebA.txt", "000001.jpg x\n", "line 1 is '000001.jpg x', not a file name and a number"),
        ("identity_CelebA.txt", "../000001.jpg 1\n", "line 1 is"),
        ("identity_CelebA.txt", "000001.jpg 1\n", "000002.jpg is in one of the lists alone"),
        ("list_eval_partition.txt", "".join(f"{i + 1:06}.jpg 3\n" for i in range(7)), "has the line '000001.jpg 3'"),
        ("list_eval_partition.txt", "".join(f"{i + 1:06}.jpg 0\n" for i in range(7)), "no photograph of part 2"),
        ("img_align_celeba/000002.jpg", "no image", "000002.jpg: is no image"),
        ("img_align_celeba/000002.jpg", None, "000002.jpg: is not there"),
    ],
)
def test_broken_files(folder, file, text, says):
    path = folder / "celeba" / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DataError, match=says):
        load_celeba(folder)
