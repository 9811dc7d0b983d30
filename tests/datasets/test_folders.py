"""Images in folders of domains and classes, of the published layouts, made here."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedfleet.config import schema
from fedfleet.datasets import folders
from fedfleet.datasets.files import DataError
from fedfleet.datasets.published import Photographs
from fedfleet.datasets.registry import load
from tests.refusals import all_say, tells

CLASSES = ["back_pack", "bike", "mug"]
SIZES = folders.SETS


@pytest.fixture(autouse=True)
def few_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "SETS", {name: of._replace(classes=3) for name, of in SIZES.items()})


def write(root: Path, domains: dict[str, int], below: str = "", suffix: str = ".jpg") -> Path:
    """So many photographs of each class in every domain, of one colour each, which tells the domain and the class."""
    for k, (domain, count) in enumerate(domains.items()):
        for label, name in enumerate(CLASSES):
            folder = root / domain / below / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (50 + k, 30), (60 * k, 100 * label, 10 * i)).save(
                    folder / f"frame_{i:04}{suffix}", quality=95
                )
    return root.parent


def test_office31(tmp_path: Path):
    folder = write(tmp_path / "office31", {"webcam": 1, "amazon": 3, "dslr": 2}, "images")
    data = load("office31", folder, Photographs(side=20))
    assert (data.domains, data.train.x.shape) == (("amazon", "dslr", "webcam"), (18, 3, 20, 20))
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 1, 1, 2, 2, 0, 1, 2]
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
    assert (data.domains, data.train.y.tolist()) == (("caltech", "dslr"), [0, 1, 2, 0, 1, 2])
    assert (data.train.x[:, 0, 4, 4].long() - torch.tensor([0, 0, 0, 120, 120, 120])).abs().max() < 6


def test_what_was_resized_is_kept_until_a_photograph_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write(tmp_path / "office31", {"webcam": 1, "amazon": 1, "dslr": 1}, "images")
    options = Photographs(side=8)
    first = load("office31", folder, options).train.x.clone()
    resized = folders._resized
    monkeypatch.setattr(folders, "_resized", None)
    assert torch.equal(load("office31", folder, options).train.x, first)
    monkeypatch.setattr(folders, "_resized", resized)
    path = folder / "office31" / "amazon" / "images" / "mug" / "frame_0000.jpg"
    before = path.stat()
    Image.new("RGB", (50, 30), (250, 250, 250)).save(path)
    path.write_bytes(path.read_bytes().ljust(before.st_size, b"\0"))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert load("office31", folder, options).train.x[2].min() > 240


def test_a_damaged_office(subtests, tmp_path_factory):
    def call(damage):
        tmp_path = tmp_path_factory.mktemp("row")
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
            elif damage in ("link", "loop"):
                image.symlink_to("frame_0000.jpg" if damage == "loop" else "elsewhere.jpg")
        load("office31", folder, Photographs(side=8))

    rows = [
        ("domain", "dslr is not there: fetch it from https://"),
        ("class", "has 2 folders, expected one for each of 3 classes"),
        ("name", "'Mug' is a class of dslr or of amazon, not of both"),
        ("empty", "mug: holds no .jpg or .jpeg or .png"), ("image", "frame_0000.jpg: is no image"),
        ("link", "frame_0000.jpg: cannot be read ("), ("loop", "frame_0000.jpg: cannot be read ("),
    ]  # fmt: skip
    all_say(subtests, call, [(row, f"office31/dslr … {says}") for row, says in rows], DataError)


PUBLISHED = {
    "pacs": (["art_painting", "cartoon", "photo", "sketch"], 7),
    "vlcs": (["Caltech101", "LabelMe", "SUN09", "VOC2007"], 5),
    "office_home": (["Art", "Clipart", "Product", "Real World"], 65),
    "terra_incognita": (["location_38", "location_43", "location_46", "location_100"], 10),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".JPG"])
def test_four_domains(tmp_path: Path, name: str, suffix: str):
    domains, classes = PUBLISHED[name]
    assert SIZES[name].classes == classes
    folder = write(tmp_path / name, {domain: k + 1 for k, domain in enumerate(domains)}, suffix=suffix)
    (folder / name / domains[0] / "mug" / "._frame_0000.jpg").write_text("what an archive may hold besides")
    data = load(name, folder, Photographs(side=8))
    assert data.domains == tuple(domain.lower().replace(" ", "_") for domain in domains)
    assert data.train.domain.bincount().tolist() == [3, 6, 9, 12]
    wanted = torch.stack([60 * data.train.domain, 100 * data.train.y], 1)
    assert (data.train.x[:, :2, 4, 4].long() - wanted).abs().max() < 6
    assert data.test.x is data.train.x
    left_out = load(name, folder, Photographs(side=8, domains=[data.domains[3], data.domains[1]]))
    assert left_out.train.domain.bincount().tolist() == [12, 6]


def test_names_of_domains_may_be_written_otherwise(tmp_path: Path):
    folder = write(tmp_path / "office_home", {"art": 1, "CLIPART": 1, "Product": 1, "Real_World": 1})
    assert load("office_home", folder, Photographs(side=4)).domains == ("art", "clipart", "product", "real_world")


@pytest.mark.parametrize(("name", "root"), [("pacs", "PACS"), ("vlcs", "VLCS"), ("office_home", "OfficeHome")])
def test_names_of_data_sets_may_be_written_otherwise(tmp_path: Path, name: str, root: str):
    folder = write(tmp_path / root, dict.fromkeys(PUBLISHED[name][0], 1))
    assert len(load(name, folder, Photographs(side=4)).train) == 12
    write(tmp_path / name, dict.fromkeys(PUBLISHED[name][0], 2))  # of two it is this one
    assert len(load(name, folder, Photographs(side=4)).train) == 24


def pacs_with_lists(tmp_path: Path) -> Path:
    """PACS with two images of each class, of which the second is for validation in the lists."""
    domains, _ = PUBLISHED["pacs"]
    folder = write(tmp_path / "pacs", dict.fromkeys(domains, 2), suffix=".png")
    for domain in domains:
        for part, of in (("train", [0]), ("crossval", [1]), ("test", [0, 1])):
            lines = [f"{domain}/{c}/frame_{i:04}.png {n}" for i in of for n, c in enumerate(CLASSES, 1)]
            (folder / "pacs" / f"{domain}_{part}_kfold.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_the_lists_of_pacs_say_what_is_learnt_from(tmp_path: Path):
    folder = pacs_with_lists(tmp_path)
    data = load("pacs", folder, Photographs(side=4))
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1, 2] * 4, [0, 0, 1, 1, 2, 2] * 4)
    assert set(data.train.x[:, 2, 0, 0].tolist()) == {0}  # the first of each
    assert data.train.domain.tolist() == [d for d in range(4) for _ in range(3)]
    for path in (folder / "pacs").glob("*.txt"):
        path.unlink()
    assert len(load("pacs", folder, Photographs(side=4)).train) == 24


def test_other_sets_have_no_lists(tmp_path: Path):
    folder = write(tmp_path / "vlcs", dict.fromkeys(PUBLISHED["vlcs"][0], 1))
    (folder / "vlcs" / "SUN09_train_kfold.txt").write_text("no list")
    assert len(load("vlcs", folder, Photographs(side=4)).train) == 12


def test_lists_that_are_not_of_the_images(subtests, tmp_path_factory):
    def call(line):
        tmp_path = tmp_path_factory.mktemp("row")
        folder = pacs_with_lists(tmp_path)
        path = folder / "pacs" / "photo_train_kfold.txt"
        if line is None:
            path.unlink()
        else:
            path.write_bytes(line if isinstance(line, bytes) else f"{line}\n".encode())
        load("pacs", folder, Photographs(side=4))

    rows = [
        (None, "photo_train_kfold.txt is not there, and others of its kind are"),
        ("photo/mug/frame_0000.png 2",
         "photo_train_kfold.txt: line 1 is 'photo/mug/frame_0000.png 2', which is no image"),
        ("photo/mug/frame_0007.png 3", "which is no image that is there and the number of its class; fetch both again"),
        ("sketch/mug/frame_0000.png 3", "line 1 is"), ("../../secret.png 3", "line 1 is"), ("", "line 1 is ''"),
        (b"", "photo_train_kfold.txt: names no image; fetch it again"),
        (b"\xff", "photo_train_kfold.txt: cannot be read"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


def test_the_side_is_configured():
    config = schema.load({"population": {"dataset": {"name": "office31", "side": 300}}})
    assert config.population.dataset.side == 300
    tells(lambda: schema.load({"population": {"dataset": {"name": "mnist", "side": 300}}}), "side", ValueError)
