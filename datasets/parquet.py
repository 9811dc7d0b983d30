"""Parquet, a file or a folder of them, read in batches; a mistake in it is named by file, column and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedfleet.datasets.columns import Bad, check, coded, is_text, plain, value_of
from fedfleet.datasets.files import DataError, check_once, ending, entries
from fedfleet.simulator.errors import one_line

BATCH_ROWS = 1 << 16
BUFFER_BYTES = 1 << 20  # read at a time of a column; else a whole row group of it is in memory
WRITE_AGAIN = "write the file again"


class Batch(NamedTuple):
    """Columns of consecutive rows of a file, and the number of the first of them in it."""

    file: Path
    start: int
    columns: pa.RecordBatch

    @contextmanager
    def naming(self, column: str) -> Iterator[None]:
        """Say where a bad value is."""
        try:
            yield
        except Bad as e:
            fail(f"{self.file}: column {column!r}, row {self.start + e.row}: {e.problem}", e.fix)
        except pa.ArrowException as e:
            fail(f"{self.file}: column {column!r}, from row {self.start}: {one_line(e)}", WRITE_AGAIN)


class Part(Protocol):
    """A file with rows: where it is, its columns, how many rows there are."""

    file: Path
    schema: pa.Schema
    rows: int

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows of some columns in order. Raises DataError."""
        ...

    def text(self, name: str) -> str:
        """Return what a column that is wanted as numbers is instead, and where that is known."""
        ...


class ParquetPart:
    """A Parquet file. Raises DataError where it is none."""

    def __init__(self, file: Path):
        self.file = file
        try:
            self._opened = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)
            self.schema = self._opened.schema_arrow
            _ = self.schema.names  # names that are no text in UTF-8 are found when they are looked at
        except (OSError, UnicodeDecodeError, pa.ArrowException) as e:
            fail(f"{file}: not a Parquet file ({one_line(e)})", "write it with pandas, Arrow, Spark or DuckDB")
        self.rows: int = self._opened.metadata.num_rows

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows of some columns in order. Raises DataError."""
        start = 0
        try:
            for columns in self._opened.iter_batches(BATCH_ROWS, columns=[*names]):
                yield Batch(self.file, start, columns)
                start += len(columns)
        except (OSError, pa.ArrowException) as e:
            fail(f"{self.file}: cannot be read after row {start} ({one_line(e)})", WRITE_AGAIN)

    def text(self, name: str) -> str:
        """Return what type a column is of."""
        return f"{self.file}: column {name!r} is {self.schema.field(name).type}"


class Table:
    """Parquet of one line a row, `client` and columns of numbers, read whole. Raises DataError.

    Attributes:
        path: the file, or the folder of files.
        client: (rows,) int32, the number of the row's client in `names`.
        names: (N,) the clients, integers or text, rising.
        values: name -> (rows,) float64, finite; of the optional columns those that are there.

    """

    def __init__(self, path: Path, numbers: Sequence[str], optional: Sequence[str] = ()):
        self.path = path
        parts = [ParquetPart(file) for file in paths(path)]
        check_once([part.file for part in parts if part.rows])
        names = [n for n in ("client", *numbers, *optional) if n not in optional or _has(parts, n)]
        for part in parts:
            _check_columns(part.file, part.schema, names)
        clients, values = [], {name: [] for name in names[1:]}
        self._files: list[tuple[Path, int]] = []
        for part in parts:
            for batch in part.batches(names):
                with batch.naming("client"):
                    clients.append(coded(batch.columns["client"]))
                for name, result in values.items():
                    with batch.naming(name):
                        number = plain(batch.columns[name]).to_numpy(zero_copy_only=False).astype(np.float64)
                        check(np.isfinite(number), lambda i: "is not a finite number", "mend it, or leave the row out")
                        result.append(number)
            self._files.append((part.file, part.rows))
        if not clients:
            fail(f"{path}: holds no rows", "give a file with some")
        if len({c.type for c in clients}) > 1:
            fail(f"{path}: the column 'client' is integers in one file and text in another", "make it one of them")
        whole = pa.chunked_array(clients).unify_dictionaries()
        names_found = whole.chunk(0).dictionary
        order = pc.call_function("array_sort_indices", [names_found])
        rank = np.empty(len(order), dtype=np.int32)
        rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
        self.client = np.concatenate([rank[chunk.indices.to_numpy()] for chunk in whole.chunks])
        self.names = names_found.take(order)
        self.values = {name: np.concatenate(result) for name, result in values.items()}

    def at(self, row: int) -> str:
        """Return where a row is, as in "in.parquet: row 3"."""
        for file, rows in self._files:
            if row < rows:
                return f"{file}: row {row}"
            row -= rows
        raise IndexError(row)


def paths(path: Path, suffixes: Sequence[str] = (".parquet",), kind: str = "Parquet") -> list[Path]:
    """Return a file, or those of a folder whose names end in one of the suffixes. Raises DataError."""
    fix = f"give a {kind} file, or a folder of them"
    if not path.exists():
        fail(f"{path}: there is no such file", fix)
    if not path.is_dir():
        return [path]
    result = ending(path, suffixes)
    if not result:
        fail(f"{path}: no file in this folder ends in {suffixes[0]}", fix)
    for at in entries(path):
        if at.is_dir() and (below := ending(at, suffixes)):
            fail(
                f"{below[0]}: it lies in a folder beside {result[0].name}, and would be left out",
                "put all in one folder",
            )
    return result


def fail(problem: str, fix: str) -> NoReturn:
    """Raise the DataError that says so."""
    raise DataError(f"{problem}: {fix}")


def _has(parts: list[ParquetPart], name: str) -> bool:
    return any(name in part.schema.names for part in parts)


def _check_columns(file: Path, schema: pa.Schema, names: list[str]) -> None:
    """Refuse a file without these columns, the first of clients, the others of numbers."""
    for name in names:
        if (times := schema.names.count(name)) != 1:
            among = f"no column {name!r} among {', '.join(schema.names)}" if times == 0 else f"two columns {name!r}"
            fail(f"{file}: {among}", "add it, or rename the one that is meant" if times == 0 else "rename one")
        result = schema.field(name).type
        value = value_of(result)
        number = pa.types.is_integer(value) or (name != "client" and pa.types.is_floating(value))
        if not (number or (name == "client" and is_text(value))):
            fix = "make it integers or text" if name == "client" else "make it numbers"
            fail(f"{file}: column {name!r} is {result}", fix)
