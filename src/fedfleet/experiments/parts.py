"""A Parquet table that grows while a run goes on: written part by part, so that memory does not grow with it.

The table is its file plus the parts, numbered, that its file does not hold yet; the file's metadata say which it holds. So
there is no moment at which a killed process leaves a row twice or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedfleet.files import parquet
from fedfleet.files.writing import own_folder, whole

HELD = b"fedfleet.parts"
ROWS = 1 << 18  # kept in memory until the next part, at most


class Parts:
    """The table at ``path``, whose parts are in the folder ``path`` without its suffix. ``schema`` has its columns and types.

    Raises ConfigError for files that cannot be read, OSError where the folder of the parts is a link.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self.path = path
        self._folder = path.with_suffix("")
        if self._folder.is_symlink():
            own_folder(self._folder)
        self._schema = schema.remove_metadata()
        self._waiting: list[pa.Table] = []
        self._rows = 0
        self._taken: list[tuple[int, pa.Table]] = []
        self._last = max([_held(path), *(number for number, _ in self._parts())])

    def add(self, rows: pa.Table) -> None:
        """Add rows."""
        self._waiting.append(rows)
        self._rows += len(rows)

    @property
    def full(self) -> bool:
        """Whether so many rows wait that they should be written."""
        return self._rows > ROWS

    def take(self) -> None:
        """Make a part of the rows that wait, for ``write``."""
        if not self._rows:
            return
        table = pa.concat_tables(self._waiting).cast(self._schema)
        self._last += 1
        self._taken.append((self._last, table))
        self._waiting, self._rows = [], 0

    def write(self) -> None:
        """Write the parts that were taken, in another thread if need be; one that cannot be written is kept for the next time."""
        while self._taken:
            number, table = self._taken[0]
            # The scratch file is beside the table, since the folder has nothing but parts.
            with whole(own_folder(self._folder) / f"{number:06}.parquet", beside=self.path) as scratch:
                pq.write_table(table, scratch, write_page_checksum=True)
            self._taken.pop(0)

    def flush(self) -> None:
        """Write the rows that wait."""
        self.take()
        self.write()

    def finish(self, wanted: Callable[[pa.Table], pa.Table] = lambda table: table) -> int:
        """Write one file of everything, or of what is ``wanted`` of it, remove the parts, and return the number of its rows."""
        self.flush()
        held = {HELD: str(self._last).encode()}
        schema = self._schema.with_metadata(held)
        rows = 0
        with whole(self.path) as scratch, pq.ParquetWriter(scratch, schema, write_page_checksum=True) as writer:
            for table in map(wanted, self._tables()):
                rows += len(table)
                writer.write_table(table.replace_schema_metadata(schema.metadata))
        for _, part in self._parts():
            part.unlink()
        if self._folder.exists():
            self._folder.rmdir()
        return rows

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the rows in order, a piece at a time."""
        if self.path.exists():
            with parquet.readable(self.path) as file:
                for i in range(file.num_row_groups):
                    yield file.read_row_group(i).cast(self._schema)
        held = _held(self.path)
        for number, part in self._parts():
            if number > held:
                with parquet.readable(part) as file:
                    yield file.read().cast(self._schema)

    def _parts(self) -> list[tuple[int, Path]]:
        return sorted((int(p.stem), p) for p in self._folder.glob("*.parquet") if p.stem.isdecimal())


def _held(path: Path) -> int:
    """Return the number of the last part that a file holds."""
    if not path.exists():
        return 0
    with parquet.readable(path) as file:
        return int((file.schema_arrow.metadata or {}).get(HELD, b"0"))
