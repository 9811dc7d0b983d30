"""Values of Arrow columns as NumPy arrays, checked: a bad one is `Bad`, by its place, for whoever knows the file to say where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class Bad(Exception):
    """A value that cannot be used: its place in the batch, what is wrong and the mend."""

    def __init__(self, row: int, problem: str, fix: str):
        self.row, self.problem, self.fix = row, problem, fix


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type is text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this type has lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def holds_lists(kind: pa.DataType) -> bool:
    """Return whether a column of this type has lists or tensors."""
    return is_list(kind) or isinstance(kind, pa.FixedShapeTensorType)


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column of this type has numbers, of which true and false are some."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def value_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, categories or not."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def inner(kind: pa.DataType) -> pa.DataType:
    """Return what lists, however deep, are lists of."""
    return inner(kind.value_type) if holds_lists(kind) else kind


def kept_as(kinds: set[pa.DataType], *, pixels: bool) -> np.dtype[Any]:
    """Return what examples of numbers of these kinds are kept as."""
    if pixels and kinds == {pa.uint8()}:
        return np.dtype(np.uint8)
    numbers = kinds - {pa.bool_()}
    return np.dtype(np.int64 if numbers and all(map(pa.types.is_integer, numbers)) else np.float32)


def plain(column: Any) -> Any:
    """Return a column without nulls, and without the dictionary that categories come with."""
    if column.null_count:
        raise Bad(column.is_null().index(True).as_py(), "is null", "fill it in, or leave the row out")
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def coded(column: Any) -> Any:
    """Return a column of text or integers as numbers of its values. Raises ArrowException, for text that is none too."""
    column = plain(column)
    if is_text(column.type):
        column.validate(full=True)
    return column.cast(pa.large_string() if is_text(column.type) else pa.int64()).dictionary_encode()


def numbers(column: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    """Return (n, ...) numbers, which have to be finite in the type they are kept as; without one, as they are."""
    if isinstance(column, pa.FixedShapeTensorArray):
        _lists(column.storage)  # sees nulls
        x = column.to_numpy_ndarray()
    else:
        x = _lists(column)
    if dtype is None:
        return x
    with np.errstate(over="ignore"):
        kept = x.astype(dtype, copy=False)
    if dtype == np.float32 or x.dtype == np.uint64:
        fine = np.asarray(np.isfinite(kept) if dtype == np.float32 else kept >= 0)  # beyond int64 is negative now
        check(
            fine.reshape(len(x), -1).min(axis=1), lambda i: f"is not a finite {dtype}", "mend it, or leave the row out"
        )
    return kept


def labels(column: Any, classes: int | None) -> NDArray[np.int64]:
    """Return (n,) labels from 0, below `classes` where given."""
    y = plain(column).cast(pa.int64()).to_numpy()
    check(y >= 0, lambda i: f"the label {y[i]} is negative", "number the classes from 0")
    if classes is not None:
        fix = "mend the label, or say how many classes there are"
        check(y < classes, lambda i: f"the label {y[i]} is none of 0 to {classes - 1}", fix)
    return y


def check(fine: Sequence[Any] | NDArray[np.bool_], problem: Any, fix: str) -> None:
    """Refuse the first value (n,) that is not fine; `problem` says what is wrong with the one of a place."""
    if not np.all(fine):
        row = int(np.argmin(fine))
        raise Bad(row, problem(row), fix)


def _lists(column: Any) -> NDArray[Any]:
    """Return (n, ...) numbers of numbers, or of lists of equal length, however deep."""
    column = plain(column)
    if not is_list(column.type):
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        lengths = np.diff(column.offsets.to_numpy())
        width = int(lengths[0]) if len(lengths) else 0
        check(
            lengths == width,
            lambda i: f"has {lengths[i]} entries, earlier rows {width}",
            "give all rows the same length",
        )
    if width == 0:
        raise Bad(0, "is an empty list", "give every row its features")
    try:
        result = _lists(column.flatten())
    except Bad as e:
        raise Bad(e.row // width, e.problem.replace("is null", "has a null in it"), e.fix) from None
    return result.reshape(len(column), width, *result.shape[1:])
