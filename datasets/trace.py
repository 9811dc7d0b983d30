"""Availability traces in Parquet: when devices were online, a row an interval.

`client` (integer or text), `start_s` and `end_s`: online in [start_s, end_s), in seconds from 0. A column `period_s`, where
there is one, says after how long the intervals of a client repeat, and is the same in all its rows; else all repeat after
the same time. Rows are in any order; intervals of a client may touch, not overlap.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from fedfleet.datasets.files import DataError
from fedfleet.datasets.parquet import Table
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.online.trace import Intervals


def read_trace(path: Path, horizon_s: float | None = None) -> tuple[Intervals, Table]:
    """Return the intervals of the devices, and the table: device i is ``table.names[i]``.

    Args:
        path: a Parquet file, or a folder of them.
        horizon_s: after how long the intervals repeat, where the file does not say; the largest end if None.

    Raises DataError naming file and row, and ConfigError where the horizon does not fit the file.

    """
    table = Table(path, ("start_s", "end_s"), ("period_s",))
    client, start, end = table.client, table.values["start_s"], table.values["end_s"]

    def refuse(wrong: NDArray[np.bool_], problem: str, fix: str) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            _fail(table, row, problem.format(start=start[row], end=end[row], name=_name(table, row)), fix)

    refuse(start < 0, "start_s={start:g} is negative", "count the seconds from 0")
    refuse(
        end <= start,
        "end_s={end:g} is not after start_s={start:g}",
        "give the end of the interval, or leave the row out",
    )
    order = _order(client, start)
    if order is not None:
        client, start, end = client[order], start[order], end[order]
    overlap = (client[1:] == client[:-1]) & (start[1:] < end[:-1])
    if overlap.any():
        i = int(np.argmax(overlap))
        row, other = (i + 1, i) if order is None else (int(order[i + 1]), int(order[i]))
        two = f"from {start[i + 1]:g} to {end[i + 1]:g} s, and from {start[i]:g} to {end[i]:g} s ({table.at(other)})"
        _fail(table, row, f"client {_name(table, row)} is online {two}", "join intervals that overlap")
    first = np.searchsorted(client, np.arange(len(table.names) + 1))
    period = _periods(table, first, order, horizon_s)
    return Intervals(*(torch.from_numpy(v) for v in (first, start, end, period))), table


def client_numbers(table: Table, clients: int) -> torch.Tensor:
    """Return the clients of a trace as numbers (D,) below ``clients``, rising. Raises DataError."""
    fix = "give client numbers, or use availability.map=seeded"
    if str(table.names.type) != "int64":
        raise DataError(f"{table.path}: column 'client' is text, and availability.map is direct: {fix}")
    numbers = table.names.to_numpy().copy()
    wrong = (numbers < 0) | (numbers >= clients)
    if wrong.any():
        row = int(np.argmax(wrong[table.client]))
        _fail(table, row, f"client {_name(table, row)} is none of 0 to {clients - 1}", fix)
    return torch.from_numpy(numbers)


def _order(client: NDArray[np.int32], start: NDArray[np.float64]) -> NDArray[np.int64] | None:
    """Return the order by client and start, or None where rows are in it."""
    rising = (client[1:] > client[:-1]) | ((client[1:] == client[:-1]) & (start[1:] >= start[:-1]))
    return None if rising.all() else np.lexsort((start, client))


def _periods(
    table: Table, first: NDArray[np.int64], order: NDArray[np.int64] | None, horizon_s: float | None
) -> NDArray[np.float64]:
    """Return the period of each device, or (1,) that of all."""
    end, given = table.values["end_s"], table.values.get("period_s")
    if given is None:
        last = int(np.argmax(end))
        if horizon_s is not None and end[last] > horizon_s:
            raise ConfigError(
                f"availability.horizon_s={horizon_s:g}: an interval ends at {end[last]:g} s ({table.at(last)}): raise it, or "
                f"leave it out"
            )
        return np.array([end[last] if horizon_s is None else horizon_s])
    if horizon_s is not None:
        raise ConfigError(
            f"availability.horizon_s={horizon_s:g}: {table.path} has a column 'period_s': leave one of them out"
        )
    period = (given if order is None else given[order])[first[:-1]]
    different = given != period[table.client]
    if different.any():
        row = int(np.argmax(different))
        problem = (
            f"period_s={given[row]:g}, where client {_name(table, row)} has {period[table.client[row]]:g} elsewhere"
        )
        _fail(table, row, problem, "give a client one period")
    beyond = end > given
    if beyond.any():
        row = int(np.argmax(beyond))
        _fail(
            table,
            row,
            f"end_s={end[row]:g} is beyond period_s={given[row]:g}",
            "cut the interval off, or raise the period",
        )
    return period


def _name(table: Table, row: int) -> str:
    return repr(table.names[int(table.client[row])].as_py())


def _fail(table: Table, row: int, problem: str, fix: str) -> NoReturn:
    raise DataError(f"{table.at(row)}: {problem}: {fix}")
