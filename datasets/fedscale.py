"""Availability traces in the layout of FedScale's `client_behave_trace`, to the Parquet of `datasets/trace.py`.

    {client: {"active": [t, ...], "inactive": [t, ...], "finish_time": T, ...}}

a pickle, or the same as JSON. FedScale (F. Lai et al., ICML 2022, arXiv:2105.11367; `ClientMetadata.is_active`) takes the
time modulo the client's finish_time T, and holds a client active while active[i] <= t <= inactive[i]. So here a client's
intervals are [active[i], inactive[i]), cut off at T, and its `period_s` is T. Intervals that overlap are joined, and those
without a length left out; a client left with none is left out too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedfleet.datasets.files import DataError
from fedfleet.datasets.plain_pickle import NotPlain, loads
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.plain_text import MARKS, OtherEncoding, parsed_json

LARGEST = 2**1000  # integers from here on are no numbers of seconds
PLAIN = "write it with int(), float() and list() around numbers and arrays, or as JSON"


class Converted(NamedTuple):
    """What was written, and the intervals without a length and the clients without an interval that were left out."""

    clients: int
    intervals: int
    empty_intervals: int
    idle_clients: int


def convert_trace(source: Path, out: Path) -> Converted:
    """Write the trace in `source` to the new file `out`. Raises DataError, in one line, and leaves nothing behind."""
    if out.exists():
        raise DataError(f"{out}: exists: choose another file, or remove it first")
    result = _read(source)
    if not isinstance(result, dict) or not result:
        raise DataError(f"{source}: holds no clients: give a mapping of clients to active, inactive and finish_time")
    names = _names(source, list(result))
    empty, idle = 0, 0
    owner, starts, ends, periods = [], [], [], []
    for i, (name, entry) in enumerate(result.items()):
        start, end, period = _intervals(f"{source}: client {_short(name)}", entry)
        empty += int((end <= start).sum())
        start, end = _joined(start, end)
        idle += len(start) == 0
        owner.append(np.full(len(start), i))
        starts.append(start)
        ends.append(end)
        periods.append(np.full(len(start), period))
    if idle == len(result):
        raise DataError(f"{source}: no client is ever active: see that active comes before inactive, in seconds")
    rows = pa.array(np.concatenate(owner))
    columns = {"start_s": starts, "end_s": ends, "period_s": periods}
    table = pa.table({"client": names.take(rows), **{k: np.concatenate(v) for k, v in columns.items()}})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as scratch:
            pq.write_table(table, Path(scratch) / out.name)
            (Path(scratch) / out.name).replace(out)
    except OSError as e:
        raise DataError(f"{out}: cannot be written ({e.strerror or e}): make room, or mend the rights") from None
    return Converted(len(result) - idle, len(table), empty, idle)


def _read(source: Path) -> Any:
    try:
        data = source.read_bytes()
    except OSError as e:
        raise DataError(
            f"{source}: cannot be read ({e.strerror}): give a pickle or a JSON file in FedScale's layout"
        ) from None
    if not data.lstrip(b" \t\r\n\0").startswith((b"{", *(mark for marks in MARKS.values() for mark in marks))):
        try:
            return loads(data)
        except NotPlain as e:
            raise DataError(f"{source}: {e}: {PLAIN}") from None
    try:
        return parsed_json(data)
    except OtherEncoding as e:
        raise DataError(f"{source}: {e}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{source}: not JSON ({one_line(e)}): write it again") from None


def _names(source: Path, names: list[Any]) -> pa.Array:
    """Return the clients' names, as integers where they are, or read as, integers. Raises DataError."""
    texts = [name for name in names if isinstance(name, str)]
    if strange := [name for name in texts if not _is_text(name)]:
        raise DataError(f"{source}: client {_short(strange[0])}: not text in Unicode: write the name again")
    if len(texts) == len(names) and all(_is_integer(name) for name in texts):
        names = [int(name) for name in texts]
    whole = all(type(name) is int and -(2**63) <= name < 2**63 for name in names)
    if not whole and len(texts) < len(names):
        wrong = next(name for name in names if not isinstance(name, str))
        raise DataError(f"{source}: client {_short(wrong)}: make all clients integers, or all of them text")
    return pa.array(names, pa.int64() if whole else pa.large_string())


def _is_text(text: str) -> bool:
    """Say whether a text can be written: not half of a surrogate pair."""
    return text == text.encode(errors="replace").decode()


def _is_integer(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19 and str(int(text)) == text


def _intervals(where: str, entry: Any) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return starts and ends, cut off at the period, and the period. Raises DataError."""
    if not isinstance(entry, dict):
        raise DataError(f"{where}: is {type(entry).__name__}: give active, inactive and finish_time")
    for name in ("active", "inactive", "finish_time"):
        if name not in entry:
            raise DataError(f"{where}: has no {name!r}: give active, inactive and finish_time")
    period = _number(entry["finish_time"])
    if not 0 < period < np.inf:
        raise DataError(
            f"{where}: finish_time={_short(entry['finish_time'])}: give the seconds after which the trace repeats"
        )
    start, end = (_numbers(f"{where}: {name}", entry[name]) for name in ("active", "inactive"))
    if len(start) != len(end):
        raise DataError(
            f"{where}: {len(start)} times in active and {len(end)} in inactive: give each interval both ends"
        )
    if (start < 0).any():
        raise DataError(f"{where}: active[{int(np.argmax(start < 0))}] is negative: count the seconds from 0")
    return start.clip(max=period), end.clip(max=period), period


def _numbers(where: str, values: Any) -> NDArray[np.float64]:
    if not isinstance(values, list | tuple):
        raise DataError(f"{where}: is {type(values).__name__}: give a list of seconds")
    result = np.fromiter(_each(values), dtype=np.float64, count=len(values))
    if not (fine := np.isfinite(result)).all():
        i = int(np.argmin(fine))
        raise DataError(f"{where}[{i}]={_short(values[i])}: give a finite number of seconds")
    return result


def _each(values: Iterable[Any]) -> Iterator[float]:
    return (_number(v) for v in values)


def _number(value: Any) -> float:
    """Return a number, or NaN for what is none."""
    if type(value) is float or (type(value) is int and abs(value) < LARGEST):
        return float(value)
    return float("nan")


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= LARGEST:  # Python does not print the largest
        return "a huge integer"
    return repr(value)[:40] if isinstance(value, int | float | str) else type(value).__name__


def _joined(start: NDArray[np.float64], end: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the intervals in order, without those that have no length, those that overlap made one."""
    keep = end > start
    start, end = start[keep], end[keep]
    order = start.argsort(kind="stable")
    start, end = start[order], end[order]
    if len(start) == 0:
        return start, end
    reach = np.maximum.accumulate(end)
    new = np.concatenate([[True], start[1:] >= reach[:-1]])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(start) - 1]])
    return start[new], reach[last]
