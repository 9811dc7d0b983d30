"""Values in another guise than plain arrays: each is what it stands for, or is refused in a line that says where."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageOps

import fedfleet
from fedfleet.data import from_arrays, from_image_folder, from_texts
from fedfleet.datasets.files import DataError
from fedfleet.datasets.hugging_face import from_hf
from tests.refusals import all_refused, refused

X, Y, CLIENT = np.arange(24.0).reshape(12, 2), np.arange(12) % 3, np.arange(12) // 3
FLAGS = np.arange(12) % 3 == 2


def masked(values: Any) -> Any:
    """The values, the sixth of which is masked."""
    found = np.ma.masked_array(values, mask=np.zeros(np.shape(values), bool))
    found[5] = np.ma.masked
    return found


def masked_rows(values: Any) -> list[Any]:
    """The values as rows, each an array of its own, of which one is masked in part."""
    return [*masked(values)]


def given(**changed: Any) -> Any:
    return from_arrays(**{"x": X, "y": Y, "client": CLIENT, "test": FLAGS, **changed})


def test_a_masked_value_is_a_missing_one_wherever_it_stands(subtests):
    rows = [
        ({"x": masked(X)}, "x, row 5"),
        ({"y": masked(Y)}, "y, row 5"),
        ({"y": None, "target": masked(X)}, "target, row 5"),
        ({"client": masked(CLIENT)}, "client, row 5"),
        ({"domain": masked(CLIENT)}, "domain, row 5"),
        ({"test": masked(FLAGS)}, "test, row 5"),
        ({"test": (masked(X), Y)}, "test x, row 5"),
        ({"x": masked_rows(X)}, "x, row 5"),
        ({"x": tuple(masked_rows(X))}, "x, row 5"),
        ({"y": None, "target": masked_rows(X)}, "target, row 5"),
        (
            {"x": torch.masked.masked_tensor(torch.from_numpy(X), torch.from_numpy(~np.ma.getmaskarray(masked(X))))},
            "x, row 5",
        ),
    ]
    all_refused(subtests, lambda changed: given(**changed), rows, DataError)
    nothing_masked = given(x=np.ma.masked_array(X), y=np.ma.masked_array(Y))
    assert torch.equal(nothing_masked.population.data["x"], given().population.data["x"])


def test_tensors_of_any_kind_are_the_numbers_that_they_hold(subtests):
    x = torch.from_numpy(X).float()
    kinds = {
        "bfloat16": x.bfloat16(),
        "half": x.half(),
        "float8": (x % 8).to(torch.float8_e4m3fn),
        "sparse": x.to_sparse(),
        "csr": x.to_sparse_csr(),
        "negative bit": torch.complex(x, x).conj().imag,
        "nested": torch.nested.nested_tensor([*x]),
        "quantized": torch.quantize_per_tensor(x, 1.0, 0, torch.quint8),
        "with a gradient": x.clone().requires_grad_(),
    }
    for name, value in kinds.items():
        with subtests.test(name):
            want = {"float8": x % 8, "negative bit": -x}.get(name, x)
            assert torch.equal(given(x=value).population.data["x"], want[~torch.from_numpy(FLAGS)])


def test_what_holds_no_rows_is_refused(subtests):
    rows = [
        ({"x": torch.ones(12, 2, device="meta")}, "x: is a tensor of the device meta"),
        ({"x": None}, "x: is a NoneType"),
        ({"x": (row for row in X)}, "x: is a generator"),
        ({"test": None}, "test: is None"),
        ({"classes": 3.0}, "classes: is 3.0"),
        ({"classes": "3"}, "classes: is '3'"),
        ({"y": None, "target": np.full(12, 2**63 + 5, np.uint64)}, "target, row 0"),
        ({"x": 1.7e9 + X}, "x: 1700000000 and 1700000002 are one number in float32"),
        ({"x": 2**24 + X.astype(int)}, "x: 16777219 and 16777221 are one number in float32"),
    ]
    all_refused(subtests, lambda changed: given(**changed), rows, DataError)
    refused(lambda: from_texts("one text", [0]), "texts: is a str", DataError)
    texts = ["a b", "b c"] * 10
    assert torch.equal(*(from_texts(t, [0, 1] * 10).train.x for t in (texts, (text for text in texts))))


ALIKE = (
    "ann  lee",
    "ann\tlee",
    "ann\u200b lee",
    "\ufeffann lee",
    "an\u00adn lee",
    "ann lee\u202e",
    "ann\ufe0f lee",
    "ann\u00a0lee",
)
"""What looks like "ann lee"."""


def test_names_that_differ_in_what_is_seen_are_two():
    names = ["می‌خواهم", "میخواهم", "Ann", "ann"]  # the first has a joiner, which parts its letters
    found = given(client=np.array(names)[np.arange(12) % 4], test=0.3).names
    assert {*found.clients, *found.tested} == {*names}


def test_frames_and_tables_of_several_kinds_are_numbers():
    frame = pd.DataFrame({"a": FLAGS, "b": X[:, 0]})
    want = torch.tensor(frame.to_numpy(dtype=float)).float()[~torch.from_numpy(FLAGS)]
    for x in (frame, pa.table({"a": FLAGS.astype(float), "b": X[:, 0]})):
        assert torch.equal(given(x=x).population.data["x"], want)


def test_test_examples_have_the_columns_of_the_others(subtests):
    frame = pd.DataFrame(X, columns=["a", "b"])
    kinds = {"frame": frame, "table": pa.table({"a": X[:, 0], "b": X[:, 1]})}
    for other in (["b", "a"], ["a", "c"]):
        tested = frame.set_axis(other, axis=1)
        for name, x in kinds.items():
            with subtests.test(name, columns=other):
                refused(lambda x=x, t=tested: given(x=x, test=(t, Y)), "test x: its columns", DataError)
                refused(
                    lambda x=x, t=tested: given(y=None, target=x, test=(X, t)), "test target: its columns", DataError
                )
    for x in (frame, X):
        assert torch.equal(given(x=x, test=(frame, Y)).test.x, torch.from_numpy(X).float())


def test_names_that_look_the_same_and_halves_of_characters_are_refused(subtests):
    words = ["ann", "bob", "eve", "zoe"]
    rows = [
        ({"client": np.array([*words, "ann "])[[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]}, "client: 'ann' and 'ann '"),
        ({"client": np.array(["\u00e9mile", "e\u0301mile", "bob"])[np.arange(12) % 3]}, "client: '\u00e9mile' and "),
        ({"y": np.array(["fox", "owl", "\ud83d"], object)[Y]}, "y: has half a character, '\\ud83d'"),
        *(({"client": np.array(["ann lee", other, "bob"])[Y]}, "client: 'ann lee' and ") for other in ALIKE),
        ({"client": np.array(["ann", "\u200b ", "bob"])[Y]}, "client: has the name"),
    ]
    all_refused(subtests, lambda changed: given(**changed), rows, DataError)
    for tokenizer in ("bytes", "characters", "words"):
        line = refused(
            lambda t=tokenizer: from_texts(["so \ud83d", "bad"] * 9, [1, 0] * 9, tokenizer=t), "texts, row 0", DataError
        )
        assert "surrogatepass" in line


def photograph(orientation: int) -> bytes:
    """A JPEG of 8 x 8 whose quarters differ, with an EXIF orientation; 0: with broken metadata."""
    pixels = np.kron(np.array([[10, 90], [170, 250]], np.uint8), np.ones((4, 4), np.uint8))
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation or 6
    said = exif.tobytes()[:12] + b"\xff" * 9 if orientation == 0 else exif
    Image.fromarray(pixels).save(file, "JPEG", exif=said, quality=100)
    return file.getvalue()


def test_photographs_are_seen_as_they_are_to_be_held(tmp_path: Path, subtests):
    for orientation in range(9):
        with subtests.test(orientation):
            content = photograph(orientation)
            for client in "abc":
                for kind in ("fox", "owl"):
                    folder = tmp_path / str(orientation) / client / kind
                    folder.mkdir(parents=True)
                    (folder / "0.jpg").write_bytes(content)
            found = from_image_folder(tmp_path / str(orientation), test=0.3, channels=1).population.data["x"][0, 0]
            image = Image.open(io.BytesIO(content))
            want = ImageOps.exif_transpose(image) if orientation else image
            assert np.array_equal(found.numpy(), np.asarray(want))


def test_an_animation_is_no_image(tmp_path: Path):
    for client in "abc":
        for kind in ("fox", "owl"):
            (tmp_path / client / kind).mkdir(parents=True)
            frames = [Image.new("L", (4, 4), shade) for shade in (10, 200)]
            frames[0].save(tmp_path / client / kind / "0.png", save_all=True, append_images=frames[1:])
    refused(
        lambda: from_image_folder(tmp_path, test=0.3), f"{tmp_path / 'a' / 'fox' / '0.png'}: is animated", DataError
    )


def test_a_class_label_says_how_many_classes_there_are_and_what_clients_are_called():
    datasets = pytest.importorskip("datasets")
    columns = {
        "x": [[0.1 * i, 1.0] for i in range(40)],
        "label": [i % 3 for i in range(40)],
        "c": [i // 5 for i in range(40)],
    }
    data = datasets.Dataset.from_dict(columns)
    named = data.cast_column("label", datasets.ClassLabel(names=[*"abcdefghij"]))
    found = from_hf(named, client="c")
    assert (found.test.classes, len(found.names.classes)) == (10, 10)
    refused(lambda: from_hf(named, client="c", classes=3), "classes: is 3", DataError)
    run = fedfleet.Experiment(fedfleet.load({"cohort.size": 2, "task.model": "logistic"}), data=found)
    assert run.z["x"]["1.weight"].shape[0] == 10
    words = ["ann", "bob", "cy", "di", "ed", "flo", "gus", "hal"]
    clients = from_hf(data.cast_column("c", datasets.ClassLabel(names=words)), client="c").names.clients
    assert set(clients) < set(words)
