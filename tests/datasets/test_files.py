"""The data directory: finding, fetching and reading files, with files and servers made here."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.datasets import EMNIST

from fedfleet.datasets import cifar, mnist
from fedfleet.datasets.files import DataError, data_dir, fetch, fetch_members, read_idx
from tests.datasets.layouts import idx
from tests.refusals import all_say, refused, tells

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def faulty(path: Path, call: Callable[[], object], *says: str) -> str:
    """Check that a file is refused in one line that names it and says how to mend it."""
    line = refused(call, "", DataError)
    fix = "delete it and let it download again, or copy the original file from"
    assert [part for part in (str(path), fix, *says) if part not in line] == [], line
    return line


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], list[str]]:
    """Answer downloads from a mapping of URLs; the list returned fills with the URLs asked for."""

    def start(pages: dict[str, bytes]) -> list[str]:
        asked: list[str] = []

        def answer(request, timeout=None):
            asked.append(request.full_url)
            assert timeout <= 10
            if request.full_url not in pages:
                raise OSError("no such page")
            return io.BytesIO(pages[request.full_url])

        monkeypatch.setattr("urllib.request.urlopen", answer)
        return asked

    return start


def everything_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Where the data directory is
def test_data_dir_override_wins_then_environment_then_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FEDFLEET_DATA", "/from/environment")
    monkeypatch.setenv("XDG_CACHE_HOME", "/from/xdg")
    assert (data_dir("/given"), data_dir("~/given")) == (Path("/given"), tmp_path / "home" / "given")
    assert data_dir() == Path("/from/environment")
    monkeypatch.setenv("FEDFLEET_DATA", "")
    assert data_dir() == Path("/from/xdg/fedfleet")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_dir(None) == tmp_path / "home" / ".cache" / "fedfleet"


# IDX
@given(shape=shapes, zipped=st.booleans())
def test_idx_round_trip(tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], zipped: bool):
    values = pixels(*shape)
    path = write(tmp_path_factory.mktemp("idx") / ("a.gz" if zipped else "a"), idx(values))
    read = read_idx(path)
    assert read.shape == values.shape
    assert torch.equal(read, values)
    read += 1  # its memory is its own


@given(shape=shapes, data=st.data())
def test_idx_cut_anywhere_or_longer_is_refused(tmp_path_factory: pytest.TempPathFactory, shape, data):
    whole = idx(pixels(*shape))
    folder = tmp_path_factory.mktemp("idx")
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        path = write(folder / "plain", wrong)
        faulty(path, lambda path=path: read_idx(path))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01", "starts with 00000d01"),  # float32
        (b"\x01\x00\x08\x01\x00\x00\x00\x01", "starts with 01000801"),
        (b"\x00\x00\x08\x00", "starts with 00000800"),  # no dimensions
        (b"", "starts with nothing"),
        (b"<htm", "starts with 3c68746d"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x00\xff\xff\xff\xff", "holds nothing"),
        (b"\x00\x00\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff", "is cut short"),  # no allocation by its header
    ],
)
def test_idx_wrong_header(tmp_path: Path, header: bytes, says: str):
    path = write(tmp_path / "a", header)
    assert faulty(path, lambda: read_idx(path, "https://example.org/a"), says).endswith("https://example.org/a")


def test_idx_broken_gzip(tmp_path: Path):
    good = gzip.compress(idx(pixels(30, 30)))
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    checksum = bytearray(good)
    checksum[-8] ^= 0xFF
    block = bytearray(good)
    block[10] = 0xFF  # no such kind of block
    wrong = {
        "block": bytes(block), "cut": good[:-20], "no trailer": good[:-8], "flipped": bytes(flipped),
        "checksum": bytes(checksum),
    }  # fmt: skip
    wrong |= {"plain": idx(pixels(3)), "empty": b"", "trailing": good + b"junk"}
    for name, data in wrong.items():
        path = tmp_path / f"{name}.gz"
        path.write_bytes(data)
        faulty(path, lambda path=path: read_idx(path))


def test_idx_of_a_folder_is_a_data_error(tmp_path: Path):
    tells(lambda: read_idx(tmp_path), "cannot be read", DataError)


# Fetching
def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def test_fetch_takes_what_is_there(tmp_path: Path, no_network: list[str]):
    path = write(tmp_path / "set" / "a.gz", b"anything")
    assert fetch(tmp_path, "set/a.gz", ["https://x/a.gz"], "0") == path
    unpacked = write(tmp_path / "set" / "b", b"anything")
    assert (fetch(tmp_path, "set/b.gz", ["https://x/b.gz"], "0"), no_network) == (unpacked, [])


def test_fetch_tries_mirrors_and_checks_the_download(tmp_path: Path, serve):
    asked = serve({"https://two/a": b"not it", "https://three/a": b"it"})
    urls = [f"https://{host}/a" for host in ("one", "two", "three")]
    path = fetch(tmp_path / "new", "set/a", urls, md5(b"it"))
    assert asked == urls
    assert (path.read_bytes(), everything_under(tmp_path)) == (b"it", ["new/set/a"])


def test_fetch_leaves_nothing_when_no_mirror_is_right(tmp_path: Path, serve):
    serve({"https://one/a": b"not it"})
    with pytest.raises(DataError, match=r"^set/a is not in .*what came has md5") as caught:
        fetch(tmp_path, "set/a", ["https://one/a", "https://two/a"], md5(b"it"))
    assert "\n" not in str(caught.value)
    assert everything_under(tmp_path) == []


def test_fetch_leaves_nothing_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise KeyboardInterrupt
            return super().read(1)

    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: Interrupted(b"it"))
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, "set/a", ["https://one/a"], md5(b"it"))
    assert everything_under(tmp_path) == []


def tarball(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def zipball(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(("archive", "pack"), [("a.tar.gz", tarball), ("a.zip", zipball)])
def test_fetch_members_writes_only_what_was_asked_for(tmp_path: Path, serve, archive: str, pack):
    data = pack({"in/one": b"1", "in/two": b"2", "../escaped": b"!", "in/other": b"3"})
    asked = serve({"https://x/a": data})
    root = tmp_path / "root"
    write(root / "out" / "two", b"mine")
    members = {"out/one": "in/one", "out/two": "in/two"}
    paths = fetch_members(root, members, archive, "https://x/a", md5(data))
    assert [path.read_bytes() for path in paths] == [b"1", b"mine"]
    assert everything_under(tmp_path) == [f"root/{archive}", "root/out/one", "root/out/two"]
    fetch_members(root, members | {"out/other": "in/other"}, archive, "https://x/a", md5(data))
    assert asked == ["https://x/a"]  # the archive was kept


def test_fetch_members_refuses_another_archive(tmp_path: Path, serve):
    serve({})
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"half an archive")
    faulty(path, lambda: fetch_members(tmp_path, {"one": "one"}, "a.tar.gz", "https://x/a", "0" * 32), "its md5 is")
    assert everything_under(tmp_path) == ["a.tar.gz"]


def test_missing_archive_names_the_file_wanted(tmp_path: Path, no_network: list[str]):
    with pytest.raises(DataError, match=r"^cifar-10-batches-bin/data_batch_1\.bin \(or cifar-10-binary\.tar\.gz,"):
        cifar.load_cifar10(tmp_path)
    assert (no_network, everything_under(tmp_path)) == (["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"], [])


# MNIST and EMNIST
def write_pair(folder: Path, stem: str, images: Tensor, labels: Tensor, suffix: str = ".gz") -> None:
    write(folder / f"{stem}-images-idx3-ubyte{suffix}", idx(images))
    write(folder / f"{stem}-labels-idx1-ubyte{suffix}", idx(labels.to(torch.uint8)))


@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")])
def test_mnist_keeps_pixels_labels_and_orientation(tmp_path: Path, no_network, name: str, folder: str, suffix: str):
    images = pixels(12, 4, 3)
    write_pair(tmp_path / folder, "train", images[:8], torch.arange(8), suffix)
    write_pair(tmp_path / folder, "t10k", images[8:], torch.arange(4), suffix)
    loaded = getattr(mnist, f"load_{name}")(tmp_path)
    assert all(map(torch.equal, (loaded.train.x, loaded.test.x), (images[:8, None], images[8:, None])))
    assert (loaded.train.y.tolist(), loaded.train.classes) == (list(range(8)), 10)


@pytest.mark.parametrize("suffix", [".gz", ""])
@pytest.mark.parametrize(("split", "classes", "first"), [
    ("byclass", 62, 0), ("bymerge", 47, 0), ("balanced", 47, 0), ("letters", 26, 1), ("digits", 10, 0),
    ("mnist", 10, 0),
])  # fmt: skip
def test_emnist_is_upright_and_counts_from_zero(tmp_path, no_network, split, classes, first, suffix):
    upright = pixels(classes, 28, 28)
    for part in ("train", "test"):
        stored = upright.transpose(1, 2).contiguous()
        write_pair(tmp_path / "emnist", f"emnist-{split}-{part}", stored, torch.arange(classes) + first, suffix)
    loaded = mnist.load_emnist(tmp_path, split)
    assert loaded.name == f"emnist_{split}"
    for examples in (loaded.train, loaded.test):
        assert torch.equal(examples.x, upright[:, None])
        assert (examples.y.tolist(), examples.classes) == (list(range(classes)), classes)


def test_emnist_comes_out_of_its_zip(tmp_path: Path, serve, monkeypatch: pytest.MonkeyPatch):
    image, label = idx(pixels(1, 28, 28)), idx(torch.tensor([3], dtype=torch.uint8))
    stem = "gzip/emnist-digits"
    data = zipball(
        {f"{stem}-{part}-images-idx3-ubyte.gz": gzip.compress(image) for part in ("train", "test")}
        | {f"{stem}-{part}-labels-idx1-ubyte.gz": gzip.compress(label) for part in ("train", "test")}
    )
    serve({EMNIST.url: data})
    monkeypatch.setattr(EMNIST, "md5", md5(data))
    assert mnist.load_emnist(tmp_path, "digits").train.y.tolist() == [3]


def test_mnist_files_that_disagree(subtests, tmp_path_factory):
    def call(row):
        images, labels = row
        tmp_path = tmp_path_factory.mktemp("row")
        for stem in ("train", "t10k"):
            write_pair(tmp_path / "mnist", stem, images, labels)
        mnist.load_mnist(tmp_path)

    rows = [
        ((pixels(3, 4), torch.arange(3)), "has 2 dimensions"),
        ((pixels(3, 4, 4), torch.arange(4)), "has the shape (4,), the 3 images need (3,)"),
        ((pixels(3, 4, 4), torch.tensor([0, 10, 2])), "has labels 0..10, expected 0..9"),
    ]  # fmt: skip
    all_say(subtests, call, rows, DataError)


# CIFAR
def records(labels: list[list[int]], images: Tensor) -> bytes:
    return b"".join(bytes(label) + image.numpy().tobytes() for label, image in zip(labels, images, strict=True))


def test_cifar10_reads_batches_in_order(tmp_path: Path, no_network: list[str]):
    images = pixels(12, 3, 32, 32)
    for i, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        two = slice(2 * i, 2 * i + 2)
        write(tmp_path / "cifar-10-batches-bin" / f"{name}.bin", records([[i], [9]], images[two]))
    loaded = cifar.load_cifar10(tmp_path)
    assert torch.equal(loaded.train.x, images[:10])
    assert loaded.train.y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert torch.equal(loaded.test.x, images[10:])
    assert loaded.test.y.tolist() == [5, 9]


def test_cifar100_takes_the_fine_label(tmp_path: Path, no_network: list[str]):
    images = pixels(2, 3, 32, 32)
    for name in ("train", "test"):
        write(tmp_path / "cifar-100-binary" / f"{name}.bin", records([[19, 99], [3, 7]], images))
    loaded = cifar.load_cifar100(tmp_path)
    assert (loaded.train.y.tolist(), loaded.train.classes) == ([99, 7], 100)
    assert torch.equal(loaded.test.x, images)


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"\0" * 3074, "not a whole number of records"), (b"", "0 bytes"), (b"\x0a" * 3073, "has the label 10")],
)
def test_cifar_broken_file(tmp_path: Path, data: bytes, says: str):
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        write(tmp_path / "cifar-10-batches-bin" / f"{name}.bin", data)
    faulty(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", lambda: cifar.load_cifar10(tmp_path), says)
