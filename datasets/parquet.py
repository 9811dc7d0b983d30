"""Examples in Parquet: a file, or a folder of them, read in batches; a mistake in it is named by file, column and row.

A row is an example. Its columns: `client`, an integer or text; `y`, an integer label from 0; the features, which are
`x`, lists of equally many numbers (nested for images), or else every other column, a number each; and a domain, an integer
or text, where there are domains. Unsigned bytes in `x` are pixels and stay bytes; features that are all integers stay
integers; all others become floats. The index that pandas writes beside the columns is no feature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedfleet.datasets.files import DataError
from fedfleet.simulator.errors import one_line

BATCH_ROWS = 1 << 16
BUFFER_BYTES = 1 << 20  # read at a time of a column; else a whole row group of it is in memory
WRITE_AGAIN = "write the file again"
INDEX = re.compile(r"__index_level_\d+__")  # what pandas calls an index without a name


class Rows(NamedTuple):
    """Consecutive rows: x (n, ...) float32, int64 or uint8, and y (n,) int64."""

    x: NDArray[Any]
    y: NDArray[np.int64]


class Bad(Exception):
    """A value that cannot be used: its place in the batch, what is wrong and the mend."""

    def __init__(self, row: int, problem: str, mend: str):
        self.row, self.problem, self.mend = row, problem, mend


class _Batch(NamedTuple):
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
            _fail(f"{self.file}: column {column!r}, row {self.start + e.row}: {e.problem}", e.mend)
        except pa.ArrowException as e:
            _fail(f"{self.file}: column {column!r}, from row {self.start}: {one_line(e)}", WRITE_AGAIN)


class ParquetSource:
    """Parquet files with the same columns, one after another. Every method raises DataError.

    Args:
        path: a file, or a folder of files.
        clients: whether there has to be a column `client`.
        domain: the column that says the domain; where it has another name than `domain`, it has to be there.
        like: other examples, whose features these have to have.

    Attributes:
        rows: their number.
        features: the columns that make x.
        domain: the column that says the domain, or None.
        left_out: columns that are an index of pandas, and no feature.

    """

    def __init__(self, path: Path, *, clients: bool = True, domain: str = "domain", like: ParquetSource | None = None):
        self.path = path
        self._files = [(file, _opened(file)) for file in _paths(path)]
        first, schema = self._files[0][0], _without_index(self._files[0][1].schema_arrow, domain)
        for file, opened in self._files:
            found = _without_index(opened.schema_arrow, domain)
            _check_schema(file, found, clients, domain)
            if {(field.name, field.type) for field in found} != {(field.name, field.type) for field in schema}:
                _fail(f"{file}: its columns are not those of {first}", "give all files the same names and types")
        self.domain = domain if domain in schema.names else None
        self.features = _features(schema, domain)
        if like is not None:
            if sorted(self.features) != sorted(like.features):
                odd = min({*self.features} ^ {*like.features})
                _fail(f"{path}: only one of it and {like.path} has the feature {odd!r}", "give both the same columns")
            self.features = like.features
        self._dtype = _dtype({_inner(schema.field(name).type) for name in self.features}, pixels=self.features == ["x"])
        everything = {name for _, opened in self._files for name in opened.schema_arrow.names}
        self.left_out = sorted(everything - {*schema.names})
        self.rows = sum(opened.metadata.num_rows for _, opened in self._files)
        if self.rows == 0:
            _fail(f"{path}: holds no rows", "give a file with examples")

    def coded(self, name: str) -> tuple[NDArray[np.int32], pa.Array]:
        """Return the value of every row of a column as a number (rows,), and the values, integers or text, as they first appear."""
        chunks = []
        for batch in self._batches([name]):
            with batch.naming(name):
                chunks.append(_coded(batch.columns[name]))
        found = pa.chunked_array(chunks).unify_dictionaries()
        return np.concatenate([chunk.indices.to_numpy() for chunk in found.chunks]), found.chunk(0).dictionary

    def batches(self, classes: int | None = None) -> Iterator[Rows]:
        """Yield all rows in order. Every example has one shape; labels are below `classes`, where given."""
        first = None
        for batch in self._batches([*self.features, "y"]):
            x = self._examples(batch)
            first = first or kind(x)
            if kind(x) != first:
                with batch.naming("x"):
                    raise Bad(0, f"is {kind(x)}, earlier rows are {first}", "make all rows alike")
            with batch.naming("y"):
                y = _plain(batch.columns["y"]).cast(pa.int64()).to_numpy()
                _all(y >= 0, lambda i, y=y: f"the label {y[i]} is negative", "number the classes from 0")
                if classes is not None:
                    mend = "mend the label, or say how many classes there are"
                    _all(y < classes, lambda i, y=y: f"the label {y[i]} is none of 0 to {classes - 1}", mend)
            yield Rows(x, y)

    def _examples(self, batch: _Batch) -> NDArray[Any]:
        if self.features == ["x"]:
            with batch.naming("x"):
                return _numbers(batch.columns["x"], self._dtype)
        x = np.empty((len(batch.columns), len(self.features)), dtype=self._dtype)
        for i, name in enumerate(self.features):
            with batch.naming(name):
                x[:, i] = _numbers(batch.columns[name], self._dtype)
        return x

    def _batches(self, names: list[str]) -> Iterator[_Batch]:
        for file, opened in self._files:
            yield from _batches_of(file, opened, names)


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
        opened = [(file, _opened(file)) for file in _paths(path)]
        names = [n for n in ("client", *numbers, *optional) if n not in optional or _has(opened, n)]
        for file, one in opened:
            _check_columns(file, one.schema_arrow, names)
        clients, values = [], {name: [] for name in names[1:]}
        self._files: list[tuple[Path, int]] = []
        for file, one in opened:
            for batch in _batches_of(file, one, names):
                with batch.naming("client"):
                    clients.append(_coded(batch.columns["client"]))
                for name, found in values.items():
                    with batch.naming(name):
                        number = _plain(batch.columns[name]).to_numpy(zero_copy_only=False).astype(np.float64)
                        _all(np.isfinite(number), lambda i: "is not a finite number", "mend it, or leave the row out")
                        found.append(number)
            self._files.append((file, one.metadata.num_rows))
        if not clients:
            _fail(f"{path}: holds no rows", "give a file with some")
        if len({c.type for c in clients}) > 1:
            _fail(f"{path}: the column 'client' is integers in one file and text in another", "make it one of them")
        whole = pa.chunked_array(clients).unify_dictionaries()
        names_found = whole.chunk(0).dictionary
        order = pc.call_function("array_sort_indices", [names_found])
        rank = np.empty(len(order), dtype=np.int32)
        rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
        self.client = np.concatenate([rank[chunk.indices.to_numpy()] for chunk in whole.chunks])
        self.names = names_found.take(order)
        self.values = {name: np.concatenate(found) for name, found in values.items()}

    def at(self, row: int) -> str:
        """Return where a row is, as in "in.parquet: row 3"."""
        for file, rows in self._files:
            if row < rows:
                return f"{file}: row {row}"
            row -= rows
        raise IndexError(row)


def kind(x: NDArray[Any]) -> str:
    """Say what an example is, as in "float32 of shape (32,)"."""
    return f"{x.dtype} of shape {x.shape[1:]}"


def _paths(path: Path) -> list[Path]:
    if not path.exists():
        _fail(f"{path}: there is no such file", "give a Parquet file, or a folder of them")
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.parquet"))
    if not found:
        _fail(f"{path}: no file in this folder ends in .parquet", "give a Parquet file, or a folder of them")
    return found


def _opened(file: Path) -> pq.ParquetFile:
    try:
        found = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)
        _ = found.schema_arrow.names  # names that are no text in UTF-8 are found when they are looked at
        return found
    except (OSError, UnicodeDecodeError, pa.ArrowException) as e:
        _fail(f"{file}: not a Parquet file ({one_line(e)})", "write it with pandas, Arrow, Spark or DuckDB")


def _batches_of(file: Path, opened: pq.ParquetFile, names: list[str]) -> Iterator[_Batch]:
    start = 0
    try:
        for columns in opened.iter_batches(BATCH_ROWS, columns=names):
            yield _Batch(file, start, columns)
            start += len(columns)
    except (OSError, pa.ArrowException) as e:
        _fail(f"{file}: cannot be read after row {start} ({one_line(e)})", WRITE_AGAIN)


def _has(opened: list[tuple[Path, pq.ParquetFile]], name: str) -> bool:
    return any(name in one.schema_arrow.names for _, one in opened)


def _check_columns(file: Path, schema: pa.Schema, names: list[str]) -> None:
    """Refuse a file without these columns, the first of clients, the others of numbers."""
    for name in names:
        if (times := schema.names.count(name)) != 1:
            among = f"no column {name!r} among {', '.join(schema.names)}" if times == 0 else f"two columns {name!r}"
            _fail(f"{file}: {among}", "add it, or rename the one that is meant" if times == 0 else "rename one")
        found = schema.field(name).type
        value = found.value_type if pa.types.is_dictionary(found) else found
        number = pa.types.is_integer(value) or (name != "client" and pa.types.is_floating(value))
        if not (number or (name == "client" and _is_text(value))):
            mend = "make it integers or text" if name == "client" else "make it numbers"
            _fail(f"{file}: column {name!r} is {found}", mend)


def _check_schema(file: Path, schema: pa.Schema, clients: bool, domain: str) -> None:
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        _fail(f"{file}: two columns {twice[0]!r}", "rename one")
    own = ("client", "y") if clients else ("y",)
    for name in own if domain == "domain" or not clients else (*own, domain):
        if name not in schema.names:
            mend = "give the name of one of them" if name == domain else "add it, or rename the one that is meant"
            _fail(f"{file}: no column {name!r} among {', '.join(schema.names)}", mend)
    if domain in ("client", "x", "y"):
        _fail(f"{file}: the column {domain!r} says no domain", "give the name of another")
    if domain != "domain" and "domain" in schema.names:
        _fail(f"{file}: beside {domain!r} there is a column 'domain'", "leave one of them out")
    for name in {"client", "y", domain} & set(schema.names):
        found = schema.field(name).type
        value = found.value_type if pa.types.is_dictionary(found) else found
        if not (pa.types.is_integer(value) or (name != "y" and _is_text(value))):
            _fail(
                f"{file}: column {name!r} is {found}", "make it integers" if name == "y" else "make it integers or text"
            )
    features = _features(schema, domain)
    if not features:
        _fail(f"{file}: no features", "add a column x of lists of numbers, or a column a feature")
    if features == ["x"] and (others := set(schema.names) - {"client", "x", "y", domain}):
        _fail(f"{file}: beside 'x' there is a column {min(others)!r}", "put it in x, or leave it out")
    for name in features:
        found = schema.field(name).type
        inner = _inner(found) if name == "x" else found
        if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
            _fail(f"{file}: column {name!r} is {found}", "make it numbers, or leave it out")


def _without_index(schema: pa.Schema, domain: str) -> pa.Schema:
    """Return the columns that are meant: without those that pandas says are an index, but for one that we read by its name."""
    told = (schema.pandas_metadata or {}).get("index_columns", [])
    index = {name for name in told if isinstance(name, str)} - {"client", "x", "y", domain}
    return pa.schema([f for f in schema if f.name not in index and not INDEX.fullmatch(f.name)])


def _features(schema: pa.Schema, domain: str) -> list[str]:
    return ["x"] if "x" in schema.names else [n for n in schema.names if n not in ("client", "y", domain)]


def _dtype(kinds: set[pa.DataType], *, pixels: bool) -> np.dtype[Any]:
    """Return what examples of numbers of these kinds are kept as."""
    if pixels and kinds == {pa.uint8()}:
        return np.dtype(np.uint8)
    numbers = kinds - {pa.bool_()}
    return np.dtype(np.int64 if numbers and all(map(pa.types.is_integer, numbers)) else np.float32)


def _inner(kind: pa.DataType) -> pa.DataType:
    """Return what lists, however deep, are lists of."""
    return _inner(kind.value_type) if _is_list(kind) or isinstance(kind, pa.FixedShapeTensorType) else kind


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _plain(column: Any) -> Any:
    """Return a column without nulls, and without the dictionary that categories come with."""
    if column.null_count:
        raise Bad(column.is_null().index(True).as_py(), "is null", "fill it in, or leave the row out")
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _coded(column: Any) -> Any:
    """Return a column of text or integers as numbers of its values. Raises ArrowException, for text that is none too."""
    column = _plain(column)
    if _is_text(column.type):
        column.validate(full=True)
    return column.cast(pa.large_string() if _is_text(column.type) else pa.int64()).dictionary_encode()


def _numbers(column: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return (n, ...) numbers, which have to be finite in the type they are kept as."""
    if isinstance(column, pa.FixedShapeTensorArray):
        _lists(column.storage)  # sees nulls
        x = column.to_numpy_ndarray()
    else:
        x = _lists(column)
    with np.errstate(over="ignore"):
        kept = x.astype(dtype, copy=False)
    if dtype == np.float32 or x.dtype == np.uint64:
        fine = np.asarray(np.isfinite(kept) if dtype == np.float32 else kept >= 0)  # beyond int64 is negative now
        _all(
            fine.reshape(len(x), -1).min(axis=1), lambda i: f"is not a finite {dtype}", "mend it, or leave the row out"
        )
    return kept


def _lists(column: Any) -> NDArray[Any]:
    """Return (n, ...) numbers of numbers, or of lists of equal length, however deep."""
    column = _plain(column)
    if not _is_list(column.type):
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        lengths = np.diff(column.offsets.to_numpy())
        width = int(lengths[0]) if len(lengths) else 0
        _all(
            lengths == width,
            lambda i: f"has {lengths[i]} entries, earlier rows {width}",
            "give all rows the same length",
        )
    if width == 0:
        raise Bad(0, "is an empty list", "give every row its features")
    try:
        inner = _lists(column.flatten())
    except Bad as e:
        raise Bad(e.row // width, e.problem, e.mend) from None
    return inner.reshape(len(column), width, *inner.shape[1:])


def _all(fine: NDArray[np.bool_], problem: Any, mend: str) -> None:
    if not fine.all():
        row = int(np.argmin(fine))
        raise Bad(row, problem(row), mend)


def _fail(problem: str, mend: str) -> NoReturn:
    raise DataError(f"{problem}: {mend}")
