"""A table to a folder of clients on disk: rows in any order in, each client's rows together out.

A first pass reads the columns of clients and domains alone and fixes where every row will lie; a second one reads all rows
and writes each in its place, in a file that is mapped into memory. What is held besides is at most about 60 bytes a row,
whatever the features, and the names of clients and domains.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedfleet.datasets.disk import CLIENTS, EXAMPLES, TEST_CLIENTS, TEST_DOMAINS, TOTALS, Totals, columns, spaced_digest
from fedfleet.datasets.example_table import USUAL, Columns, ExampleTable, Layout, kind
from fedfleet.datasets.files import DataError
from fedfleet.datasets.names import NO_NAMES, Names
from fedfleet.datasets.text_table import TextRows, tokenised
from fedfleet.datasets.texts import Reading, check_reading
from fedfleet.datasets.user_data import check_classes, check_least
from fedfleet.datasets.vocabulary import VOCABULARY
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
    called: Columns = USUAL,
    how: Reading | None = None,
    layout: Layout = "parquet",
    tell: Tell = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Totals:
    """Convert a table to the new folder `out`, which appears once it is whole; `datasets/example_table.py` says which columns.

    Args:
        source: a file, or a folder of them.
        out: a folder that does not exist.
        test: the same of test examples; its column of clients, if any, is not read.
        hold_out: without `test`, the share of clients, a fixed draw, whose examples become the test examples; a domain keeps
            a client, though.
        classes: labels are below it; one more than the largest, if not given.
        called: what the columns are called.
        how: texts become tokens, where `called` names any.
        layout: of what kind the files are.
        tell: shows progress.
        say: told, a line each, what of the input is not used, and what will be missed in it.

    Raises DataError, in one line, and leaves nothing behind.

    """
    if out.exists():
        raise DataError(f"{out}: exists: choose another folder, or remove it first")
    classes = check_classes(classes, called.target or None)
    check_reading(how or Reading(), called.text, "y" if called.target else called.label, None, classes)
    train = ExampleTable(source, called, layout)
    tests = None if test is None else ExampleTable(test, called, layout, clients=False, like=train)
    for one in (train, tests) if tests else (train,):
        for name in one.left_out:
            say(f"{one.path}: column {name!r} is an index of pandas, and left out")
    for name in train.beside:
        say(f"{source}: column {name!r} is beside a text, and left out")
    places = _layout(train, None if tests else hold_out)
    test_domain = _test_domain(places, train, tests)
    if train.domain and test_domain is None:
        say(
            f"{test}: no column {train.domain!r}: test examples are of no domain, and there will be no metrics by domain"
        )
    with beside(out) as folder:
        rows, held, words, vocabulary = train, tests, 0, None
        if called.text is not None:
            training = places.client < places.kept
            rows, held, words, vocabulary = tokenised(train, tests, training, how or Reading(), classes, folder)
            places = places.of(rows.of)
            if test_domain is not None:
                test_domain = _test_domain(places, train, None) if held is None else test_domain[held.of]
        least, largest = _write_examples(folder / EXAMPLES, rows, held, places, classes, tell)
        kept = places.kept
        if called.aims and not called.target:
            check_least(f"{source}", least, largest + 1, classes)
        labelled = classes or largest + 1
        return finish(
            folder,
            clients={"client": places.names[:kept], "count": places.count[:kept], "domain": places.domain[:kept]},
            tested=places.names[kept:],
            test_domain=test_domain,
            test_examples=rows.rows + (held.rows if held else 0) - int(places.count[:kept].sum()),
            classes=0 if called.target else labelled if called.aims else words,
            domains=places.domains,
            words=words,
            names=Names(features=tuple(train.columns_of_x), vocabulary=vocabulary),
        )


def finish(
    folder: Path,
    *,
    clients: dict[str, Any],
    test_domain: NDArray[np.int64] | None,
    test_examples: int,
    classes: int,
    domains: list[Any],
    words: int = 0,
    tested: Any = (),
    names: Names = NO_NAMES,
) -> Totals:
    """Write what lies beside the examples of a folder, and return its totals, which are written last.

    `clients` are the columns `client`, `count` and `domain` (N,), in the order in which their examples lie; `tested` are those
    whose examples the test examples are; of `names` are those of classes and features, and the vocabulary.
    """
    count = clients["count"]
    tables = {CLIENTS: {**clients, "start": count.cumsum() - count}}
    if test_domain is not None:
        tables[TEST_DOMAINS] = {"domain": test_domain}
    if len(tested):
        tables[TEST_CLIENTS] = {"client": tested}
    beside = [*tables, EXAMPLES]
    if names.vocabulary is not None:
        (folder / VOCABULARY).write_text(names.vocabulary.dumped(), encoding="utf-8")
        beside.append(VOCABULARY)
    for name, table in tables.items():
        batch = pa.record_batch(table)
        with pa.ipc.new_file(str(folder / name), batch.schema) as writer:
            writer.write_batch(batch)
    totals = Totals(
        clients=len(count),
        examples=int(count.sum()),
        test_examples=test_examples,
        min_examples=int(count.min()),
        max_examples=int(count.max()),
        classes=classes,
        domains=domains,
        words=words,
        class_names=list(names.classes),
        features=list(names.features),
        file_bytes={name: (folder / name).stat().st_size for name in beside},
        sha256={name: spaced_digest(folder / name) for name in beside},
    )
    (folder / TOTALS).write_text(totals.sealed().model_dump_json(indent=2), encoding="utf-8")
    return totals


@dataclass(frozen=True)
class _Layout:
    """Where the rows go. Clients are numbered as they first appear; those held out come last, and are clients no more.

    Attributes:
        client: (rows,) the client of every row of the input.
        row: (rows,) its row in the output.
        count: (N,) the rows of every client.
        names: (N,) what the input calls them.
        domain: (N,) their domains, numbered in the order of their names.
        domains: what the input calls these; [0] where it knows of none.
        kept: how many are not held out.

    """

    client: NDArray[np.int32]
    row: NDArray[np.int64]
    count: NDArray[np.int64]
    names: pa.Array
    domain: NDArray[np.int64]
    domains: list[Any]
    kept: int

    def of(self, rows: NDArray[np.int64]) -> _Layout:
        """Return where the rows go that are made of those of the input: of each (n,), which one."""
        client = self.client[rows]
        return replace(self, client=client, row=_places(client), count=np.bincount(client))


def _layout(source: ExampleTable, hold_out: float | None) -> _Layout:
    codes, names = source.coded(source.called.client)
    domain, domains = _domains(source, codes, names)
    is_held = np.zeros(len(names), dtype=bool) if hold_out is None else _held_out(source, hold_out, domain)
    order = np.argsort(is_held, kind="stable")
    number = np.empty(len(names), dtype=np.int32)
    number[order] = np.arange(len(names), dtype=np.int32)
    client = number[codes]
    kept = len(names) - int(is_held.sum())
    names = names.take(pa.array(order))
    return _Layout(client, _places(client), np.bincount(client), names, domain[order], domains, kept)


def _places(client: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return where each row (n,) of the clients goes, so that those of a client lie together, in their order."""
    row = np.empty(len(client), dtype=np.int64)
    row[np.argsort(client, kind="stable")] = np.arange(len(client))
    return row


def _domains(source: ExampleTable, client: NDArray[np.int32], names: pa.Array) -> tuple[NDArray[np.int64], list[Any]]:
    """Return the domain of every client (N,), and the domains' names in order. Raises DataError where a client has two."""
    if source.domain is None:
        return np.zeros(len(names), dtype=np.int64), [0]
    codes, result = source.coded(source.domain)
    values = result.to_pylist()
    of = np.empty(len(names), dtype=np.int64)
    of[client] = codes
    if (wrong := of[client] != codes).any():
        row = int(np.argmax(wrong))
        two = sorted((values[codes[row]], values[of[client[row]]]))
        raise DataError(
            f"{source.path}: column {source.domain!r}: client {names[client[row]].as_py()!r} has examples of {two[0]!r} and "
            f"{two[1]!r}: make a client a domain of it"
        )
    order = sorted(range(len(values)), key=values.__getitem__)
    return np.argsort(order)[of], [values[i] for i in order]


def _held_out(source: ExampleTable, share: float, domain: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which clients (N,) are held out for testing; of a domain whose every client was drawn, the first is kept."""
    clients = len(domain)
    held = max(1, round(share * clients))
    fix = "hold out a smaller share, or give a file of test examples"
    if held >= clients:
        raise DataError(f"{source.path}: holding out {held} of {clients} clients for testing leaves none: {fix}")
    result = np.zeros(clients, dtype=bool)
    result[rng.sample(rng.fold(rng.key(0), "hold_out"), clients, held).numpy()] = True
    domains, first = np.unique(domain, return_index=True)
    result[first[np.bincount(domain[~result], minlength=len(domains)) == 0]] = False
    if not result.any():
        raise DataError(
            f"{source.path}: every client that would be held out is the only one of its domain: give a file of test examples"
        )
    return result


def _test_domain(layout: _Layout, train: ExampleTable, tests: ExampleTable | None) -> NDArray[np.int64] | None:
    """Return the domain of every test example, numbered as the clients'; None where it is not said. Raises DataError."""
    if tests is None:
        return np.repeat(layout.domain[layout.kept :], layout.count[layout.kept :]) if train.domain else None
    if tests.domain is None:
        return None
    where = f"{tests.path}: column {tests.domain!r}"
    if train.domain is None:
        raise DataError(f"{where}: {train.path} has no such column: leave it out, or add it there")
    codes, result = tests.coded(tests.domain)
    number = {name: i for i, name in enumerate(layout.domains)}
    if strange := [name for name in result.to_pylist() if name not in number]:
        raise DataError(f"{where}: {strange[0]!r} is the domain of no client: mend it, or leave these rows out")
    return np.array([number[name] for name in result.to_pylist()])[codes]


def _write_examples(
    path: Path,
    train: ExampleTable | TextRows,
    tests: ExampleTable | TextRows | None,
    layout: _Layout,
    classes: int | None,
    tell: Tell,
) -> tuple[int, int]:
    """Write every row in its place, those of `tests` at the end, and return the least and the largest label."""
    total = train.rows + (tests.rows if tests else 0)
    x = y = None
    extremes, done = list[int](), 0
    for rows in itertools.chain(train.batches(classes), tests.batches(classes) if tests else ()):
        if x is None or y is None:
            x, y = allocate(path, total, rows.x, rows.y)
        for what, here, there in (("x", x, rows.x), ("the target", y, rows.y)):
            if tests and kind(here) != kind(there):
                problem = f"{what} is {kind(there)}, and that of the clients {kind(here)}"
                raise DataError(f"{tests.path}: {problem}: make them alike")
        end = done + len(rows.y)
        to = layout.row[done:end] if done < train.rows else slice(done, end)
        x[to], y[to] = rows.x, rows.y
        extremes += [int(rows.y.min()), int(rows.y.max())]
        done = end
        tell(done, total)
    return min(extremes), max(extremes)


def allocate(path: Path, rows: int, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Make an IPC file of zeros, of columns like `x` (n, ...) and `y` (n, ...), and return these, to be written in place."""
    sizes = {name: rows * math.prod(like.shape[1:]) * like.itemsize for name, like in (("x", x), ("y", y))}
    with tempfile.TemporaryFile(dir=path.parent) as file:
        file.truncate(max(sizes.values()))
        zeros = pa.py_buffer(np.memmap(file, mode="r"))  # a hole: it takes no space, on disk or in memory
        batch = pa.record_batch({"x": _zeros(rows, x, zeros), "y": _zeros(rows, y, zeros)})
        with _SparseFile(path, "w") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    if hasattr(os, "posix_fallocate"):  # else a full disk would end the process by a signal, in the middle of writing
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    whole = np.memmap(path, mode="r+")

    def writable(column: NDArray[Any]) -> NDArray[Any]:
        start = column.ctypes.data - whole.ctypes.data
        return whole[start : start + column.nbytes].view(column.dtype).reshape(column.shape)

    result = columns(whole)
    return writable(result["x"]), writable(result["y"])


def _zeros(rows: int, like: NDArray[Any], zeros: pa.Buffer) -> pa.Array:
    """Return a column of so many rows: numbers, or tensors of them."""
    width = math.prod(like.shape[1:])
    flat = pa.Array.from_buffers(pa.from_numpy_dtype(like.dtype), rows * width, [None, zeros])
    if like.ndim == 1:
        return flat
    tensor = pa.fixed_shape_tensor(flat.type, like.shape[1:])
    return pa.ExtensionArray.from_storage(tensor, pa.FixedSizeListArray.from_arrays(flat, width))


class _SparseFile(io.FileIO):
    """A file that skips over large buffers, all of which hold zeros here, instead of writing them."""

    def write(self, data: Any, /) -> int:
        if (size := memoryview(data).nbytes) < HOLE_BYTES:
            return super().write(data)
        self.seek(size, io.SEEK_CUR)
        return size


@contextmanager
def beside(out: Path) -> Iterator[Path]:
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
