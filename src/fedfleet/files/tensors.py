"""Files of tensors, safetensors, each with a digest of its own: a run that was killed has no summary to tell of damage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from fedfleet.files.writing import check_regular, whole
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.digest import digest

ABOUT, SEAL = "fedfleet", "sha256"
"""The one entry of a file's metadata, a mapping in JSON, since safetensors writes several in any order; its key of the digest."""
UNREADABLE = (OSError, SafetensorError, ValueError)
"""The errors that ``read`` raises."""


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors whole, with a digest of them and of what is to be known ``about`` them."""
    with whole(path) as scratch:
        apart, metadata = _sealed(tensors, about)
        save_file(apart, scratch, metadata)


def dumped(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of the file that ``write`` would write."""
    apart, metadata = _sealed(tensors)
    return save(apart, metadata)


def _sealed(
    tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors as safetensors takes them, each with memory of its own, and the metadata of their file."""
    apart = {name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for name, leaf in tensors.items()}
    said = dict(about or {})
    return apart, {ABOUT: json.dumps({**said, SEAL: _digest(said, apart)}, sort_keys=True)}


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a regular file by name; one of another writer has no digest, and is read as it is.

    Raises OSError, SafetensorError, and ValueError where the digest is not that of the contents.
    """
    said, sealed = _said(path)
    result = T.as_new(load_file(path))
    if sealed and said.pop(SEAL, None) != _digest(said, result):
        raise ValueError("damaged: its digest is not that of its contents")
    return result


def about(path: Path) -> Mapping[str, Any]:
    """Return what a file says about its tensors. Raises as ``read`` does."""
    return _said(path)[0]


def _said(path: Path) -> tuple[dict[str, Any], bool]:
    """Return what a file says about itself, and whether it was written here."""
    check_regular(path.stat())
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if ABOUT not in metadata:
        return dict(metadata), False
    try:
        said = json.loads(metadata[ABOUT])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ValueError("damaged: what it says about itself cannot be read")
    return said, True


def _digest(said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    return digest(json.dumps(said, sort_keys=True), tensors)
