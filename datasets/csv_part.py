"""CSV, a file or a folder of them, read in batches as Parquet is: a first pass finds of what type each column is in all files.

Columns are separated by commas and named by the first line. A column is integers, numbers, true and false, or else text; an entry
with nothing in it is null. Only `.csv` and `.csv.gz` are read, the second as it is unpacked.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from fedfleet.datasets.files import DataError
from fedfleet.datasets.parquet import Batch, fail, paths
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.plain_text import LOOKED, OtherEncoding, check_encoding

SUFFIXES = (".csv", ".csv.gz")
BLOCK_BYTES = 1 << 23  # read at a time; a row has to fit
KINDS = (pa.int64(), pa.float64(), pa.bool_(), pa.string())
FIX = "write it again, with commas between columns, in UTF-8"


class CsvPart:
    """A CSV file, whose first pass is made here. Raises DataError where it is none.

    Args:
        file: its path.
        names: columns that are not numbers for being calculated with: integers only where they are written as such, without
            zeros before them.
        texts: columns that are text, whatever is in them.

    """

    def __init__(self, file: Path, names: Collection[str], texts: Collection[str]):
        self.file, self.rows = file, 0
        with _naming(file):
            with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as opened:
                check_encoding(opened.read(LOOKED))
            columns = self._open({}).schema.names
        if twice := [name for name in columns if columns.count(name) > 1]:
            fail(f"{file}: two columns {twice[0]!r}", "rename one")
        if len(columns) == 1 and re.search("[;\t|]", columns[0]):
            fail(f"{file}: its columns are not separated by commas", "write it with commas, as df.to_csv does")
        self._alive = {name: [pa.string()] if name in texts else [*KINDS] for name in columns}
        self._odd: dict[str, tuple[int, str]] = {}  # the first entry of a column that is no number
        with _naming(file):
            for batch in self._open(dict.fromkeys(columns, pa.string())):
                for name in columns:
                    self._narrow(name, batch[name], name in names)
                self.rows += len(batch)
        self.schema = pa.schema({})

    def unify(self, parts: Sequence[CsvPart]) -> None:
        """Take of every column the first type that it may have in all files."""
        first = {}
        for name in self._alive:
            alive = [part._alive[name] for part in parts if name in part._alive]
            first[name] = next(kind for kind in KINDS if all(kind in of for of in alive))
        self.schema = pa.schema(first)

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield all rows of some columns in order. Raises DataError."""
        start = 0
        with _naming(self.file):
            for columns in self._open({name: self.schema.field(name).type for name in names}, names):
                yield Batch(self.file, start, columns)
                start += len(columns)

    def text(self, name: str) -> str:
        """Return which entry of a column is no number."""
        row, entry = self._odd.get(name, (0, ""))
        return f"{self.file}: column {name!r}, row {row}: {entry[:40]!r} is no number"

    def _open(self, types: dict[str, pa.DataType], names: Sequence[str] | None = None) -> pa_csv.CSVStreamingReader:
        return pa_csv.open_csv(
            self.file,
            pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),  # with threads rows go without numbers
            pa_csv.ParseOptions(newlines_in_values=True),
            pa_csv.ConvertOptions(
                column_types=types,
                include_columns=None if names is None else [*names],
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    def _narrow(self, name: str, column: pa.Array, exact: bool) -> None:
        """Strike out the types that a column is not of."""
        alive = self._alive[name]
        if pa.int64() in alive and not _is(column, pa.int64(), exact):
            alive.remove(pa.int64())
            if _is(column, pa.int64()):  # with zeros before them: no numbers, then, and text is left
                alive[:] = KINDS[-1:]
        if pa.float64() in alive and pa.int64() not in alive and not _is(column, pa.float64()):
            alive.remove(pa.float64())
            self._odd[name] = self._first_odd(column)
        if pa.bool_() in alive and not _is(column, pa.bool_()):
            alive.remove(pa.bool_())

    def _first_odd(self, column: pa.Array) -> tuple[int, str]:
        low, high = 0, len(column)  # all before low are numbers, one before high is none
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _is(column.slice(low, middle - low), pa.float64()) else (low, middle)
        return self.rows + low, column[low].as_py()


def csv_parts(path: Path, names: Collection[str], texts: Collection[str]) -> list[CsvPart]:
    """Return the files of a path, whose columns are of the same types. Raises DataError."""
    parts = [CsvPart(file, names, texts) for file in paths(path, SUFFIXES, "CSV")]
    for part in parts:
        part.unify(parts)
    return parts


def _is(column: pa.Array, kind: pa.DataType, exact: bool = False) -> bool:
    """Return whether all text in a column is of a type; if `exact` as this type is written."""
    try:
        result = pc.cast(column, kind)
    except pa.ArrowInvalid:
        return False
    return not exact or pc.cast(result, pa.string()).equals(column)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Say which file cannot be read, and in which of its rows, from 0."""
    try:
        yield
    except OtherEncoding as e:
        raise DataError(f"{file}: {e}") from None
    except (OSError, EOFError, UnicodeDecodeError, pa.ArrowException) as e:
        said = one_line(e)
        if row := re.search(r"Row #(\d+): ", said):
            fail(
                f"{file}: row {int(row[1]) - 2}: {said[row.end() :][:200]}",
                "mend it: text with commas is in quotes, all in UTF-8",
            )
        fail(f"{file}: not readable as CSV ({said[:200]})", FIX)
