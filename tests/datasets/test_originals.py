"""Digits as published, from small files of the published layouts, made here: Digit-Five, MNIST-M, SVHN, USPS."""

import bz2
import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from fedfleet.datasets import digit_five, mnistm
from fedfleet.datasets.blending import silhouettes
from fedfleet.datasets.files import DataError
from fedfleet.datasets.matlab import read_mat
from fedfleet.datasets.published import Published
from fedfleet.datasets.registry import load
from fedfleet.datasets.resampling import enlarged
from tests.refusals import all_say, tells

Arrays = dict[str, Any]


def pixels(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def hot(labels: list[int]) -> Any:
    return np.eye(10, dtype=np.uint8)[labels]


# Digit-Five
def bundle(train: int = 12, test: int = 6) -> dict[str, Arrays]:
    """The files of Digit-Five.zip: their variables, shapes and types, with fewer examples."""
    y, z = [k % 10 for k in range(train)], [(3 * k) % 10 for k in range(test)]
    cells = np.empty((2, 2), dtype=object)
    for row, (count, labels) in enumerate(((train, y), (test, z))):
        cells[row, 0] = pixels(row, count, 1, 28, 28).astype(np.float64) / 255
        cells[row, 1] = np.array(labels, dtype=np.int64).reshape(-1, 1)
    street = [np.where(np.array(labels) == 0, 10, labels).astype(np.uint8).reshape(-1, 1) for labels in (y, z)]
    return {
        "mnist_data.mat": {"train_32": pixels(2, train, 32, 32), "test_32": pixels(3, test, 32, 32),
         "train_28": pixels(4, train, 28, 28, 1), "test_28": pixels(5, test, 28, 28, 1), "label_train": hot(y),
         "label_test": hot(z)},
        "mnistm_with_label.mat": {"train": pixels(6, train, 28, 28, 3), "test": pixels(7, test, 28, 28, 3),
         "label_train": hot(y), "label_test": hot(z)},
        "svhn_train_32x32.mat": {"X": pixels(8, 32, 32, 3, train), "y": street[0]},
        "svhn_test_32x32.mat": {"X": pixels(9, 32, 32, 3, test), "y": street[1]},
        "syn_number.mat": {"train_data": pixels(10, train, 32, 32, 3), "test_data": pixels(11, test, 32, 32, 3),
         "train_label": np.array(y, dtype=np.int64).reshape(-1, 1),
         "test_label": np.array(z, dtype=np.int64).reshape(-1, 1)},
        "usps_28x28.mat": {"dataset": cells},
    }  # fmt: skip


def write(folder: Path, files: dict[str, Arrays]) -> Path:
    root = folder / "Digit-Five"
    root.mkdir()
    for name, arrays in files.items():
        savemat(root / name, arrays, do_compression=name.startswith("svhn"))
    return folder


def test_digit_five(tmp_path: Path):
    files = bundle()
    data = load("digit_five", write(tmp_path, files))
    assert (data.domains, data.train.x.shape) == (("mnist", "mnistm", "svhn", "syn", "usps"), (60, 3, 32, 32))
    assert (data.test.x.shape, data.train.classes) == ((30, 3, 32, 32), 10)
    assert data.train.y.view(5, 12).tolist() == [[k % 10 for k in range(12)]] * 5
    assert data.test.y.view(5, 6).tolist() == [[(3 * k) % 10 for k in range(6)]] * 5
    assert data.train.domain is not None
    assert torch.equal(data.train.domain, torch.arange(5).repeat_interleave(12))
    x, test = data.train.x.view(5, 12, 3, 32, 32), data.test.x.view(5, 6, 3, 32, 32)
    assert torch.equal(x[0], torch.from_numpy(files["mnist_data.mat"]["train_32"])[:, None].expand(-1, 3, -1, -1))
    small = torch.from_numpy(files["mnistm_with_label.mat"]["test"]).permute(0, 3, 1, 2)
    assert torch.equal(test[1], enlarged(small, 32))
    assert torch.equal(x[2], torch.from_numpy(files["svhn_train_32x32.mat"]["X"]).permute(3, 2, 0, 1))
    assert torch.equal(test[3], torch.from_numpy(files["syn_number.mat"]["test_data"]).permute(0, 3, 1, 2))
    post = torch.from_numpy(pixels(0, 12, 1, 28, 28)).expand(-1, 3, -1, -1)
    assert (x[4].int() - enlarged(post, 32).int()).abs().max() <= 1  # n / 255 * 255 may be just below n


def test_digit_five_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digit_five, "TRAIN", 5)
    monkeypatch.setattr(digit_five, "TEST", 4)
    files = bundle()
    for name, key in (("mnist_data.mat", "train_32"), ("mnistm_with_label.mat", "train")):
        for number in range(12):
            files[name][key][number] = number  # an image that tells its number
    data = load("digit_five", write(tmp_path, files))
    x, y = data.train.x.view(5, 5, 3, 32, 32), data.train.y.view(5, 5)
    drawn = x[:2, :, 0, 0, 0].long()
    assert all(len(numbers.unique()) == 5 for numbers in drawn)
    assert not torch.equal(drawn[0], drawn[1])  # each domain has a draw of its own
    assert (drawn.max(1).values > 5).all()  # which is not of the first
    assert torch.equal(y[:2], drawn % 10)
    assert y[2:].tolist() == [[0, 1, 2, 3, 4]] * 3
    assert torch.equal(x[2], torch.from_numpy(files["svhn_train_32x32.mat"]["X"])[..., :5].permute(3, 2, 0, 1))
    assert data.test.y.view(5, 4).tolist() == [[0, 3, 6, 9]] * 5


@pytest.mark.parametrize("missing", digit_five.FILES)
def test_a_missing_file_of_digit_five(tmp_path: Path, missing: str):
    write(tmp_path, bundle())
    (tmp_path / "Digit-Five" / missing).unlink()
    with pytest.raises(DataError, match=f"{missing} is not there: fetch it from https://ai.bu.edu/M3SDA"):
        load("digit_five", tmp_path)


def without(arrays: Arrays, name: str) -> Arrays:
    return {key: value for key, value in arrays.items() if key != name}


def swapped(arrays: Arrays, **new: Any) -> Arrays:
    return {**arrays, **new}


def test_a_damaged_file_of_digit_five(subtests, tmp_path_factory):
    def call(row):
        file, damage = row
        tmp_path = tmp_path_factory.mktemp("row")
        files = bundle()
        files[file] = damage(files[file])
        load("digit_five", write(tmp_path, files))

    rows = [
        (("mnist_data.mat", lambda a: without(a, "train_32")), "has no array 'train_32'"),
        (("mnist_data.mat", lambda a: swapped(a, label_train=hot([1, 2]))), "the 12 images need (12, 1)"),
        (("mnist_data.mat", lambda a: swapped(a, label_test=np.ones((6, 10)))), "has labels that are not one of ten"),
        (("mnistm_with_label.mat", lambda a: swapped(a, train=np.zeros((12, 28, 28)))),
         "expected numbers (n, h, w, c)"),
        (("mnistm_with_label.mat", lambda a: swapped(a, test=np.full((6, 28, 28, 3), 256))), "has pixels 256..256"),
        (("syn_number.mat", lambda a: swapped(a, test_data=np.full((6, 32, 32, 3), np.nan))), "has pixels nan..nan"),
        (("syn_number.mat", lambda a: swapped(a, train_label=np.full((12, 1), 11))),
         "has labels 11..11, expected 0..10"),
        (("syn_number.mat", lambda a: swapped(a, train_label=np.full((12, 1), 0.5))), "has labels 0.5..0.5"),
        (("syn_number.mat", lambda a: swapped(a, train_data="text")), "of <U4, expected numbers"),
        (("svhn_test_32x32.mat", lambda a: swapped(a, X=pixels(0, 32, 32, 3))), "expected numbers (h, w, c, n)"),
        (("usps_28x28.mat", lambda a: swapped(a, dataset=np.zeros((2, 3)))), "expected a cell array of (2, 2)"),
        (("usps_28x28.mat", lambda a: swapped(a, dataset=np.zeros((2, 2)))), "expected a cell array of (2, 2)"),
    ]  # fmt: skip
    all_say(subtests, call, [(row, f"Digit-Five/{row[0]} … {says}") for row, says in rows], DataError)


# MATLAB files
@given(data=st.data())
def test_a_cut_or_changed_matlab_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("mat") / "a.mat"
    savemat(path, {"X": pixels(1, 5, 4)}, do_compression=data.draw(st.booleans()))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole[:at] if data.draw(st.booleans()) else bytes(changed))
    try:
        (found,) = read_mat(path, ["X"], "a site")
        said = None
    except DataError as error:
        said, found = str(error), np.empty(0)
    assert isinstance(found, np.ndarray)
    assert said is None or (str(path) in said and "\n" not in said)


class Crashing:
    """Ends the process that it is sent to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


@pytest.mark.slow
def test_a_file_that_crashes_its_reader_is_refused_and_the_next_one_read(tmp_path, monkeypatch):
    savemat(tmp_path / "a.mat", {"X": pixels(1, 5, 4)})
    with monkeypatch.context() as patched:
        patched.setattr("fedfleet.datasets.matlab._load", Crashing())
        tells(lambda: read_mat(tmp_path / "a.mat", ["X"], "a site"), "a.mat: crashes scipy's reader", DataError)
    (found,) = read_mat(tmp_path / "a.mat", ["X"], "a site")
    assert np.array_equal(found, pixels(1, 5, 4))


def test_version_7_3_is_refused(tmp_path: Path):
    head = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    (tmp_path / "a.mat").write_bytes(head + b"\0" * 384 + b"\x89HDF\r\n\x1a\n" + b"\0" * 600)
    with pytest.raises(DataError, match=r"is of MATLAB 7.3, which is HDF5, expected version 5 to 7"):
        read_mat(tmp_path / "a.mat", ["X"], "a site")


def test_a_pickle_is_no_matlab_file(tmp_path: Path):
    import pickle

    (tmp_path / "a.mat").write_bytes(pickle.dumps({"X": [1]}) * 40)
    tells(lambda: read_mat(tmp_path / "a.mat", ["X"], "a site"), "cannot be read", DataError)


# SVHN
def test_svhn(tmp_path: Path):
    (tmp_path / "svhn").mkdir()
    x = {part: pixels(k, 32, 32, 3, 11 - k) for k, part in enumerate(("train", "test"))}
    for part, images in x.items():
        y = (np.arange(images.shape[3]) % 10 + 1).reshape(-1, 1).astype(np.uint8)
        savemat(tmp_path / "svhn" / f"{part}_32x32.mat", {"X": images, "y": y})
    data = load("svhn", tmp_path)
    assert torch.equal(data.train.x, torch.from_numpy(x["train"]).permute(3, 2, 0, 1))
    assert (data.train.y.tolist(), data.test.x.shape) == ([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1], (10, 3, 32, 32))
    assert data.train.classes == 10


# USPS
def line(label: int, values: list[float]) -> str:
    return f"{label} " + " ".join(f"{k}:{v:g}" for k, v in enumerate(values, 1)) + " \n"


def usps(folder: Path, train: str) -> Path:
    (folder / "usps").mkdir(exist_ok=True)
    (folder / "usps" / "usps.bz2").write_bytes(bz2.compress(train.encode()))
    (folder / "usps" / "usps.t.bz2").write_bytes(bz2.compress(line(10, [0.5] * 256).encode()))
    return folder


def test_usps_as_torchvision_reads_it(tmp_path: Path):
    from torchvision.datasets import USPS

    values = np.random.default_rng(0).uniform(-1, 1, (3, 256)).round(6).tolist()
    folder = usps(tmp_path, "".join(line(k + 1, row) for k, row in enumerate(values)))
    data = load("usps", folder)
    theirs = USPS(str(folder / "usps"))
    assert torch.equal(data.train.x[:, 0], torch.from_numpy(theirs.data))
    assert data.train.y.tolist() == theirs.targets == [0, 1, 2]
    assert (data.test.y.tolist(), data.test.x.unique().tolist()) == ([9], [191])


GOOD = line(1, [0.0] * 256)


def test_a_damaged_usps(subtests, tmp_path_factory):
    def call(text):
        tmp_path = tmp_path_factory.mktemp("row")
        load("usps", usps(tmp_path, text))

    rows = [
        (GOOD.replace(" 256:0", ""), "has no rows of a label and 256 pixels"),
        (GOOD + line(2, [0.0] * 255), "cannot be read"), ("", "has no rows"),
        (GOOD.replace(" 7:", " 8:"), "pixels that are not numbered 1..256"),
        (line(11, [0.0] * 256), "has labels other than 1..10"), (line(0, [0.0] * 256), "has labels other than 1..10"),
        (line(1, [0.0] * 255 + [1.5]), "has values outside [-1, 1]"),
        (line(1, [float("nan")] * 256), "has values outside [-1, 1]"), (GOOD.replace("7:0", "7:x"), "cannot be read"),
    ]  # fmt: skip
    all_say(subtests, call, [(row, f"usps/usps.bz2 … {says}") for row, says in rows], DataError)


def test_a_cut_usps(tmp_path: Path):
    path = usps(tmp_path, GOOD) / "usps" / "usps.bz2"
    path.write_bytes(path.read_bytes()[:-9])
    tells(lambda: load("usps", tmp_path), "cannot be read", DataError)


# MNIST and MNIST-M
def mnist(folder: Path, train: int, test: int) -> Path:
    (folder / "mnist").mkdir()
    for part, count in (("train", train), ("t10k", test)):
        x = pixels(count, count, 28, 28) * (pixels(count + 1, count, 28, 28) > 127)
        for kind, values in (("images-idx3", x), ("labels-idx1", np.arange(count, dtype=np.uint8) % 10)):
            head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            (folder / "mnist" / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))
    return photographs(folder)


def photographs(folder: Path) -> Path:
    """Write two of one colour each, as BSDS500's."""
    root = folder / "BSR" / "BSDS500" / "data" / "images" / "train"
    root.mkdir(parents=True)
    for k, size in enumerate(((40, 28), (60, 90))):
        image = np.full((size[1], size[0], 3), [60 + 40 * k, 90, 200 - 30 * k], dtype=np.uint8)
        Image.fromarray(image).save(root / f"{k}.jpg", quality=100)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mnistm, "VALIDATION", 4)
    return mnist(tmp_path, 24, 10)


def shown(x: Tensor) -> Tensor:
    """The digits of MNIST-M, before these photographs: where the blue of a patch, above 160, was taken from 255."""
    return (x[:, 2:] < 128).to(torch.uint8) * 255


def test_mnist_m_shows_the_same_digits(folder: Path):
    data = load("mnistm", folder)
    digits = silhouettes(load("mnist", folder).train.x[4:])
    assert (data.domains, data.train.x.shape) == (("mnist", "mnistm"), (40, 3, 28, 28))
    assert data.test.x.shape == (20, 3, 28, 28)
    source, target = data.train.x.split(20)
    assert all(map(torch.equal, (source, shown(target)), (digits.expand(-1, 3, -1, -1), digits)))
    assert data.train.y.view(2, 20).tolist() == [[k % 10 for k in range(4, 24)]] * 2
    colours = {
        round(float(image[0][digit == 0].double().mean()), -1) for image, (digit,) in zip(target, digits, strict=True)
    }
    assert colours == {60, 100}  # of both photographs


def test_unpaired_domains_share_no_digit(folder: Path):
    data = load("mnistm_unpaired", folder)
    assert data.name == "mnistm_unpaired"
    assert (data.train.x.shape[0], data.test.x.shape[0]) == (20, 10)
    digits = {image.numpy().tobytes(): k for k, image in enumerate(silhouettes(load("mnist", folder).train.x))}
    source, target = data.train.x.split(10)
    found = [digits[image.contiguous().numpy().tobytes()] for image in torch.cat([source[:, :1], shown(target)])]
    assert (sorted(found), data.train.y.tolist()) == (list(range(4, 24)), [k % 10 for k in found])


def test_photographs_that_are_absent_or_damaged(folder: Path):
    root = folder / mnistm.PHOTOGRAPHS
    Image.new("RGB", (27, 40)).save(root / "2.jpg")
    tells(lambda: load("mnistm", folder), "2.jpg: has 27 x 40 pixels, which hold no patch of 28 x 28", DataError)
    (root / "2.jpg").write_bytes((root / "1.jpg").read_bytes()[:300])
    tells(lambda: load("mnistm", folder), "2.jpg: is no image", DataError)
    for path in root.iterdir():
        path.unlink()
    tells(lambda: load("mnistm", folder), "train/*.jpg is not there: fetch it from http", DataError)


def test_domains_of_a_pair_may_be_chosen(folder: Path):
    data = load("mnistm", folder, Published(domains=["mnistm"], per_domain=7))
    assert data.domains == ("mnistm",)
    assert (len(data.train), len(data.test)) == (7, 10)


def test_the_checksums_are_of_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A download of SVHN and of USPS has to have torchvision's."""
    import io

    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout=None: io.BytesIO(b"something else"))
    for name in ("svhn", "usps"):
        with pytest.raises(DataError, match=f"what came has md5 {hashlib.md5(b'something else').hexdigest()}, not"):
            load(name, tmp_path)
