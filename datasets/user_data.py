"""Data of one's own, checked: what arrays, tables, folders of images and other layouts all come to.

A source reads its rows into a `Rows`; `parts` splits training from test examples and gives what `fedfleet.run(data=…)` takes.
Every mistake is a DataError of one line that says where it is and how it is mended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator
from torch import Tensor

from fedfleet.datasets.apart import check_told_apart
from fedfleet.datasets.files import DataError
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.plain_text import as_seen

if TYPE_CHECKING:
    import pandas as pd  # elsewhere only where it is used: workers need none of it

KINDS = {"i": np.int64, "u": np.int64, "b": np.float32, "f": np.float32}
"""What numbers of each of NumPy's kinds are kept as, but for bytes, which are pixels."""
CHANNELS = (1, 3, 4)
WORDS = 10_000  # rows that are looked through for how a column says what is a test example


class Unsaid(str):
    """A default of an argument, which is told from the same text when a caller says it."""


class Codes(NamedTuple):
    """What each row belongs to, of several: number (n,) int64 of `names`, integers or text."""

    number: Tensor
    names: tuple[Any, ...]

    def of(self, rows: Tensor) -> Codes:
        """Return the codes of some rows (mask, or numbers), without names that none of them has; the names stay in their order."""
        there, number = self.number[rows].unique(return_inverse=True)
        return Codes(number, tuple(self.names[i] for i in there))


@dataclass(frozen=True)
class Rows:
    """Checked examples: x (n, ...) uint8, int64 or float32, y (n,) int64 or targets (n, ...); clients and
    domains where they are known.

    `where` is what messages call them; `classes` are the names of the labels, where these were text.
    """

    where: str
    x: Tensor
    y: Tensor
    client: Codes | None = None
    domain: Codes | None = None
    classes: tuple[str, ...] = ()

    def of(self, rows: Tensor) -> Rows:
        """Return some of the rows (mask, or numbers)."""
        client, domain = (None if c is None else c.of(rows) for c in (self.client, self.domain))
        return replace(self, x=self.x[rows], y=self.y[rows], client=client, domain=domain)


def _no_share(test: Any) -> Any:
    if isinstance(test, int | float):
        raise ValueError(f"it says where test examples are: for a share give hold_out={test}")
    return test


Held = Annotated[str, BeforeValidator(_no_share)]
"""Where test examples are, in a configuration; a share, which is ``test`` in Python, is ``hold_out`` there."""


def fail(where: str, problem: str, fix: str) -> NoReturn:
    """Raise the DataError that says so."""
    raise DataError(f"{where}: {problem}: {fix}")


def check_aim(label: str | None, target: str | Sequence[str] | None) -> None:
    """Refuse targets beside a label that was said. Raises DataError."""
    if target is not None and label is not None and not isinstance(label, Unsaid):
        fail("target", f"is {target!r}, beside label={label!r}", "leave one of them out")


def check_left(where: str, left: Sequence[Any], usual: str, target: str | Sequence[str] | None) -> None:
    """Refuse, of columns that are `left` for features, labels beside targets: nobody named them. Raises DataError."""
    if target is not None and usual in left:
        fix = "leave it out, or name it in features="
        fail(where, f"the column {usual!r} is beside target={target!r}, and would be a feature", fix)


def feature_names(columns: Sequence[Any], x: Tensor) -> tuple[str, ...]:
    """Return the names of columns that are a number of an example ``x`` (n, columns) each; none of one column of lists."""
    return tuple(map(str, columns)) if x.shape[1:] == (len(columns),) else ()


def check_least(where: str, least: int, most: int, classes: int | None) -> None:
    """Refuse labels of which none is 0, where nobody says how many classes there are. Raises DataError."""
    if least > 0 and classes is None:
        fix = f"number them from 0, as by y - {least}, or say classes={most}"
        fail(where, f"labels go from {least} to {most - 1}, and no example has 0", fix)


def check_classes(classes: int | None, target: Any) -> int | None:
    """Return how many classes there are to be, 0 with targets. Raises DataError."""
    if classes is None:
        return None if target is None else 0
    if isinstance(classes, bool) or not isinstance(classes, Integral) or classes < 1:
        fail("classes", f"is {classes!r}", "give how many classes there are, or leave it out")
    if target is not None:
        fail("classes", f"is {classes}", "leave it out, for there are targets")
    return int(classes)


def check_columns(values: Any, tested: Any, where: str) -> None:
    """Refuse test examples whose columns have other names than the training examples', or another order. Raises DataError."""
    names, others = (getattr(table, "column_names", getattr(table, "columns", None)) for table in (values, tested))
    if names is not None and others is not None and [*names] != [*others]:
        both = " and ".join(", ".join(map(str, each)) for each in (others, names))
        fail(
            f"test {where}", f"its columns and those of {where} are {both}", f"give it those of {where}, in their order"
        )


def inputs(values: Any, where: str) -> Tensor:
    """Return examples (n, ...): bytes stay uint8 and are pixels, other integers become int64, all else finite float32.

    Raises DataError.
    """
    array = as_array(values, where)
    if array.dtype.kind not in KINDS:
        fail(where, f"is {array.dtype}, no numbers", "make them numbers")
    if array.ndim < 2:
        shape = "x[:, None]" if array.ndim else "an array of shape (examples, features)"
        fail(where, f"is of shape {array.shape}, and an example is a row", f"give {shape}")
    if 0 in array.shape:
        fail(where, f"is of shape {array.shape}, and holds nothing", "give some examples")
    if array.ndim == 4 and array.shape[3] in CHANNELS and array.shape[1] not in CHANNELS:
        fail(where, f"is of shape {array.shape}, channels last", "give x.transpose(0, 3, 1, 2)")
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array).copy())
    kept, fine = _kept(array)
    if not fine.all():
        fix = "mend it, or leave the row out"
        fail(f"{where}, row {fine.argmin()}", f"has a number that is no finite {kept.dtype}", fix)
    check_told_apart(array, where)
    return torch.from_numpy(kept)


def _kept(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return numbers (n, ...) in the type that they are kept in, and which rows (n,) it holds."""
    with np.errstate(over="ignore"):
        kept = np.ascontiguousarray(array).astype(KINDS[array.dtype.kind])
    fine = np.isfinite(kept) if kept.dtype == np.float32 else (kept >= 0) | (array.dtype.kind == "i")
    return kept, np.asarray(fine.reshape(len(kept), -1).all(1))


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Return columns (n, 1) of numbers as one tensor (n, columns); bytes are numbers here, and no pixels."""
    return torch.cat([c.long() if c.dtype == torch.uint8 else c for c in columns], 1)


def labels(values: Any, where: str, classes: int | None, rows: int) -> Tensor:
    """Return labels (n,) int64 from 0, below `classes` where given. Raises DataError."""
    import pandas as pd

    result = pd.Series(values) if isinstance(values, pd.Categorical) else values
    if isinstance(result, pd.Series):
        if (missing := result.isna().to_numpy()).any():
            fail(f"{where}, row {missing.argmax()}", "has no label", "fill it in, or leave the row out")
        if isinstance(result.dtype, pd.CategoricalDtype):
            result = result.astype(result.cat.categories.dtype)
    array = as_array(result, where)
    if array.ndim == 2:
        fix = "give y[:, 0]" if array.shape[1] == 1 else "give y.argmax(1)"
        fail(where, f"is of shape {array.shape}, and a label is one number", fix)
    if array.shape != (rows,):
        fail(where, f"is of shape {array.shape}, and there are {rows} examples", "give a label an example")
    if array.dtype.kind in "fc" and not (finite := np.isfinite(array)).all():
        fail(f"{where}, row {finite.argmin()}", "has no label", "fill it in, or leave the row out")
    if array.dtype.kind in "fc":
        fail(
            where, f"labels are {array.dtype}", "make them integers from 0, as by .astype(int), or give them as target="
        )
    if array.dtype.kind not in "iub":
        fail(where, "labels are no numbers", "number them from 0, as by np.unique(y, return_inverse=True)[1]")
    y = array.astype(np.int64)
    if len(bad := np.flatnonzero((y < 0) | (y >= (classes or np.inf)))):
        row, most = bad[0], "" if classes is None else f" to {classes - 1}"
        below = "number the classes from 0, or give labels as target= where the loss ignores some"
        fix = below if y[row] < 0 else "mend the label, or say how many classes there are"
        fail(f"{where}, row {row}", f"the label {array[row]} is none from 0{most}", fix)
    return torch.from_numpy(y)


def named_labels(values: Any, where: str, classes: int | None, rows: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels (n,) as `labels` does, and their names where they are text: numbered in the order of the alphabet.

    Raises DataError.
    """
    import pandas as pd

    plain = _plain(values, where)
    try:
        result = _series(plain)
    except ValueError:  # of more than one dimension
        return labels(values, where, classes, rows), ()
    if pd.api.types.infer_dtype(result.astype(object)) != "string":
        return labels(values, where, classes, rows), ()
    number, names = codes(result, where, "label", rows, rising=True)
    if all(name.strip().lstrip("-").isdecimal() for name in names):
        fail(where, f"labels are text, such as {names[0]!r}", "make them integers, by .astype(int)")
    if classes is not None and len(names) > classes:
        fail(where, f"there are {len(names)} labels, and classes={classes}", "give the number of classes")
    return number, names


def _series(values: Any) -> pd.Series:
    """Return a column of what is not yet one; of text with halves of characters, too. Raises ValueError for two dimensions."""
    import pandas as pd

    try:
        return values if isinstance(values, pd.Series) else pd.Series(values)
    except UnicodeEncodeError:
        return pd.Series(values, dtype=object)


def _plain(values: Any, where: str) -> Any:
    """Return tensors of any kind and masked arrays as plain arrays; others as they are. Raises DataError for what is masked."""
    if isinstance(values, np.ma.MaskedArray):
        _check_mask(values, where)
        return values.data
    if type(values).__module__.partition(".")[0] == "pyarrow" and hasattr(values, "null_count"):
        return (
            values.to_pylist() if values.null_count or not _is_number(values) else values.to_numpy(zero_copy_only=False)
        )
    if not isinstance(values, Tensor):
        return values
    if isinstance(values, torch.masked.MaskedTensor):
        _check_mask(np.ma.masked_array(values.get_data().numpy(), ~values.get_mask().numpy()), where)
        values = values.get_data()
    result = values.detach()
    if result.is_meta:
        fail(where, "is a tensor of the device meta, which holds no numbers", "give one of the CPU")
    if result.is_nested:
        return [_plain(row, where) for row in result.unbind()]
    if result.is_quantized:
        result = result.dequantize()
    result = (result if result.layout == torch.strided else result.to_dense()).cpu().resolve_conj().resolve_neg()
    try:
        return result.numpy()
    except TypeError:  # a kind that NumPy has not, such as bfloat16
        return result.to(torch.float32).numpy()


def _check_mask(values: np.ma.MaskedArray[Any, Any], where: str) -> None:
    """Refuse an array of which something is masked. Raises DataError."""
    if values.dtype.names is not None or not np.ma.is_masked(values):  # records are no numbers at all
        return
    masked = np.atleast_1d(np.ma.getmaskarray(values))
    _fail_masked(where, np.flatnonzero(masked.reshape(len(masked), -1).any(1))[0])


def _check_masks(values: Any, where: str) -> None:
    """Refuse a list, or an array of objects, of whose rows one is masked in part: NumPy drops the masks. Raises DataError."""
    if isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.dtype == object):
        for i, row in enumerate(values):
            if isinstance(row, np.ma.MaskedArray) and np.ma.is_masked(row):
                _fail_masked(where, i)


def _fail_masked(where: str, row: int) -> NoReturn:
    fail(f"{where}, row {row}", "has a masked value", "fill it in, as by .filled(), or leave the row out")


def _is_number(column: Any) -> bool:
    """Return whether a column of Arrow's has numbers."""
    from fedfleet.datasets import columns  # here, for workers need none of Arrow

    return columns.is_number(column.type)


def aims(values: Any, prefix: str, classes: int | None, rows: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return targets, where ``classes`` is 0, else labels and their names; messages call them so, after ``prefix``.

    Raises DataError.
    """
    if classes == 0:
        return targets(values, f"{prefix}target", rows), ()
    return named_labels(values, f"{prefix}y", classes, rows)


def targets(values: Any, where: str, rows: int) -> Tensor:
    """Return targets (n, ...): integers as int64, all else as finite float32. Raises DataError."""
    array = as_array(values, where)
    check_told_apart(array, where)
    if array.dtype.kind not in KINDS:
        fail(where, f"targets are {array.dtype}, no numbers", "make them numbers")
    if array.ndim == 0 or len(array) != rows:
        fail(where, f"is of shape {array.shape}, and there are {rows} examples", "give targets an example")
    if 0 in array.shape:
        fail(where, f"is of shape {array.shape}, and holds nothing", "give some targets")
    kept, fine = _kept(array)
    if not fine.all():
        row, kind = fine.argmin(), "number" if kept.dtype == np.float32 else "int64"
        fail(f"{where}, row {row}", f"has a target that is no finite {kind}", "mend it, or leave the row out")
    return torch.from_numpy(kept)


def codes(values: Any, where: str, what: str, rows: int, *, rising: bool = False) -> Codes:
    """Return which of several each row belongs to; they are integers or text, in the order they appear in, or `rising`.

    `what` they are goes into messages. Raises DataError.
    """
    import pandas as pd

    entries = _plain(values, where)
    try:
        result = _series(entries)
    except ValueError as e:
        fail(where, one_line(e), f"give a {what} a row")
    if len(result) != rows:
        fail(where, f"there are {len(result)} entries, and {rows} examples", f"give a {what} a row")
    if (missing := result.isna().to_numpy()).any():
        fail(f"{where}, row {missing.argmax()}", f"has no {what}", "fill it in, or leave the row out")
    kind = pd.api.types.infer_dtype(result.astype(object), skipna=False)
    if kind not in ("integer", "string"):
        fail(where, f"is {kind}", "make it integers or text")
    number, names = pd.factorize(result.astype(object), sort=rising)
    if kind == "string":
        check_names(where, names)
    plain = tuple(int(n) if kind == "integer" else str(n) for n in names)
    return Codes(torch.from_numpy(number.astype(np.int64)), plain)


def check_names(where: str, names: Iterable[str]) -> None:
    """Refuse names that cannot be written or show nothing, and two that a reader takes for one. Raises DataError."""
    seen: dict[str, str] = {}
    for name in names:
        check_text(where, name)
        if not (shown := as_seen(name)):
            fail(where, f"has the name {name!r}, of which nothing is seen", "fill it in, or leave its rows out")
        other = seen.setdefault(shown, name)
        if other != name:
            fix = "make them one, as by .str.normalize('NFKC').str.strip()"
            fail(where, f"{other!r} and {name!r} look the same ({other!a}, {name!a})", fix)


def check_text(where: str, text: str) -> None:
    """Refuse text with half a character, as of an emoji that was cut in two. Raises DataError."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        fix = "replace it, as by text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        fail(where, f"has half a character, {text[e.start]!a}", fix)


def flags(values: Any, where: str, rows: int) -> Tensor:
    """Return which rows (n,) are test examples: booleans, or 0 and 1. Raises DataError."""
    if values is None:
        fail(where, "is None", "leave it out, or give a share, True or False a row, or examples of their own")
    strange = "does not say of each row whether it is a test example"
    words = {value for value in islice(values, WORDS) if isinstance(value, str)} if np.ndim(values) == 1 else set()
    if words:
        such = next((word for word in sorted(words) if "test" in word.lower()), min(words))
        fail(where, strange, f"give True or False a row, as by == {such!r}")
    array = as_array(values, where)
    if array.shape != (rows,) or array.dtype.kind not in "bui" or not np.isin(array, (0, 1)).all():
        fail(where, strange, "give True or False a row")
    result = torch.from_numpy(array.astype(bool))
    if result.all() or not result.any():
        fail(where, f"{'all' if result.all() else 'no'} rows are test examples", "leave some of both")
    return result


def as_array(values: Any, where: str) -> NDArray[Any]:
    """Return an array; of rows that are not alike a DataError that names the first."""
    values = _plain(values, where)
    values = values.to_numpy() if hasattr(values, "to_numpy") else values
    _check_masks(values, where)
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype != object:
        return array
    if array.ndim == 0:
        fail(where, f"is a {type(values).__name__}, no rows", "give an array or a list")
    try:  # a column of arrays, or numbers among which something else is
        result = np.stack([np.asarray(row) for row in values]) if _alike(values, where) else array
        return np.array(result.tolist()) if result.dtype == object else result  # numbers, each an object
    except DataError:
        raise
    except ValueError as e:
        fail(where, one_line(e), "make all rows alike")


def _alike(rows: Sequence[Any], where: str) -> bool:
    """Return whether rows are arrays of numbers. Raises DataError where they differ in shape."""
    first: tuple[int, ...] | None = None
    for i, row in enumerate(rows):
        if row is None:
            fail(f"{where}, row {i}", "is missing", "fill it in, or leave the row out")
        try:
            array = np.asarray(row)
        except ValueError:
            fail(f"{where}, row {i}", "holds rows of unequal lengths", "pad or cut them, so that all are alike")
        first = array.shape if first is None else first
        if array.shape != first:
            fix = "pad or cut them, so that all rows are alike"
            if array.ndim == 1 and array.dtype.kind in "iu":
                fix += ", or, where they are tokens, read them as texts (text=, from_texts)"
            fail(f"{where}, row {i}", f"is of shape {array.shape}, and row 0 of {first}", fix)
        if array.dtype.kind not in KINDS:
            bad = [x for x in leaves_of(row) if np.asarray(x).dtype.kind not in KINDS][:1]
            if bad == [None]:
                fail(f"{where}, row {i}", "has a null", "fill it in, or leave the row out")
            if bad:
                kind = type(bad[0]).__name__
                what = f"is {kind}" if bad[0] is row else f"has {one_line(repr(bad[0]))[:40]} ({kind})"
                fail(f"{where}, row {i}", f"{what}, no number", "make it a number, or leave the row out")
    return True


def leaves_of(values: Any) -> Iterator[Any]:
    """Give what lists, tuples and arrays of objects hold, however deep."""
    if isinstance(values, list | tuple | np.ndarray):
        for value in values:
            yield from leaves_of(value)
    else:
        yield values
