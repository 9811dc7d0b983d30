"""A partition as a file, so that two studies share one: Parquet with a row an example that is dealt.

Columns: `client`, an integer or text; `index`, the number of a training example from 0; and `home`, the domain a client counts as
one of, where the partition says it. Clients are numbered in the order of what they are called, their examples in the file's order.
What `write` makes also says how many training examples there are and has a digest of their labels: other data are refused then.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from fedfleet.datasets.files import DataError, whole
from fedfleet.datasets.parquet import Table
from fedfleet.datasets.partition import Partition

ABOUT = b"fedfleet.partition"


def write(path: Path, dealt: Partition, labels: Tensor, made_by: dict[str, Any]) -> None:
    """Write a partition of examples with these labels (M,); `made_by` says how it was made. Raises DataError."""
    owner = torch.arange(len(dealt.sizes)).repeat_interleave(dealt.sizes)
    columns = {"client": owner.numpy(), "index": dealt.indices.numpy()}
    if dealt.home is not None:
        columns["home"] = dealt.home[owner].numpy()
    about = {"examples": len(labels), "labels": _digest(labels), **made_by}
    table = pa.table(columns).replace_schema_metadata({ABOUT: json.dumps(about, sort_keys=True)})
    try:
        with whole(path) as file:
            pq.write_table(table, file)
    except OSError as e:
        raise DataError(f"{path}: cannot be written ({e.strerror or e}): make room, or mend the rights") from None


def read(path: Path, labels: Tensor | None = None) -> Partition:
    """Return the partition in a file, of examples with these labels (M,), where they are given. Raises DataError."""
    table = Table(path, ["index"], ["home"])
    index = table.values["index"]
    if (odd := (index != np.floor(index)) | (index < 0)).any():
        _fail(f"{table.at(int(odd.argmax()))}: index {index[odd.argmax()]:g}", "give the number of an example, from 0")
    indices = index.astype(np.int64)
    if labels is not None:
        _check_made_for(path, labels)
        if (over := indices >= len(labels)).any():
            row = int(over.argmax())
            _fail(
                f"{table.at(row)}: index {indices[row]}, and there are {len(labels)} training examples",
                "give the partition of these data",
            )
    first = np.zeros(len(indices), dtype=bool)
    first[np.unique(indices, return_index=True)[1]] = True
    if not first.all():
        row = int((~first).argmax())
        _fail(f"{table.at(row)}: example {indices[row]} is dealt twice", "deal each once")
    order = np.argsort(table.client, kind="stable")
    sizes = np.bincount(table.client, minlength=len(table.names))
    offsets = torch.from_numpy(np.concatenate([[0], sizes.cumsum()]).astype(np.int64))
    return Partition(torch.from_numpy(indices[order]), offsets, _home(table, order, offsets))


def digest(path: Path) -> str:
    """Return a digest of what a file deals to whom. Raises DataError."""
    dealt = read(path)
    result = hashlib.sha256()
    for part in (dealt.indices, dealt.offsets, *([] if dealt.home is None else [dealt.home])):
        result.update(part.numpy().astype("<i8").tobytes())
    return result.hexdigest()


def _home(table: Table, order: np.ndarray, offsets: Tensor) -> Tensor | None:
    if "home" not in table.values:
        return None
    told = table.values["home"]
    if (odd := (told != np.floor(told)) | (told < 0)).any():
        _fail(f"{table.at(int(odd.argmax()))}: home {told[odd.argmax()]:g}", "give the number of a domain, from 0")
    home = told.astype(np.int64)[order]
    result = torch.from_numpy(home[offsets[:-1].numpy()])
    if (home != result.repeat_interleave(offsets.diff()).numpy()).any():
        _fail(f"{table.path}: a client has two homes", "give all its rows the same")
    return result


def _check_made_for(path: Path, labels: Tensor) -> None:
    """Refuse data that a file, where it says so, was not made for."""
    if path.is_dir():
        return
    told = (pq.read_schema(path).metadata or {}).get(ABOUT)
    about = json.loads(told) if told else {}
    if about.get("examples", len(labels)) != len(labels):
        _fail(f"{path}: deals {about['examples']} training examples, and there are {len(labels)}", "give the same data")
    if about.get("labels", _digest(labels)) != _digest(labels):
        _fail(f"{path}: deals examples with other labels than these data's", "give the same data, in the same order")


def _digest(labels: Tensor) -> str:
    return hashlib.sha256(labels.numpy().astype("<i8").tobytes()).hexdigest()


def _fail(problem: str, fix: str) -> NoReturn:
    raise DataError(f"{problem}: {fix}")
