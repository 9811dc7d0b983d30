"""Folder in which the tests find real data: $FEDFLEET_DATA, else `shared/data` beside the repository."""

import os
from pathlib import Path

import pytest

from fedfleet.datasets.examples import Dataset
from fedfleet.datasets.mnist import load_fashion_mnist


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The data directory with real data, or skip."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("FEDFLEET_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no real data: set FEDFLEET_DATA, or put it in {beside}")
    return folder


@pytest.fixture(scope="session")
def fashion_mnist(data_folder: Path) -> Dataset:
    """Fashion-MNIST, or skip; never a download."""
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    missing = [name for name in names if not (data_folder / "fashion-mnist" / name).is_file()]
    if missing:
        pytest.skip(f"no real Fashion-MNIST: {missing[0]} is not in {data_folder / 'fashion-mnist'}")
    return load_fashion_mnist(data_folder)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse every download; the list fills with the URLs asked for."""
    asked: list[str] = []

    def refuse(request, timeout=None):
        asked.append(request.full_url)
        raise OSError("network is\nunreachable")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return asked
