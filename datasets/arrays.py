"""Arrays and data frames as clients' data: every mistake is said before any work, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedfleet.datasets import columns, user_data
from fedfleet.datasets.apart import check_told_apart
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.datasets.parts import put_together, split
from fedfleet.datasets.texts import Reading, check_reading, from_texts
from fedfleet.datasets.user_data import Codes, Rows, fail

if TYPE_CHECKING:
    import pandas as pd  # elsewhere only where it is used: workers need none of it

WRITTEN = re.compile(r"Unnamed: \d+(_level_\d+)?|__index_level_\d+__")
"""What pandas calls an index that was written beside the data and read as a column."""
LABEL = user_data.Unsaid("y")
MOSTLY = 0.5  # of a column that is text, the share of numbers from which on they are what is meant
COUNTED = ("index", "level_0")  # what reset_index makes of an index; a feature may be called so, too


def from_arrays(
    x: Any,
    y: Any = None,
    *,
    target: Any = None,
    client: Any = None,
    domain: Any = None,
    test: Any = 0.1,
    classes: int | None = None,
    name: str = "arrays",
) -> Dataset | FederatedDataset:
    """Return examples in arrays as data for ``fedfleet.run(data=…)``.

    Args:
        x: (n, ...) examples. Unsigned bytes are pixels, which nets read as -1 … 1; other integers stay integers, such as words;
            all else becomes float32. Images have their channels first.
        y: (n,) labels: integers from 0, or text, numbered in the order of the alphabet.
        target: instead, for ``task.name=module``: (n, ...) numbers to be foreseen, or 0 and 1, or integers, one a token or pixel.
        client: (n,) which client holds each example, an integer or text; None: ``population.partition`` deals them.
        domain: (n,) the domain of each, an integer or text; a client is of one.
        test: the test examples: a share, of clients if there are any, else of examples, of every domain (a fixed draw); (n,)
            booleans; or arrays of their own, ``(x, y)`` or ``(x, y, domain)``, with targets ``(x, target)``.
        classes: labels are below it; one more than the largest, if not given.
        name: in reports.

    Raises DataError, a ValueError of one line.

    """
    if (y is None) == (target is None):
        fail(
            "y",
            "labels and targets are given" if y is not None else "is not given",
            "give y= labels or target= numbers",
        )
    classes = user_data.check_classes(classes, target)
    rows = _rows("", x, y if target is None else target, client, domain, classes)
    if isinstance(test, tuple):
        if len(test) not in (2, 3):
            fail("test", f"has {len(test)} entries", "give (x, y), or (x, y, domain)")
        user_data.check_columns(x, test[0], "x")
        user_data.check_columns(target, test[1], "target")
        held: Any = _rows("test ", test[0], test[1], None, test[2] if len(test) == 3 else None, classes)
    else:
        held = test if isinstance(test, int | float) else user_data.flags(test, "test", len(rows.y))
    return put_together(name, split(rows, held, classes))


def from_dataframe(
    df: pd.DataFrame,
    *,
    client: str | None = None,
    label: str | None = LABEL,
    target: str | Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    length: int | None = None,
    words: int | None = None,
    domain: str | None = None,
    test: float | str | pd.DataFrame = 0.1,
    classes: int | None = None,
    name: str = "dataframe",
) -> Dataset | FederatedDataset:
    """Return a pandas data frame, a row an example, as data for ``fedfleet.run(data=…)``.

    Args:
        df: columns of numbers, or one column whose entries are arrays of one shape.
        client: the column that says which client holds a row, integers or text; None: ``population.partition`` deals them.
        label: the column of labels, integers from 0, or text, numbered in the order of the alphabet; of texts None, for
            ``task=language_model``.
        target: instead, for ``task.name=module``: the column, or columns, of numbers to be foreseen.
        features: the columns that make an example; all others, if not given. Integers alone stay integers; with a number that is
            none all become float32.
        text: instead of features, the column of texts, or of lists of token numbers, of several lengths.
        tokenizer, length, words: of texts, as in `from_texts`.
        domain: the column that says the domain, integers or text; a client is of one.
        test: the test examples: a share, as in `from_arrays`; a column of True and False, or (n,) of these; or a data frame of
            their own, in which `client` may be missing.
        classes: labels are below it; one more than the largest, if not given.
        name: in reports.

    Raises DataError, a ValueError of one line. Rows are counted from 0, whatever the index.

    """
    import pandas as pd

    check_frame(df, "df")
    user_data.check_aim(label, target)
    how = Reading(tokenizer, length, words)
    check_reading(how, text, label if target is None else "y", features, classes)
    if text is not None:
        return _of_texts(df, text, label, target, client, domain, test, how, classes, name)
    classes = user_data.check_classes(classes, target)
    wanted = aims(label, target)
    own = {"client": client, **wanted, "domain": domain, "test": test if isinstance(test, str) else None}
    check_own(df, "df", own)
    chosen = _features(df, features, [c for c in own.values() if c is not None])
    if features is None:
        user_data.check_left("df", chosen, LABEL, target)
    wants = target or label or ""
    rows = _of_frame(df, "df", chosen, wants, client, domain, classes)
    if isinstance(test, pd.DataFrame):
        check_frame(test, "test")
        there = domain if domain in test.columns else None
        check_own(test, "test", wanted)
        if missing := [c for c in chosen if c not in test.columns]:
            fail("test", f"no column {missing[0]!r}", "give both data frames the same features")
        held: Any = _of_frame(test, "test", chosen, wants, None, there, classes)
    elif isinstance(test, str):
        held = user_data.flags(df[test], f"column {test!r}", len(df))
    else:
        held = test if isinstance(test, int | float) else user_data.flags(test, "test", len(df))
    return put_together(name, split(rows, held, classes).called(features=user_data.feature_names(chosen, rows.x)))


def _of_texts(
    df: pd.DataFrame,
    text: str,
    label: str | None,
    target: str | Sequence[str] | None,
    client: str | None,
    domain: str | None,
    test: float | str | pd.DataFrame,
    how: Reading,
    classes: int | None,
    name: str,
) -> Dataset | FederatedDataset:
    import pandas as pd

    wanted = aims(label, target)
    own = {"text": text, **wanted}
    check_own(df, "df", {**own, "client": client, "domain": domain, "test": test if isinstance(test, str) else None})

    def column(of: pd.DataFrame, name: str | None) -> Any:
        return None if name is None else of[name]

    def aim(of: pd.DataFrame, where: str) -> dict[str, Any]:
        if target is None:
            return {"y": column(of, label)}
        return {"target": targets(of, target, lambda name: f"{where}: column {name!r}")}

    held: Any = df[test] if isinstance(test, str) else test
    if isinstance(test, pd.DataFrame):
        check_frame(test, "test")
        check_own(test, "test", own)
        place = column(test, domain if domain in test.columns else None)
        held = (test[text].tolist(), *(said for said in (*aim(test, "test").values(), place) if said is not None))
    return from_texts(
        df[text].tolist(),
        **aim(df, "df"),
        client=column(df, client),
        domain=column(df, domain),
        test=held,
        **how._asdict(),
        classes=classes,
        name=name,
    )


def _rows(prefix: str, x: Any, y: Any, client: Any, domain: Any, classes: int | None) -> Rows:
    examples = user_data.inputs(x, f"{prefix}x")
    count = len(examples)
    aim, names = user_data.aims(y, prefix, classes, count)
    return Rows(
        f"{prefix}x",
        examples,
        aim,
        None if client is None else user_data.codes(client, f"{prefix}client", "client", count),
        None if domain is None else user_data.codes(domain, f"{prefix}domain", "domain", count, rising=True),
        names,
    )


def check_frame(df: Any, where: str) -> None:
    """Refuse what is no data frame with rows, or one in which two columns are called alike. Raises DataError."""
    import pandas as pd

    if not isinstance(df, pd.DataFrame):
        fix = "give a pandas DataFrame" if where == "df" else "give a share, a column's name or a pandas DataFrame"
        fix += ", as by .to_pandas()" if hasattr(df, "to_pandas") else ""
        fail(where, f"is a {type(df).__name__}", fix)
    if len(df) == 0:
        fail(where, "has no rows", "give one with examples")
    if twice := df.columns[df.columns.duplicated()].tolist():
        fail(where, f"two columns {twice[0]!r}", "rename one")


def check_own(df: pd.DataFrame, where: str, own: dict[str, str | None], among: Sequence[Any] = ()) -> None:
    """Refuse columns that are named and not there, or named twice; `among` is what there is. Raises DataError."""
    named = {argument: column for argument, column in own.items() if column is not None}
    for argument, column in named.items():
        if column not in df.columns:
            known = [str(c) for c in among or df.columns]
            nearest = difflib.get_close_matches(str(column), known, n=1)
            fix = f"did you mean {nearest[0]!r}" if nearest else f"choose {argument}= among {', '.join(known)}"
            fail(where, f"no column {column!r}", fix)
        if list(named.values()).count(column) > 1:
            fail(where, f"the column {column!r} is named twice", f"give {argument}= another")


def _features(df: pd.DataFrame, asked: Sequence[str] | None, own: Sequence[str]) -> list[Any]:
    if asked is not None:
        if isinstance(asked, str) or not asked:
            fail("features", f"is {asked!r}", "give a list of columns")
        for column in asked:
            if column in own:
                fail("features", f"the column {column!r} is no feature", "leave it out")
        check_own(df, "df", {f"features[{i}]": column for i, column in enumerate(asked)})
        return list(asked)
    chosen = [c for c in df.columns if c not in own]
    for column in chosen:
        is_count = column in COUNTED and (_is(df[column], np.arange(len(df))) or _is(df[column], df.index))
        if WRITTEN.fullmatch(str(column)) or is_count:
            fix = f"read the table with index_col=0, or leave it out: df.drop(columns={column!r})"
            fail("df", f"the column {column!r} is an index and no feature", fix)
    if not chosen:
        fail("df", "no columns are left for features", "give a column a feature, or features= a list of them")
    return chosen


def _is(column: Any, values: Any) -> bool:
    return bool(np.array_equal(column.to_numpy(), np.asarray(values)))


def _of_frame(
    df: pd.DataFrame,
    where: str,
    features: Sequence[Any],
    label: str | Sequence[str],
    client: str | None,
    domain: str | None,
    classes: int | None,
) -> Rows:
    def at(column: Any) -> str:
        return f"{where}: column {column!r}"

    x = example_columns(df, features, at)
    count = len(df)
    y, names = (
        (targets(df, label, at), ()) if classes == 0 else user_data.named_labels(df[label], at(label), classes, count)
    )
    return Rows(
        where,
        x,
        y,
        None if client is None else _codes(df, client, "client", at),
        None if domain is None else _codes(df, domain, "domain", at),
        names,
    )


def aims(label: str | None, target: str | Sequence[str] | None) -> dict[str, str | None]:
    """Return the columns of labels or targets, by what calls them. Raises DataError."""
    if target is None:
        return {"label": label}
    names = [target] if isinstance(target, str) else list(target)
    if not names:
        fail("target", "is an empty list", "name a column")
    return {"target" if len(names) == 1 else f"target[{i}]": name for i, name in enumerate(names)}


def targets(df: pd.DataFrame, target: str | Sequence[str], at: Any) -> Tensor:
    """Return columns of targets as float32: (n,) of one that is named alone, else (n, columns). Raises DataError."""
    names = [target] if isinstance(target, str) else list(target)
    result = example_columns(df, names, at).float()
    for name in names:
        check_told_apart(user_data.as_array(df[name], at(name)), at(name))
    return result[:, 0] if isinstance(target, str) and df[target].dtype != object else result


def _holds_lists(column: Any) -> bool:
    """Return whether a column has lists or arrays, in Arrow's memory or as objects."""
    import pandas as pd

    if isinstance(column.dtype, pd.ArrowDtype):
        return columns.holds_lists(column.dtype.pyarrow_dtype)
    first = next((value for value in column if value is not None), None) if column.dtype == object else None
    return isinstance(first, list | tuple | np.ndarray)


def _codes(df: pd.DataFrame, column: str, what: str, at: Any) -> Codes:
    return user_data.codes(df[column], at(column), what, len(df), rising=what == "domain")


def example_columns(df: pd.DataFrame, features: Sequence[Any], at: Any) -> Tensor:
    """Return columns of numbers, or one of arrays, as examples (n, ...); `at` says where a column is. Raises DataError."""
    import pandas as pd

    if len(features) == 1 and (df[features[0]].dtype == object or _holds_lists(df[features[0]])):
        column: Any = df[features[0]]
        of_arrow = isinstance(column.dtype, pd.ArrowDtype)  # whose nulls pandas would make NaN
        return user_data.inputs(column.array.__arrow_array__() if of_arrow else column.tolist(), at(features[0]))
    result = []
    for name in features:
        column = df[name]
        if _holds_lists(column):
            fix = f"give features=[{name!r}], or make it columns of a number each"
            fail(at(name), "holds lists, which are an example alone", fix)
        if pd.api.types.is_complex_dtype(column):
            fail(at(name), "is complex", "give its real and its imaginary part a column each, or leave it out")
        if isinstance(column.dtype, pd.CategoricalDtype) or not pd.api.types.is_numeric_dtype(column):
            kind = pd.api.types.infer_dtype(column, skipna=True)
            how = f"pd.get_dummies(df, columns=[{name!r}])"
            what = f", or say what it is, as by client={name!r}" if kind == "string" else ""
            if kind == "string" and pd.Series(pd.to_numeric(column, errors="coerce")).notna().mean() > MOSTLY:
                how = f"df[{name!r}] = pd.to_numeric(df[{name!r}], errors='coerce')"
            if pd.api.types.is_datetime64_any_dtype(column):
                how = f"(df[{name!r}] - df[{name!r}].min()).dt.days"
            fix = f"make it numbers, by {how} for instance, or leave it out{what}"
            others = [repr(c) for c in features if c != name and not pd.api.types.is_numeric_dtype(df[c])]
            too = f" (nor are {', '.join(others)})" if others else ""
            fail(at(name), f"is {'text' if kind == 'string' else kind}, no numbers{too}", fix)
        if (missing := column.isna().to_numpy()).any():
            fail(f"{at(name)}, row {missing.argmax()}", "is missing", "fill it in, or leave the row out")
        result.append(column.to_numpy())
    numbers = {c.dtype.kind for c in result} - {"b"}
    kind = None if numbers and numbers <= {"i", "u"} else np.float64
    as_one = [c.astype(np.int64) if kind is None and c.dtype.kind == "b" else np.asarray(c, kind) for c in result]
    return user_data.joined([user_data.inputs(c[:, None], at(name)) for name, c in zip(features, as_one, strict=True)])
