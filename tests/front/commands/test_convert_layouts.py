"""``fedfleet convert`` of other layouts than Parquet."""

from __future__ import annotations

import json

import pytest
from PIL import Image


@pytest.fixture
def leaf(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "leaf" / part).mkdir(parents=True)
        told = {"users": ["a", "b"], "user_data": {u: {"x": [[1.0, 2.0]], "y": [i]} for i, u in enumerate("ab")}}
        (tmp_path / "leaf" / part / "all.json").write_text(json.dumps(told))
    return tmp_path / "leaf"


def test_a_layout_is_told_by_its_looks(command, leaf, tmp_path):
    status, out, _ = command("convert", leaf, tmp_path / "out")
    assert status == 0
    assert "2 clients, 2 examples, 2 test examples, 2 classes" in out


def test_options_of_a_layout(command, tmp_path):
    for owner in "abcd":
        (at := tmp_path / "images" / owner / "fox").mkdir(parents=True)
        Image.new("RGB", (5, 6)).save(at / "0.png")
    words = ("convert", tmp_path / "images", tmp_path / "out", "--layout", "image_folder")
    status, out, _ = command(*words, "--option", "side=3", "--hold-out", 0.5)
    assert (status, "2 clients, 2 examples, 2 test examples, 1 classes" in out) == (0, True)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--layout", "csv"), "--layout 'csv': choose parquet, leaf, tff, hf or image_folder"),
        (("--layout", "torchvision"), "--layout 'torchvision': choose parquet"),
        (("--layout", "parquet", "--option", "side=3"), "--option side: Parquet has none: leave it out"),
        (("--option", "side"), "an override is written dotted.key=value"),
        (("--option", "wide=3"), "wide: no option of leaf: give some of path, classes"),
        (("--classes", 1), "the label 1 is none from 0 to 0"),
        (("--layout", "image_folder"), "all.json"),
    ],
)
def test_mistakes_are_said_in_one_line(command, leaf, tmp_path, more, says):
    status, _, err = command("convert", leaf, tmp_path / "out", *more)
    if says == "all.json":  # a folder of JSON is none of images
        says = "holds no folders"
    assert (status, says in err, err.count("\n")) == (2, True, 1), err
    assert not (tmp_path / "out").exists()
