"""Data sets that a configuration names by their layout and their path: each is read whole, and checked, into examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfleet.datasets import hugging_face, image_folder, leaf, tff, torchvision_sets
from fedfleet.datasets.csv_part import SUFFIXES
from fedfleet.datasets.files import ending, entries
from fedfleet.datasets.parts import Parts
from fedfleet.simulator.registry import Entry

SOURCES: Mapping[str, Entry[Callable[[Any], Parts]]] = {
    "image_folder": Entry(
        image_folder.FolderOptions, image_folder.read, "images in a folder a client, domain or class"
    ),
    "leaf": Entry(leaf.LeafOptions, leaf.read, "LEAF's JSON: FEMNIST, Shakespeare, Sent140, CelebA"),
    "tff": Entry(tff.TffOptions, tff.read, "TensorFlow Federated's HDF5, by h5py"),
    "hf": Entry(
        hugging_face.HuggingFaceOptions, hugging_face.read, "Hugging Face's datasets: a local folder or a hub id"
    ),
    "torchvision": Entry(
        torchvision_sets.TorchvisionOptions, torchvision_sets.read, "torchvision's, from a local folder"
    ),
}


def source_of(path: Path) -> str | None:
    """Return the layout that a path's looks tell, where they do: HDF5, CSV, LEAF's two folders, what save_to_disk wrote."""
    if path.suffix in (".h5", ".hdf5"):
        return "tff"
    if all((path / part).is_dir() and ending(path / part, (".json",)) for part in ("train", "test")):
        return "leaf"
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):  # of save_to_disk
        return "hf"
    files = entries(path) if path.is_dir() else [path]
    of_csv = any(file.name.lower().endswith(SUFFIXES) for file in files)
    return "csv" if of_csv and not any(file.suffix.lower() == ".parquet" for file in files) else None
