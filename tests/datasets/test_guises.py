"""Values in another guise than plain arrays: each is what it stands for, or is refused in a line that says where."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
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
    ]
    all_refused(subtests, lambda changed: given(**changed), rows, DataError)
    refused(lambda: from_texts("one text", [0]), "texts: is a str", DataError)
    texts = ["a b", "b c"] * 10
    assert torch.equal(*(from_texts(t, [0, 1] * 10).train.x for t in (texts, (text for text in texts))))


def test_names_that_look_the_same_and_halves_of_characters_are_refused(subtests):
    words = ["ann", "bob", "eve", "zoe"]
    rows = [
        ({"client": np.array([*words, "ann "])[[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]}, "client: 'ann' and 'ann '"),
        ({"client": np.array(["\u00e9mile", "e\u0301mile", "bob"])[np.arange(12) % 3]}, "client: '\u00e9mile' and "),
        ({"y": np.array(["fox", "owl", "\ud83d"], object)[Y]}, "y: has half a character, '\\ud83d'"),
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
    run = fedfleet.Experiment(fedfleet.load({"cohort.invite": 2, "task.model": "logistic"}), data=found)
    assert run.z["x"]["1.weight"].shape[0] == 10
    words = ["ann", "bob", "cy", "di", "ed", "flo", "gus", "hal"]
    clients = from_hf(data.cast_column("c", datasets.ClassLabel(names=words)), client="c").names.clients
    assert set(clients) < set(words)
