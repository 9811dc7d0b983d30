"""Images in folders of a user's own: clients, domains or classes, and every refusal in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedfleet
from fedfleet.data import DataError, from_image_folder
from tests.refusals import all_say


def image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def cameras(tmp_path: Path) -> Path:
    """Three cameras, of which the last has seen no fox; the red of an image is its camera, the green its class."""
    root = tmp_path / "cameras"
    for c, camera in enumerate(("gate", "hill", "pond")):
        for k, animal in enumerate(("badger", "fox", "owl")):
            for i in range(2 + k):
                if (camera, animal) != ("pond", "fox"):
                    image(root / camera / animal / f"{i}.{'PNG' if i else 'png'}", (10 * c, 100 * k, i))
    (root / "gate" / "fox" / "notes.txt").write_text("no image")
    (root / "gate" / "fox" / ".hidden.png").write_bytes(b"")
    (root / ".cache").mkdir()
    return root


def test_a_folder_a_client(cameras: Path):
    data = from_image_folder(cameras)
    assert (data.name, data.population.size, data.test.classes) == ("cameras", 2, 3)
    x = torch.cat([data.population.data["x"], data.test.x])
    y = torch.cat([data.population.data["y"], data.test.y])
    assert (x.dtype, tuple(x.shape[1:]), len(x)) == (torch.uint8, (3, 4, 5), 9 + 9 + 6)
    assert torch.equal(x[:, 1, 0, 0].long(), 100 * y)
    for client in range(2):
        local = data.population.local_data(torch.tensor([client]))
        assert local.data["x"][local.rows[0], 0, 0, 0].unique().numel() == 1  # one camera


def test_a_folder_a_domain_is_dealt_within_it(cameras: Path):
    data = from_image_folder(cameras, each="domain", test=0.4, side=8)
    assert (data.domains, data.test.domain.bincount().tolist()) == (("gate", "hill", "pond"), [4, 4, 2])
    assert torch.equal(data.train.x[:, 0, 0, 0].long(), 10 * data.train.domain)
    assert data.train.x.shape[1:] == (3, 8, 8)


def test_a_folder_a_class_grey_and_another_folder_to_test_on(cameras: Path):
    data = from_image_folder(cameras / "gate", each="class", channels=1, test=cameras / "pond")
    assert (len(data.train), len(data.test), data.train.x.shape[1:]) == (9, 6, (1, 4, 5))
    assert data.test.y.tolist() == [0, 0, 2, 2, 2, 2]  # classes are numbered as in training
    both = from_image_folder(cameras, test=cameras)
    assert (both.population.size, len(both.test)) == (3, 24)
    named = from_image_folder(cameras, each="domain", test=cameras, name="wild")
    assert (named.name, named.test.domain.bincount().tolist()) == ("wild", [9, 9, 6])


def test_a_run_learns_from_folders(cameras: Path, tmp_path: Path):
    config = {"rounds": 2, "task": {"model": "logistic"}, "algorithm": {"batch_size": 2}, "cohort": {"size": 2}}
    run = fedfleet.run(config, {"executor.kind": "local"}, data=from_image_folder(cameras), out=tmp_path / "run")
    assert 0 <= run.summary["final"]["eval/accuracy"] <= 1


def test_bad_folders_are_refused(subtests, cameras, tmp_path_factory):
    def call(row):
        spoil, given = row
        at = Path(shutil.copytree(cameras, tmp_path_factory.mktemp("row") / "cameras"))
        if spoil is not None:
            spoil(at)
        if given.get("test") == "spoilt":
            image(at.parent / "other" / "zebra" / "0.png", (0, 0, 0))
            given = {**given, "test": at.parent / "other"}
        from_image_folder(at / given.get("path", ""), **{k: v for k, v in given.items() if k != "path"})

    rows = [
        ((None, {"each": "person"}), "each: is 'person': give 'client', 'domain' or 'class'"),
        ((None, {"channels": 4}), "channels: is 4: give 3, or 1 for grey"), ((None, {"side": 0}), "side: is 0"),
        ((None, {"path": "none"}), "there is no such folder: give one with"),
        ((None, {"each": "class"}), "gate: holds no .jpg or .jpeg or .png: give each='client' or 'domain'"),
        ((None, {"path": "gate"}), "badger: holds no folders: give each='class'"),
        ((None, {"path": ".cache"}), ".cache: holds no folders"),
        ((lambda at: (at / "gate" / "yak").mkdir(), {}), "yak: holds no .jpg or .jpeg or .png"),
        ((lambda at: image(at / "hill/9.png", (0, 0, 0)), {}), "9.png: lies beside a folder a class"),
        ((lambda at: image(at / "9.png", (0, 0, 0)), {}), "9.png: lies beside a folder a client"),
        ((lambda at: image(at / "hill/owl/9.png", (0, 0, 0), (7, 6)), {}), "9.png: is of 7 x 6 pixels, and"),
        ((lambda at: image(at / "hill/owl/9.png", (0, 0, 0), (7, 6)), {}), "give side=4, to resize all"),
        ((lambda at: (at / "hill/owl/9.jpg").write_bytes(b"text"), {}), "9.jpg: is no image (cannot identify"),
        ((lambda at: Image.new("P", (5, 4)).save(at / "hill/owl/9.png", "GIF"), {}), "9.png: is no image"),
        ((lambda at: Image.fromarray(np.full((4, 5), 999, np.uint16)).save(at / "hill/owl/9.png"), {}),
         "9.png: has more than 8 bits a pixel: scale it to 8, from 0 to 255"),
        ((None, {"path": "gate", "each": "class", "test": "spoilt"}), "'zebra' is no class of"),
        ((None, {"test": 0.0}), "test: is 0.0: give a share between 0 and 1"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


def test_what_is_no_image_in_name_alone_is_not_opened(cameras: Path):
    np.save(cameras / "gate" / "fox" / "array.npy", np.zeros(3))
    assert len(from_image_folder(cameras, each="domain", test=cameras).train) == 24
