"""Read clients' devices from Parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.fleet.hardware import Hardware

NEEDED = ("gflops", "down_mbps", "up_mbps")


def read_table(path: str, clients: int | None) -> Hardware:
    """Return the devices of a file in the order of its rows, or with ``clients`` N that of client i at i.

    Columns: gflops, down_mbps, up_mbps, all positive; latency_s, not negative, 0 if left out; client, numbers of clients, row i
    if left out. Others are ignored. Raises ConfigError naming file and row, from 0.
    """
    where = f"devices.path={path!r}"
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: there is no such file: give the path of a Parquet file")
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as e:
        raise ConfigError(
            f"{where}: not readable as Parquet ({one_line(e)}): give the path of a Parquet file"
        ) from None
    if missing := [c for c in NEEDED if c not in table.column_names]:
        have = ", ".join(map(str, table.column_names)) or "none"
        raise ConfigError(f"{where}: column {missing[0]!r} is missing, it has {have}: add it")
    if len(table) == 0:
        raise ConfigError(f"{where}: it has no rows: give at least one device")
    columns = [_numbers(where, table, name, positive=True) for name in NEEDED]
    if "latency_s" in table.column_names:
        columns.append(_numbers(where, table, "latency_s", positive=False))
    else:
        columns.append(torch.zeros(len(table), dtype=torch.float64))
    devices = Hardware(*columns)
    return devices if clients is None else devices.at(_rows(where, table, clients))


def _numbers(where: str, table: pa.Table, name: str, *, positive: bool) -> torch.Tensor:
    kind = table.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ConfigError(f"{where}: column {name!r} is of type {kind}: make it numbers")
    column = table.column(name)
    values = column.to_numpy().astype(np.float64)  # nulls become NaN
    wrong = ~(np.isfinite(values) & ((values > 0) if positive else (values >= 0)))
    if wrong.any():
        row = int(wrong.argmax())
        result = column[row].as_py()
        what = "a positive number" if positive else "a number, at least 0"
        raise ConfigError(f"{where}, row {row}: {name} is {'null' if result is None else result}: give {what}")
    return torch.tensor(values)


def _rows(where: str, table: pa.Table, clients: int) -> torch.Tensor:
    """Return the row (N,) of each client."""
    wrap = "or set devices.map=hash"
    ids = np.arange(len(table))
    if "client" in table.column_names:
        column = table.column("client")
        if not pa.types.is_integer(column.type) or column.null_count:
            kind = "with nulls" if pa.types.is_integer(column.type) else f"of type {column.type}"
            raise ConfigError(f"{where}: column 'client' is {kind}: give the number of a client in each row, {wrap}")
        ids = column.to_numpy().astype(np.int64)
    if (unknown := (ids < 0) | (ids >= clients)).any():
        row = int(unknown.argmax())
        raise ConfigError(
            f"{where}, row {row}: client {ids[row]} is unknown, population.clients={clients}: leave the row out, {wrap}"
        )
    order = ids.argsort(kind="stable")
    ordered = ids[order]
    if (again := ordered[1:] == ordered[:-1]).any():
        row = int(order[1:][again].min())
        raise ConfigError(f"{where}, row {row}: client {ids[row]} has a row already: leave one out, {wrap}")
    if len(ids) < clients:
        absent = np.concatenate([ordered != np.arange(len(ids)), [True]]).argmax()
        raise ConfigError(f"{where}: no row for client {absent} of population.clients={clients}: add it, {wrap}")
    return torch.from_numpy(order)
