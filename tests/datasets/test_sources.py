"""LEAF's JSON, TensorFlow Federated's HDF5, Hugging Face's and torchvision's data sets: read, converted, recorded, refused."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import fedfleet
from fedfleet.config.population import load_data
from fedfleet.config.schema import load
from fedfleet.data import DataError, from_hf
from fedfleet.datasets import hugging_face, keep, user_data
from fedfleet.datasets.leaf import CHARACTERS
from fedfleet.datasets.parts import split
from tests.datasets.layouts import on_disk
from tests.refusals import all_say, refused, tells

needs_h5py = pytest.mark.skipif(importlib.util.find_spec("h5py") is None, reason="h5py is not installed")
needs_hf = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


def read(name: str, **options: Any) -> Any:
    return load_data(load({"population": {"dataset": {"name": name, **options}}}))


def held(data: Any, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    local = data.population.local_data(torch.tensor([client]))
    rows = local.rows[0][: local.counts[0]]
    return local.data["x"][rows], local.data["y"][rows]


def leaf(
    root: Path, users: dict[str, tuple[list[Any], list[Any]]], test: dict[str, tuple[list[Any], list[Any]]]
) -> Path:
    for part, of in (("train", users), ("test", test)):
        (root / part).mkdir(parents=True, exist_ok=True)
        for i, (user, (x, y)) in enumerate(of.items()):  # a file a user
            told = {"users": [user], "num_samples": [len(y)], "user_data": {user: {"x": x, "y": y}}}
            (root / part / f"all_data_{i}.json").write_text(json.dumps(told))
    return root


def few(root: Path) -> Path:
    def x(n):
        return (np.full((n, 784), 0.25) + np.arange(n)[:, None]).tolist()

    users = {f"f{i}": (x(i + 2), [i] * (i + 2)) for i in range(4)}
    return leaf(root / "femnist", users, {"f0": (x(3), [61, 0, 1]), "g": (x(1), [2])})


@pytest.fixture
def femnist(tmp_path: Path) -> Path:
    return few(tmp_path)


def test_femnist_of_leaf(femnist: Path):
    (femnist / "train" / "._all_data_0.json").write_bytes(
        b"\x00\xff"
    )  # as other systems leave behind: hidden, and no data
    data = read("leaf", path=str(femnist))
    assert (data.population.size, len(data.test), data.test.classes) == (4, 4, 62)
    for client in range(4):
        x, y = held(data, client)
        assert y.tolist() == [client] * (client + 2)
        assert (x[:, 0, 27, 27].tolist(), x.shape[1:]) == ([0.25 + i for i in range(client + 2)], (1, 28, 28))
    assert data.test.y.tolist() == [61, 0, 1, 2]


def test_shakespeare_of_leaf_is_characters_and_the_next(tmp_path: Path):
    train = {"romeo": (["but soft, what", "ut soft, what "], [" ", "é"]), "juliet": (["Romeo, Romeo!\n"], ["}"])}
    data = read("leaf", path=str(leaf(tmp_path / "s", train, {"romeo": (["deny thy fathe"], ["r"])})))
    x, y = held(data, 0)
    assert ["".join(CHARACTERS[i] for i in row) for row in x] == ["but soft, what ", "ut soft, what  "]
    assert (x.dtype, y.tolist(), data.test.classes, len(CHARACTERS)) == (torch.int64, [0, 0], 80, 80)
    assert "".join(CHARACTERS[i] for i in data.test.x[0]) == "deny thy father"
    assert CHARACTERS[int(held(data, 1)[0][0, -1])] == "}"


def test_sent140_of_leaf_is_numbers_of_words(tmp_path: Path):
    def tweet(text):
        return ["1", "today", "NO_QUERY", "u", text, "train"]

    train = {"u": ([tweet("Good good day"), tweet("bad")], [1, 0]), "v": ([tweet("good day, day")], [1])}
    data = read("leaf", path=str(leaf(tmp_path / "s", train, {"w": ([tweet("day of good good")], [1])})), words=3)
    assert held(data, 0)[0].tolist() == [[1, 2, 0], [0, 0, 0]]  # day and good are there three times, a comma once
    assert (held(data, 1)[0].tolist(), data.test.x.tolist()) == ([[2, 1, 1]], [[1, 2, 0]])


def test_celeba_of_leaf_is_images_out_of_a_folder(tmp_path: Path):
    (tmp_path / "raw").mkdir()
    for i in range(3):
        Image.new("RGB", (6, 9), (i, 50, 100)).save(tmp_path / "raw" / f"{i}.png")
    root = leaf(tmp_path / "c", {"a": (["0.png"], [1]), "b": (["1.png"], [0])}, {"a": (["2.png"], [1])})
    data = read("leaf", path=str(root), images=str(tmp_path / "raw"), side=4)
    assert (held(data, 1)[0][0, :, 3, 3].tolist(), data.test.x.shape) == ([1, 50, 100], (1, 3, 4, 4))
    tells(lambda: read("leaf", path=str(root)), "examples are names of files, such as 0.png", DataError)
    leaf(root, {"a": (["../0.png"], [1])}, {"a": (["2.png"], [1])})
    with pytest.raises(DataError, match=r"'\.\./0\.png' is no name of a file"):
        read("leaf", path=str(root), images=str(tmp_path / "raw"))


def test_bad_leaf_is_refused(subtests, tmp_path_factory):
    def call(spoil):
        at = few(tmp_path_factory.mktemp("leaf"))
        spoil(at)
        read("leaf", path=str(at))

    first = "train/all_data_0.json"
    rows = [
        (lambda at: (at / first).write_text("{"), "all_data_0.json: is no JSON"),
        (lambda at: (at / first).write_text('{"users": ["a"]}'), "(KeyError"),
        (lambda at: leaf(at, {"a": ([[1.0]], [0, 1])}, {}), "user 'a' has not one y"),
        (lambda at: leaf(at, {"a": ([[1.0], [1.0, 2]], [0, 1])}, {}), "row 1: is of shape (2,), and row 0 of (1,)"),
        (lambda at: leaf(at, {"f0": ([[1.0] * 784], [-1])}, {}), "label -1"),
        (lambda at: leaf(at, {"f0": ([["a"] * 9, [1]], [0, 1])}, {}), "tweet"),
        (lambda at: leaf(at, {"f0": (["abc", "ab"], ["a", "b"])}, {}), "3 characters"),
        (lambda at: [p.unlink() for p in (at / "test").iterdir()], "test: no file in it ends in .json"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


def hdf5(path: Path, clients: dict[str, dict[str, Any]]) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            for field, values in fields.items():
                file[f"examples/{name}/{field}"] = values
    return path


def emnist(path: Path, clients: int = 5) -> Path:
    fields = lambda i: {"pixels": np.full((i + 1, 28, 28), i, np.float32), "label": np.full(i + 1, i, np.int32)}  # noqa: E731
    return hdf5(path, {f"f{i:02}": fields(i) for i in range(clients)})


@needs_h5py
def test_emnist_of_tensorflow_federated(tmp_path: Path):
    train, test = emnist(tmp_path / "train.h5"), emnist(tmp_path / "test.h5", 2)
    data = read("tff", path=str(train), test=str(test))
    assert (data.population.size, len(data.test)) == (5, 3)
    for client in range(5):
        x, y = held(data, client)
        assert (x.shape, y.tolist()) == ((client + 1, 1, 28, 28), [client] * (client + 1))
        assert (x == client).all()
    assert read("tff", path=str(train), hold_out=0.4).population.size == 3
    images = {"a": {"image": np.zeros((2, 8, 8, 3), np.uint8), "coarse_label": [0, 1], "label": [5, 6]}}
    images["b"] = images["a"]
    colour = read("tff", path=str(hdf5(tmp_path / "c.h5", images)), label="coarse_label")
    assert (colour.test.x.shape, colour.test.x.dtype, colour.test.classes) == ((2, 3, 8, 8), torch.uint8, 2)


@needs_h5py
def test_bad_hdf5_is_refused(subtests, tmp_path_factory):
    import h5py

    def call(change):
        path = emnist(tmp_path_factory.mktemp("hdf5") / "train.h5")
        with h5py.File(path, "a") as file:
            change(file)
        read("tff", path=str(path))

    def put(pixels, label):
        return lambda f: f.update({"examples/g/pixels": pixels, "examples/g/label": label})

    def elsewhere(f):
        f.create_dataset("examples/g/pixels", (2, 28, 28), "f4", external="other.bin")
        f["examples/g/label"] = [0, 1]

    rows = [
        (lambda f: f.move("examples", "other"), "no 'examples'"),
        (lambda f: f.move("examples/f01/pixels", "p"), "no field pixels or image or x"),
        (lambda f: f.update({"examples/f01/z": 1}) or f.move("examples/f01/label", "l"), "one of pixels, z"),
        (lambda f: f.update({"examples/g": h5py.ExternalLink("other.h5", "/examples/f01")}), "'g' is a link"),
        (lambda f: f.update({"examples/g": h5py.SoftLink("/examples/f01")}), "'g' is a link"),
        (elsewhere, "'pixels' lies in another file"), (put([b"text"], [1]), "no numbers"),
        (put(np.zeros((1, 9, 9)), [1]), "client 'g' … (9, 9) … (28, 28)"),
        (put(np.zeros((2, 28, 28)), [1]), "client 'g': has 2 examples and 1 labels"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


@needs_h5py
def test_what_is_no_hdf5_is_said(tmp_path: Path):
    (tmp_path / "a.h5").write_bytes(b"no")
    for name, says in (("a.h5", "a.h5: is not readable as HDF5"), ("b.h5", "there is no such file")):
        assert says in refused(lambda name=name: read("tff", path=str(tmp_path / name)), "", DataError)


def columns(rows: int = 12) -> dict[str, Any]:
    return {"user": [f"u{i % 4}" for i in range(rows)], "a": list(range(rows)), "label": [i % 3 for i in range(rows)]}


@needs_hf
def test_hugging_face_in_memory_and_in_folders(tmp_path: Path):
    import datasets

    table = datasets.Dataset.from_dict(columns())
    data = from_hf(table, client="user", test=table)
    assert (data.population.size, len(data.test), data.test.x.dtype) == (4, 12, torch.int64)
    assert held(data, 1)[0].flatten().tolist() == [1, 5, 9]
    both = datasets.DatasetDict({"train": table, "test": table.select(range(3))})
    assert (len(from_hf(both, client="user").test), len(from_hf(both, test=0.5, features=["a"]).test)) == (3, 6)
    both.save_to_disk(str(tmp_path / "saved"))
    there = read("hf", path=str(tmp_path / "saved"), client="user")
    assert (there.population.size, there.test.y.tolist()) == (4, [0, 1, 2])
    (tmp_path / "csv").mkdir()
    table.to_csv(str(tmp_path / "csv" / "train.csv"))
    dealt = read("hf", path=str(tmp_path / "csv"), features=["a"], hold_out=0.25)
    assert isinstance(dealt, fedfleet.Dataset)
    assert len(dealt.test) == 3
    lists = datasets.Dataset.from_dict({"x": [[[i, 1], [2, 3]] for i in range(10)], "label": [0, 1] * 5})
    assert from_hf(lists).train.x.shape == (9, 2, 2)


@needs_hf
def test_images_of_hugging_face(tmp_path: Path):
    import datasets

    def image(value, size=(5, 4)):
        buffer = io.BytesIO()
        Image.new("RGB", size, (value, 1, 2)).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    table = datasets.Dataset.from_dict({"image": [image(i) for i in range(10)], "label": [0, 1] * 5}, features=features)
    data = from_hf(table, test=table)
    assert data.train.x[:, 0, 0, 0].tolist() == list(range(10))
    assert (data.train.x.shape[1:], from_hf(table, side=3, channels=1).train.x.shape[1:]) == ((3, 4, 5), (1, 3, 3))
    odd = datasets.Dataset.from_dict({"image": [image(1), image(2, (9, 9))], "label": [0, 1]}, features=features)
    tells(lambda: from_hf(odd, test=0.5), "image 1: is of 9 x 9 pixels, and image 0 of 5 x 4: give side=4", DataError)


def bytes_of(rows, names="ab"):
    """Return two rows of bytes, and labels that have names."""
    import datasets

    features = {"x": datasets.Sequence(datasets.Value("uint8")), "label": datasets.ClassLabel(names=[*names])}
    return datasets.Dataset.from_dict({"x": rows, "label": [0, 1]}, features=datasets.Features(features))


@needs_hf
def test_bytes_in_lists_are_pixels_and_named_labels_keep_their_numbers():
    data = from_hf(bytes_of([[1, 2], [3, 255]]), test=bytes_of([[5, 6], [7, 8]]))
    assert (data.train.x.dtype, data.train.x.tolist()) == (torch.uint8, [[1, 2], [3, 255]])
    assert data.test.y.tolist() == [0, 1]


@needs_hf
def test_bad_tables_of_hugging_face_are_refused(subtests, tmp_path: Path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    t = datasets.Dataset.from_dict(columns())
    rows = [
        (lambda: from_hf([1]), "^dataset: is a list"),
        (lambda: from_hf(bytes_of([[1, 2], [3]])), "column 'x', row 1: is of shape (1,), and row 0 of (2,)"),
        (lambda: from_hf(bytes_of([[1, 2], [None, 3]])), "column 'x', row 1: has a null"),
        (lambda: from_hf(bytes_of([[1], [2]]), test=bytes_of([[1], [2]], "ba")), "^test: column 'label': its labels"),
        (lambda: from_hf({"validation": t}), "^dataset: has the splits validation"),
        (lambda: from_hf(t, test="test"), "^test: is a str"),
        (lambda: from_hf(t, client="usr"), "^train: no column 'usr': did you mean 'user'"),
        (lambda: from_hf(t, features=["b"]), "^train: no column 'b': choose among user, a, label"),
        (lambda: from_hf(t), "column 'user': is text"),
        (lambda: from_hf(bytes_of([[1], [2]]).add_column("mask", [[1], [1]])), "^train: column 'x' … 'mask'"),
        (lambda: from_hf(t, client="user", features="a"), "^features: is 'a'"),
        (lambda: from_hf(t.add_column("b", [*"12"] * 6), label="b", features=["a"]), "labels are text, such as '1'"),
        (lambda: from_hf(t, client="user", channels=2), "^channels: is 2"),
        (lambda: read("hf", path=str(tmp_path)), "cannot be read ("),
        (lambda: read("hf", path="nobody/nothing"), "nobody/nothing: cannot be read ("),
    ]  # fmt: skip
    all_say(subtests, lambda make: make(), rows, DataError)


def test_torchvision_by_name(tmp_path: Path):
    raw = tmp_path / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 4)):
        x = np.arange(count, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
        y = np.arange(count, dtype=np.uint8) % 3
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">HBB3I", 0, 8, 3, count, 28, 28) + x.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, count) + y.tobytes())
    data = read("torchvision", dataset="KMNIST", path=str(tmp_path), channels=1)
    assert (data.train.x.shape, data.train.x[:, 0, 5, 5].tolist()) == ((6, 1, 28, 28), [0, 1, 2, 3, 4, 5])
    assert (data.test.y.tolist(), data.test.classes) == ([0, 1, 2, 0], 3)
    assert read("torchvision", dataset="KMNIST", path=str(tmp_path), side=7).train.x.shape == (6, 3, 7, 7)


def test_bad_names_of_torchvision_are_refused(subtests, tmp_path: Path):
    rows = [
        ({"dataset": "KMNST"}, "^population.dataset.dataset='KMNST' … did you mean 'KMNIST'"),
        ({"dataset": "CIFAR10"}, "population.dataset=cifar10"),
        ({"dataset": "FashionMNIST"}, "population.dataset=fashion_mnist"), ({"dataset": "LSUN"}, "none that is read: "),
        ({"dataset": "KMNIST", "channels": 2}, "^population.dataset.channels=2"),
        ({"dataset": "KMNIST"}, "KMNIST cannot be read (Dataset not found."),
    ]  # fmt: skip
    all_say(subtests, lambda options: read("torchvision", path=str(tmp_path), **options), rows, DataError)


def test_what_is_kept_on_disk_is_what_was_read(subtests, femnist: Path, tmp_path: Path):
    totals = keep.keep("leaf", {"path": str(femnist)}, tmp_path / "out")
    here, there = read("leaf", path=str(femnist)), on_disk(tmp_path / "out")
    assert (totals.clients, totals.examples, totals.test_examples, totals.classes) == (4, 14, 4, 62)
    for client in range(4):
        for a, b in zip(held(here, client), held(there, client), strict=True):
            assert torch.equal(a, b)
    assert all(map(torch.equal, (here.test.x, here.test.y), (there.test.x, there.test.y)))
    images = {"path": str(folder(tmp_path)), "each": "domain", "hold_out": 0.5}
    rows = [
        (("leaf", {"path": str(femnist)}, tmp_path / "out"), "exists: choose another folder"),
        (("leaf", {"sides": 3}, tmp_path / "other"), "sides: no option of leaf: give some of path"),
        (("leaf", {"path": str(femnist), "words": "many"}, tmp_path / "other"), "words='many': "),
        (("image_folder", images, tmp_path / "other"), "says no clients"),
    ]
    all_say(subtests, lambda given: keep.keep(*given), rows, DataError)
    assert not (tmp_path / "other").exists()


def folder(root: Path) -> Path:
    for owner in "abc":
        for i, label in enumerate("xyxy"):
            (at := root / "images" / owner / label).mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), 60 * i).save(at / f"{i}.png")
    return root / "images"


def test_a_run_records_what_was_read_and_goes_on_with_the_same_alone(tmp_path: Path):
    images = folder(tmp_path)
    config = {
        "rounds": 1, "population": {"dataset": {"name": "image_folder", "path": str(images), "channels": 1}},
        "task": {"model": "logistic"}, "algorithm": {"batch_size": 2}, "cohort": {"size": 2},
        "executor": {"kind": "local"},
    }  # fmt: skip
    run = fedfleet.run(config, out=tmp_path / "run")
    written = yaml.safe_load((run.folder / "config.yaml").read_text())["population"]["dataset"]
    assert len(written["sha256"]) == 64
    fedfleet.resume(run.folder, overrides={"rounds": 2})
    Image.new("L", (4, 4), 7).save(images / "a" / "x" / "0.png")
    other = fedfleet.run(config, out=tmp_path / "other")
    assert (
        yaml.safe_load((other.folder / "config.yaml").read_text())["population"]["dataset"]["sha256"]
        != written["sha256"]
    )
    tells(lambda: fedfleet.resume(run.folder, overrides={"rounds": 3}), "image_folder now holds other data", DataError)
    tells(lambda: fedfleet.run(config, {"population.partition": "shards"}, out=tmp_path / "third"), "comes in clients")


def test_clients_whose_rows_are_mixed_are_kept_together_with_their_domains(tmp_path: Path):
    of = [1, 0, 2, 1, 2, 0]
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    client, domain = (
        user_data.Codes(torch.tensor(of), ("a", "b", "c")),
        user_data.Codes(torch.tensor(of) // 2, ("p", "q")),
    )
    train, test = (
        user_data.Rows("x", x, y, client, domain),
        user_data.Rows("t", x[:4], y[:4], None, user_data.Codes(y[:4] % 2, ("p", "q"))),
    )
    assert keep.write(split(train, test), tmp_path / "out").domains == ["p", "q"]
    there = on_disk(tmp_path / "out")
    assert [held(there, i)[1].tolist() for i in range(3)] == [[1, 5], [0, 3], [2, 4]]
    assert held(there, 2)[0].tolist() == x[[2, 4]].tolist()
    assert there.population.domains(torch.arange(3)).tolist() == [0, 0, 1]
    assert (there.test.y.tolist(), there.test.domain.tolist()) == ([0, 1, 2, 3], [0, 1, 0, 1])


def test_a_share_of_test_examples_is_told_its_key():
    for name in ("hf", "image_folder", "tff"):
        given = {"population": {"dataset": {"name": name, "path": "x", "test": 0.2}}}
        assert "hold_out=0.2" in refused(lambda given=given: load(given), "population.dataset.test=0.2")


def test_a_hub_out_of_reach_is_told_at_once_and_nothing_is_tried_again(tmp_path: Path, monkeypatch, capfd):
    import huggingface_hub

    import datasets

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"nobody/nothing: cannot be read .* where there is a network"):
        hugging_face.read(hugging_face.HuggingFaceOptions(path="nobody/nothing"))
    assert "Retrying" not in capfd.readouterr().err
    assert not datasets.config.HF_HUB_OFFLINE
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
