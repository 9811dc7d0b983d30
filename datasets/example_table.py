"""Tables of examples, in Parquet or CSV: a file, or a folder of them, read in batches.

A row is an example. Its columns, each by its usual name or as `Columns` says: `client`, an integer or text; `y`, an integer label
from 0, or in its place targets, numbers; the features, which are `x`, lists of equally many numbers (nested for images), or else
every other column, a number each; or a text; and a domain, an integer or text, where there are domains. Unsigned bytes in lists `x`
are pixels and stay bytes; features that are all integers stay integers; all others become floats. The index that pandas writes
beside the columns is no feature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedfleet.datasets import columns
from fedfleet.datasets.apart import FIX, SEVERAL, Apart
from fedfleet.datasets.columns import Bad
from fedfleet.datasets.csv_part import csv_parts
from fedfleet.datasets.files import check_once
from fedfleet.datasets.parquet import Batch, ParquetPart, Part, fail, paths
from fedfleet.datasets.user_data import check_names

INDEX = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")  # what pandas calls an index without a name
Layout = Literal["parquet", "csv"]


@dataclass(frozen=True)
class Columns:
    """What the columns are called: client, label, one or several of targets instead of a label, domain, text instead of features.

    Without a label there are none: the next token of a text is learnt. Of those in ``without`` nothing is read.
    """

    client: str = "client"
    label: str | None = "y"
    target: tuple[str, ...] = ()
    domain: str = "domain"
    text: str | None = None
    without: tuple[str, ...] = ()

    @property
    def aims(self) -> tuple[str, ...]:
        """What is to be foreseen: targets, or the label, if any."""
        return self.target or (() if self.label is None else (self.label,))

    @property
    def own(self) -> tuple[str, ...]:
        """All that are no features."""
        return (self.client, *self.aims, self.domain)


USUAL = Columns()


class Rows(NamedTuple):
    """Consecutive rows: x (n, ...) float32, int64 or uint8, and y (n,) int64 or targets (n, ...) float32."""

    x: NDArray[Any]
    y: NDArray[Any]


class ExampleTable:
    """Files with the same columns, one after another. Every method raises DataError.

    Args:
        path: a file, or a folder of files.
        called: what the columns are called; what has not its usual name has to be there.
        layout: of what kind the files are.
        clients: whether there has to be a column of clients.
        like: other examples, whose features these have to have.

    Attributes:
        rows: their number.
        features: the columns that make x.
        domain: the column that says the domain, or None.
        left_out: columns that are an index of pandas, and no feature.
        of_text: whether examples are texts; else, where `called` says texts, they are lists of token numbers.
        beside: columns beside a text that are not read.

    """

    def __init__(
        self,
        path: Path,
        called: Columns = USUAL,
        layout: Layout = "parquet",
        *,
        clients: bool = True,
        like: ExampleTable | None = None,
    ):
        self.path, self.called = path, called
        self._parts: list[Part] = _parts(path, called, layout)
        check_once([part.file for part in self._parts if part.rows])
        first, schema = self._parts[0].file, self._meant(self._parts[0])
        for part in self._parts:
            result = self._meant(part)
            _check(part, result, called, clients)
            if {(field.name, field.type) for field in result} != {(field.name, field.type) for field in schema}:
                fail(f"{part.file}: its columns are not those of {first}", "give all files the same names and types")
        self.domain = called.domain if called.domain in schema.names else None
        self.features = _features(schema, called)
        if like is not None:
            if sorted(self.features) != sorted(like.features):
                odd = min({*self.features} ^ {*like.features})
                fail(f"{path}: only one of it and {like.path} has the feature {odd!r}", "give both the same columns")
            self.features = like.features
        self._whole = _is_whole(schema, called)
        self.of_text = called.text is not None and columns.is_text(columns.value_of(schema.field(called.text).type))
        if like is not None and like.of_text != self.of_text:
            fail(
                f"{path}: {called.text!r} is text in one of it and {like.path}, and numbers in the other",
                "make them alike",
            )
        kinds = {columns.inner(schema.field(name).type) for name in self.features}
        self.dtype = columns.kept_as(kinds, pixels=self._whole)
        if like is not None and like.dtype == np.float32 and self.dtype == np.int64:
            self.dtype = like.dtype  # whole numbers by chance
        everything = {name for part in self._parts for name in part.schema.names}
        self.left_out = sorted(everything - {*schema.names, *called.without})
        self.beside = sorted({*schema.names} - {*called.own, called.text}) if called.text else []
        self._apart: dict[tuple[str, int], Apart] = {}  # by column, and place in its lists
        self.rows = sum(part.rows for part in self._parts)
        if self.rows == 0:
            fail(f"{path}: holds no rows", "give a file with examples")

    @property
    def columns_of_x(self) -> list[str]:
        """The columns that make x, where each is a number."""
        return [] if self._whole or self.called.text is not None else self.features

    def coded(self, name: str) -> tuple[NDArray[np.int32], pa.Array]:
        """Return the value of every row of a column as a number (rows,), and the values, integers or text, as they first appear."""
        chunks = []
        for batch in self._batches([name]):
            with batch.naming(name):
                chunks.append(columns.coded(batch.columns[name]))
        result = pa.chunked_array(chunks).unify_dictionaries()
        if columns.is_text(result.type.value_type):
            check_names(f"{self.path}: column {name!r}", result.chunk(0).dictionary.to_pylist())
        return np.concatenate([chunk.indices.to_numpy() for chunk in result.chunks]), result.chunk(0).dictionary

    def batches(self, classes: int | None = None) -> Iterator[Rows]:
        """Yield all rows in order. Every example has one shape, and so have targets; labels are below `classes`, where given."""
        first: tuple[str, str] | None = None
        for batch in self.raw():
            x, y = self._examples(batch), self.aims(batch, classes)
            first = first or (kind(x), kind(y))
            for name, result, before in zip((self.features[0], self.called.aims[0]), (x, y), first, strict=True):
                if kind(result) != before:
                    with batch.naming(name):
                        raise Bad(0, f"is {kind(result)}, earlier rows are {before}", "make all rows alike")
            yield Rows(x, y)
        self.check_told_apart()

    def raw(self) -> Iterator[Batch]:
        """Yield the features and labels of all rows in order, as they are in the file."""
        return self._batches([*self.features, *self.called.aims])

    def _examples(self, batch: Batch) -> NDArray[Any]:
        if self._whole:
            with batch.naming("x"):
                self._watch("x", columns.numbers(batch.columns["x"], None))
                return columns.numbers(batch.columns["x"], self.dtype)
        for name in self.features:
            with batch.naming(name):
                self._watch(name, columns.numbers(batch.columns[name], None))
        return self._side_by_side(batch, self.features, self.dtype)

    def aims(self, batch: Batch, classes: int | None) -> NDArray[Any]:
        """Return the labels (n,) int64, below `classes` where given, or the targets (n, ...) float32 of a batch."""
        name = self.called.aims[0]
        if not self.called.target:
            with batch.naming(name):
                return columns.labels(batch.columns[name], classes)
        for each in self.called.target:
            with batch.naming(each):
                self._watch(each, columns.numbers(batch.columns[each], None))
        if len(self.called.target) == 1:
            with batch.naming(name):
                return columns.numbers(batch.columns[name], np.dtype(np.float32))
        return self._side_by_side(batch, self.called.target, np.dtype(np.float32))

    def _watch(self, name: str, values: NDArray[Any]) -> None:
        """Look at numbers (n, ...) of a column for some that differ and become one in float32."""
        watched = values.reshape(len(values), -1)
        for i, column in enumerate(watched.T if watched.shape[1] <= SEVERAL else [watched.reshape(-1)]):
            self._apart.setdefault((name, i), Apart()).add(column)

    def check_told_apart(self) -> None:
        """Refuse features and targets, once all were read, of which some that differ become one number in float32."""
        for (name, _), watched in self._apart.items():
            if (problem := watched.problem()) is not None:
                fail(f"{self.path}: column {name!r}: {problem}", FIX)

    def _side_by_side(self, batch: Batch, names: list[str] | tuple[str, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        x = np.empty((len(batch.columns), len(names)), dtype=dtype)
        for i, name in enumerate(names):
            with batch.naming(name):
                x[:, i] = columns.numbers(batch.columns[name], dtype)
        return x

    def _batches(self, names: list[str]) -> Iterator[Batch]:
        for part in self._parts:
            yield from part.batches(names)

    def _meant(self, part: Part) -> pa.Schema:
        """Return the columns that are meant: without those that pandas says are an index, but for one that we read by its name."""
        told = (part.schema.pandas_metadata or {}).get("index_columns", [])
        index = {name for name in told if isinstance(name, str)} - {*self.called.own, self.called.text, "x"}
        out = index | {*self.called.without}
        return pa.schema([f for f in part.schema if f.name not in out and not INDEX.fullmatch(f.name)])


def kind(x: NDArray[Any]) -> str:
    """Say what an example is, as in "float32 of shape (32,)"."""
    return f"{x.dtype} of shape {x.shape[1:]}"


def _parts(path: Path, called: Columns, layout: Layout) -> list[Part]:
    if layout == "csv":
        return [*csv_parts(path, (called.client, called.domain), () if called.text is None else (called.text,))]
    return [ParquetPart(file) for file in paths(path)]


def _features(schema: pa.Schema, called: Columns) -> list[str]:
    if called.text is not None:
        return [called.text]
    return ["x"] if _is_whole(schema, called) else [n for n in schema.names if n not in called.own]


def _is_whole(schema: pa.Schema, called: Columns) -> bool:
    """Return whether examples are lists `x`; a number of this name is a feature as any other."""
    there = called.text is None and "x" in schema.names and "x" not in called.own
    return there and columns.holds_lists(schema.field("x").type)


def _check(part: Part, schema: pa.Schema, called: Columns, clients: bool) -> None:
    """Refuse a file that lacks columns, has one twice or of a wrong type."""
    file, names = part.file, schema.names
    if twice := [name for name in names if names.count(name) > 1]:
        fail(f"{file}: two columns {twice[0]!r}", "rename one")
    _check_names(file, schema, called, clients)
    for name in {called.client, *called.aims, called.domain} & {*names}:
        if name not in called.target:
            result, is_label = schema.field(name).type, name == called.label
            value = columns.value_of(result)
            if not (pa.types.is_integer(value) or (not is_label and columns.is_text(value))):
                fix = "make it integers" if is_label else "make it integers or text"
                fail(f"{file}: column {name!r} is {result}", fix)
    if strange := [name for name in called.without if name not in part.schema.names]:
        fail(f"{file}: no column {strange[0]!r} to be left out", f"choose among {', '.join(part.schema.names)}")
    features = _features(schema, called)
    if not features:
        fail(f"{file}: no features", "add a column x of lists of numbers, or a column a feature")
    if _is_whole(schema, called) and (others := {*names} - {*called.own, "x"}):
        fail(f"{file}: beside 'x' there is a column {min(others)!r}", "put it in x, or leave it out")
    odd = list[str]()
    for name in [*called.target, *features]:
        result = schema.field(name).type
        lists = name == "x" or called.target == (name,)
        if name == called.text:
            tokens = columns.is_list(result) and pa.types.is_integer(columns.inner(result))
            if not tokens and not columns.is_text(columns.value_of(result)):
                fail(f"{file}: column {name!r} is {result}", "make it text, or lists of token numbers")
        elif not columns.is_number(columns.inner(result) if lists else result):
            odd.append(name)
    if odd:
        out = (
            "" if odd[0] in called.own else f" by --without {','.join(name for name in odd if name not in called.own)}"
        )
        if columns.holds_lists(schema.field(odd[0]).type) and odd[0] not in called.own:
            fail(part.text(odd[0]), "call it x where its lists are the examples, or leave it out" + out)
        others = f", and so are {', '.join(map(repr, odd[1:]))}" if odd[1:] else ""
        fail(f"{part.text(odd[0])}{others}", f"make it numbers, or leave it out{out}")


def _check_names(file: Path, schema: pa.Schema, called: Columns, clients: bool) -> None:
    """Refuse a file without a column that is named, or with one that might be meant instead."""
    names = schema.names
    read = [*called.aims, *([] if called.text is None else [called.text])]
    if called.domain in (called.client, *read, "x"):
        fail(f"{file}: the column {called.domain!r} says no domain", "give the name of another")
    if twice := [name for i, name in enumerate(read) if name in (called.client, *read[:i])]:
        fail(f"{file}: the column {twice[0]!r} is named twice", "give another")
    wanted = [called.client, *read, *([called.domain] if called.domain != USUAL.domain else [])] if clients else read
    for name in wanted:
        if name not in names:
            fix = "add it, or rename the one that is meant" if name in USUAL.own else "give the name of one of them"
            fail(f"{file}: no column {name!r} among {', '.join(names)}", fix)
    for name, other in ((called.client, USUAL.client), (read[0], USUAL.own[1]), (called.domain, USUAL.domain)):
        if called.text is None and name != other and other in names and other not in called.own:
            fail(f"{file}: beside {name!r} there is a column {other!r}", "leave one of them out")
