"""Read and write Parquet tables whose pages have checksums. One that is damaged is refused in one line that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedfleet.files.writing import check_regular, whole
from fedfleet.simulator.errors import ConfigError, one_line

DENSEST = 1 << 12  # rows a byte of a file, at most: a table that is smaller was made to fill memory


def write(table: pd.DataFrame | pa.Table, path: Path) -> None:
    """Write a table whole."""
    rows = table if isinstance(table, pa.Table) else pa.Table.from_pandas(table, preserve_index=False)
    with whole(path) as scratch:
        pq.write_table(rows, scratch, write_page_checksum=True)


@contextmanager
def readable(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a table, to be read within the context.

    Raises FileNotFoundError, and ConfigError for one that cannot be read, also where that shows only as it is read.
    """
    try:
        size = path.stat()
        check_regular(size)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if file.metadata.num_rows > DENSEST * size.st_size:
                raise ValueError(f"{file.metadata.num_rows:,} rows in {size.st_size:,} bytes")
            if len({*file.schema_arrow.names}) < len(file.schema_arrow.names):
                raise ValueError("two columns of one name")
            yield file
    except (FileNotFoundError, ConfigError):
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, MemoryError, pa.ArrowException) as e:
        raise ConfigError(f"{path}: not readable as Parquet ({one_line(e)[:200]})") from None


def read(path: Path) -> pd.DataFrame:
    """Return a table. Raises as ``readable`` does, and ConfigError where rounds are no numbers."""
    with readable(path) as file:
        result: Any = file.read().replace_schema_metadata(None)  # of pandas, whose reader trusts what stands there
        frame = result.to_pandas()
    if len(frame) and "round" in frame and not pd.api.types.is_numeric_dtype(frame["round"]):
        raise ConfigError(f"{path}: its column 'round' has no numbers: bring back the file that the run wrote")
    return frame
