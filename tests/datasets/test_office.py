"""Office-31 and Office-Caltech10 from folders of the published layouts, made here."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedfleet.config import schema
from fedfleet.datasets import office
from fedfleet.datasets.files import DataError
from fedfleet.datasets.published import Photographs
from fedfleet.datasets.registry import load

CLASSES = ["back_pack", "bike", "mug"]


@pytest.fixture(autouse=True)
def few_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(office, "CLASSES", {"office31": 3, "office_caltech10": 3})


def write(root: Path, domains: dict[str, int], below: str = "") -> Path:
    """So many photographs of each class in every domain, of one colour each, which tells the domain and the class."""
    for k, (domain, count) in enumerate(domains.items()):
        for label, name in enumerate(CLASSES):
            folder = root / domain / below / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (50 + k, 30), (60 * k, 100 * label, 10 * i)).save(
                    folder / f"frame_{i:04}.jpg", quality=95
                )
    return root.parent


def test_office31(tmp_path: Path):
    folder = write(tmp_path / "office31", {"webcam": 1, "amazon": 3, "dslr": 2}, "images")
    data = load("office31", folder, Photographs(side=20))
    assert data.domains == ("amazon", "dslr", "webcam")
    assert data.train.x.shape == (18, 3, 20, 20)
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert data.train.domain is not None
    assert data.train.domain.tolist() == [0] * 9 + [1] * 6 + [2] * 3
    wanted = torch.stack([60 * torch.tensor([1, 2, 0])[data.train.domain], 100 * data.train.y], 1)
    assert (data.train.x[:, :2, 10, 10].long() - wanted).abs().max() < 6
    assert (data.train.x[:3, 2, 10, 10].long() - torch.tensor([0, 10, 20])).abs().max() < 6  # by their names
    for column in ("x", "y", "domain"):  # no split is published
        assert torch.equal(getattr(data.test, column), getattr(data.train, column))
    assert load("office31", folder).train.x.shape == (18, 3, 224, 224)


def test_office_caltech10_is_laid_out_without_a_folder_of_images(tmp_path: Path):
    folder = write(tmp_path / "office_caltech10", {"Caltech": 1, "amazon": 1, "dslr": 1, "webcam": 1})
    data = load("office_caltech10", folder, Photographs(side=8, domains=["caltech", "dslr"]))
    assert data.domains == ("caltech", "dslr")
    assert data.train.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.train.x[:, 0, 4, 4].long() - torch.tensor([0, 0, 0, 120, 120, 120])).abs().max() < 6


def test_what_was_resized_is_kept_until_a_photograph_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write(tmp_path / "office31", {"webcam": 1, "amazon": 1, "dslr": 1}, "images")
    options = Photographs(side=8)
    first = load("office31", folder, options).train.x.clone()
    resized = office._resized
    monkeypatch.setattr(office, "_resized", None)
    assert torch.equal(load("office31", folder, options).train.x, first)
    monkeypatch.setattr(office, "_resized", resized)
    path = folder / "office31" / "amazon" / "images" / "mug" / "frame_0000.jpg"
    before = path.stat()
    Image.new("RGB", (50, 30), (250, 250, 250)).save(path)
    path.write_bytes(path.read_bytes().ljust(before.st_size, b"\0"))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert load("office31", folder, options).train.x[2].min() > 240


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("domain", "dslr is not there: fetch it from https://"),
        ("class", "has 2 folders, expected one for each of 3 classes"),
        ("name", "'Mug' is a class of dslr or of amazon, not of both"),
        ("empty", "mug: holds no .jpg"),
        ("image", "frame_0000.jpg: is no image"),
    ],
)
def test_a_damaged_office(tmp_path: Path, damage: str, says: str):
    folder = write(tmp_path / "office31", {"webcam": 1, "amazon": 1, "dslr": 1}, "images")
    dslr = folder / "office31" / "dslr"
    image = dslr / "images" / "mug" / "frame_0000.jpg"
    if damage == "domain":
        dslr.rename(folder / "elsewhere")
    elif damage == "name":
        image.parent.rename(image.parent.with_name("Mug"))
    elif damage == "image":
        image.write_text("no image")
    else:
        image.unlink()
        if damage == "class":
            image.parent.rmdir()
    with pytest.raises(DataError) as e:
        load("office31", folder, Photographs(side=8))
    assert says in str(e.value)
    assert str(folder / "office31" / "dslr") in str(e.value)
    assert "\n" not in str(e.value)


def test_the_side_is_configured():
    config = schema.load({"population": {"dataset": {"name": "office31", "side": 300}}})
    assert schema.options(config, "population.dataset").side == 300
    with pytest.raises(ValueError, match="side"):
        schema.load({"population": {"dataset": {"name": "mnist", "side": 300}}})
