"""Data sets that a configuration names by their layout and their path: each is read whole, and checked, into examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from fedfleet.datasets import hugging_face, image_folder, leaf, tff, torchvision_sets
from fedfleet.datasets.csv_part import SUFFIXES
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.datasets.parts import Parts, put_together


class Source(NamedTuple):
    """A layout: its options, what reads it, one line for `fedfleet list`."""

    options: type[BaseModel]
    read: Callable[[Any], Parts]
    about: str


SOURCES: Mapping[str, Source] = {
    "image_folder": Source(
        image_folder.FolderOptions, image_folder.read, "images in a folder a client, domain or class"
    ),
    "leaf": Source(leaf.LeafOptions, leaf.read, "LEAF's JSON: FEMNIST, Shakespeare, Sent140, CelebA"),
    "tff": Source(tff.TffOptions, tff.read, "TensorFlow Federated's HDF5, by h5py"),
    "hf": Source(
        hugging_face.HuggingFaceOptions, hugging_face.read, "Hugging Face's datasets: a local folder or a hub id"
    ),
    "torchvision": Source(
        torchvision_sets.TorchvisionOptions, torchvision_sets.read, "torchvision's, from a local folder"
    ),
}


def load(name: str, options: Any) -> Dataset | FederatedDataset:
    """Return the data of a source, in clients where it says whose they are. Raises DataError."""
    return put_together(name, SOURCES[name].read(options))


def source_of(path: Path) -> str | None:
    """Return the layout that a path's looks tell, where they do: HDF5, CSV, LEAF's two folders, what save_to_disk wrote."""
    if path.suffix in (".h5", ".hdf5"):
        return "tff"
    if any((path / "train").glob("*.json")) and any((path / "test").glob("*.json")):
        return "leaf"
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):  # of save_to_disk
        return "hf"
    files = list(path.iterdir()) if path.is_dir() else [path]
    of_csv = any(file.name.endswith(SUFFIXES) for file in files)
    return "csv" if of_csv and not any(file.suffix == ".parquet" for file in files) else None
