"""Parquet to a folder of clients on disk: rows in any order in, each client's rows together out.

A first pass reads the column `client` alone and fixes where every row will lie; a second one reads all rows and writes
each in its place, in a file that is mapped into memory. What is held besides is at most about 60 bytes a row, whatever
the features, and the clients' names.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedfleet.datasets.disk import CLIENTS, EXAMPLES, TOTALS, Totals, columns
from fedfleet.datasets.files import DataError
from fedfleet.datasets.parquet import ParquetSource, kind
from fedfleet.simulator.arithmetic import rng

HOLE_BYTES = 1 << 16  # zeros from this size on are left out of a file, and read as zeros all the same

Tell = Callable[[int, int], None]
"""Told how many rows are written, and of how many."""


def convert(
    source: Path,
    out: Path,
    *,
    test: Path | None = None,
    hold_out: float = 0.1,
    classes: int | None = None,
    tell: Tell = lambda done, total: None,
) -> Totals:
    """Convert Parquet to the new folder `out`, which appears once it is whole; `datasets/parquet.py` says which columns.

    Args:
        source: a Parquet file, or a folder of them.
        out: a folder that does not exist.
        test: Parquet of test examples; its column `client`, if any, is not read.
        hold_out: without `test`, the share of clients, a fixed draw, whose examples become the test examples.
        classes: labels are below it; one more than the largest, if not given.
        tell: shows progress.

    Raises DataError, in one line, and leaves nothing behind.

    """
    if out.exists():
        raise DataError(f"{out}: exists: choose another folder, or remove it first")
    train = ParquetSource(source)
    tests = None if test is None else ParquetSource(test, clients=False)
    layout = _layout(train, None if tests else hold_out)
    counts, kept = layout.count[: layout.kept], layout.kept
    with _beside(out) as folder:
        domains = _Domains(layout, train.path)
        largest = _write_examples(folder / EXAMPLES, train, tests, layout, domains, classes, tell)
        domain, domain_names = domains.of_kept()
        places = {"start": counts.cumsum() - counts, "count": counts, "domain": domain}
        clients = pa.record_batch({"client": layout.names[:kept], **places})
        with pa.ipc.new_file(str(folder / CLIENTS), clients.schema) as writer:
            writer.write_batch(clients)
        totals = Totals(
            clients=kept,
            examples=int(counts.sum()),
            test_examples=train.rows + (tests.rows if tests else 0) - int(counts.sum()),
            min_examples=int(counts.min()),
            max_examples=int(counts.max()),
            classes=classes or largest + 1,
            domains=domain_names,
            file_bytes={name: (folder / name).stat().st_size for name in (CLIENTS, EXAMPLES)},
        )
        (folder / TOTALS).write_text(totals.model_dump_json(indent=2), encoding="utf-8")
    return totals


@dataclass(frozen=True)
class _Layout:
    """Where the rows go. Clients are numbered as they first appear; those held out come last, and are clients no more.

    Attributes:
        client: (rows,) the client of every row of the input.
        row: (rows,) its row in the output.
        count: (N,) the rows of every client.
        names: (N,) what the input calls them.
        kept: how many are not held out.

    """

    client: NDArray[np.int32]
    row: NDArray[np.int64]
    count: NDArray[np.int64]
    names: pa.Array
    kept: int


def _layout(source: ParquetSource, hold_out: float | None) -> _Layout:
    codes, names = source.clients()
    held = 0 if hold_out is None else max(1, round(hold_out * len(names)))
    if held >= len(names):
        raise DataError(
            f"{source.path}: holding out {held} of {len(names)} clients for testing leaves none: hold out a smaller share, or "
            f"give a file of test examples"
        )
    is_held = np.zeros(len(names), dtype=bool)
    is_held[rng.sample(rng.fold(rng.key(0), "hold_out"), len(names), held).numpy()] = True
    order = np.argsort(is_held, kind="stable")
    number = np.empty(len(names), dtype=np.int32)
    number[order] = np.arange(len(names), dtype=np.int32)
    client = number[codes]
    row = np.empty(len(client), dtype=np.int64)
    row[np.argsort(client, kind="stable")] = np.arange(len(client))
    return _Layout(client, row, np.bincount(client), names.take(pa.array(order)), len(names) - held)


def _write_examples(
    path: Path,
    train: ParquetSource,
    tests: ParquetSource | None,
    layout: _Layout,
    domains: _Domains,
    classes: int | None,
    tell: Tell,
) -> int:
    """Write every row in its place, those of `tests` at the end, and return the largest label."""
    total = train.rows + (tests.rows if tests else 0)
    x = y = None
    largest = done = 0
    for rows in itertools.chain(train.batches(classes), tests.batches(classes) if tests else ()):
        if x is None or y is None:
            x, y = _allocate(path, total, rows.x)
        if tests and kind(x) != kind(rows.x):
            raise DataError(f"{tests.path}: x is {kind(rows.x)}, and that of the clients {kind(x)}: make them alike")
        end = done + len(rows.y)
        to = layout.row[done:end] if done < train.rows else slice(done, end)
        x[to], y[to] = rows.x, rows.y
        if rows.domain is not None and done < train.rows:
            domains.add(layout.client[done:end], rows.domain)
        largest, done = max(largest, int(rows.y.max())), end
        tell(done, total)
    return largest


class _Domains:
    """The domain of every client, gathered row by row. Without a row, every client is of domain 0."""

    def __init__(self, layout: _Layout, path: Path):
        self._layout, self._path = layout, path
        self._of = np.full(len(layout.count), -1, dtype=np.int64)
        self._number: dict[Any, int] = {}

    def add(self, client: NDArray[np.int32], column: pa.Array) -> None:
        """Add the domains of the rows of clients (n,). Raises DataError where a client has two."""
        coded = column.dictionary_encode()
        numbers = [self._number.setdefault(v, len(self._number)) for v in coded.dictionary.to_pylist()]
        mine = np.array(numbers)[coded.indices.to_numpy()]
        new = self._of[client] < 0
        self._of[client[new]] = mine[new]
        if (wrong := self._of[client] != mine).any():
            row = int(np.argmax(wrong))
            two = sorted((column[row].as_py(), list(self._number)[self._of[client[row]]]))
            raise DataError(
                f"{self._path}: column 'domain': client {self._layout.names[client[row]].as_py()!r} has examples of {two[0]!r} "
                f"and {two[1]!r}: make a client a domain of it"
            )

    def of_kept(self) -> tuple[NDArray[np.int64], list[Any]]:
        """Return the domains of the clients that are kept, numbered in the order of the domains' names, and these names."""
        if not self._number:
            return np.zeros(self._layout.kept, dtype=np.int64), [0]
        values = list(self._number)
        used, of = np.unique(self._of[: self._layout.kept], return_inverse=True)
        names = [values[i] for i in used]
        order = sorted(range(len(names)), key=names.__getitem__)
        return np.argsort(order)[of], [names[i] for i in order]


def _allocate(path: Path, rows: int, like: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Make an IPC file of zeros, x (rows, ...) and y (rows,), and return the columns, to be written in place."""
    width = math.prod(like.shape[1:])
    with tempfile.TemporaryFile(dir=path.parent) as file:
        file.truncate(rows * max(width * like.itemsize, 8))
        zeros = pa.py_buffer(np.memmap(file, mode="r"))  # a hole: it takes no space, on disk or in memory
        pixels = pa.Array.from_buffers(pa.from_numpy_dtype(like.dtype), rows * width, [None, zeros])
        tensor = pa.fixed_shape_tensor(pixels.type, like.shape[1:])
        x = pa.ExtensionArray.from_storage(tensor, pa.FixedSizeListArray.from_arrays(pixels, width))
        batch = pa.record_batch({"x": x, "y": pa.Array.from_buffers(pa.int64(), rows, [None, zeros])})
        with _SparseFile(path, "w") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    if hasattr(os, "posix_fallocate"):  # else a full disk would end the process by a signal, in the middle of writing
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    whole = np.memmap(path, mode="r+")

    def writable(column: NDArray[Any]) -> NDArray[Any]:
        start = column.ctypes.data - whole.ctypes.data
        return whole[start : start + column.nbytes].view(column.dtype).reshape(column.shape)

    found = columns(whole)
    return writable(found["x"]), writable(found["y"])


class _SparseFile(io.FileIO):
    """A file that skips over large buffers, all of which hold zeros here, instead of writing them."""

    def write(self, data: Any, /) -> int:
        if (size := memoryview(data).nbytes) < HOLE_BYTES:
            return super().write(data)
        self.seek(size, io.SEEK_CUR)
        return size


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Give a folder to write in, which becomes `out` at the end; if that is not reached, nothing is left."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as scratch:
            part = Path(scratch) / out.name
            part.mkdir()
            yield part
            part.rename(out)
    except OSError as e:
        raise DataError(f"{out}: cannot be written ({e.strerror or e}): make room, or mend the rights") from None
