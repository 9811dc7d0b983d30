"""Text, or lists of token numbers, of several lengths: rows of tokens, -1 after the end of each.

With labels or targets a row is one text. Without, the next token is what is learnt, and a row is a piece of a text: where
``length`` says how many tokens are read at once, a longer text is several rows, each beginning with the last of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedfleet.datasets import user_data
from fedfleet.datasets.examples import Dataset, FederatedDataset
from fedfleet.datasets.parts import Parts, put_together, split
from fedfleet.datasets.tokens import tokenizer
from fedfleet.datasets.user_data import Rows, fail
from fedfleet.datasets.vocabulary import PADDING


class Reading(NamedTuple):
    """How texts become tokens, as `from_texts` says."""

    tokenizer: str | None = None
    length: int | None = None
    words: int | None = None


def from_texts(
    texts: Iterable[Any],
    y: Any = None,
    *,
    target: Any = None,
    client: Any = None,
    domain: Any = None,
    test: Any = 0.1,
    tokenizer: str | None = None,
    length: int | None = None,
    words: int | None = None,
    classes: int | None = None,
    name: str = "texts",
) -> Dataset | FederatedDataset:
    """Return texts of several lengths as data for ``fedfleet.run(data=…)``.

    Args:
        texts: n texts, in a list or from an iterator, or n lists or arrays of token numbers from 0.
        y: (n,) labels, integers from 0 or text, one a text; without them and targets the next token is learnt, by
            ``task=language_model``.
        target: instead, for ``task.name=module``: (n, ...) numbers to be foreseen, some a text.
        client, domain: as in `from_arrays`.
        test: a share or (n,) booleans, as in `from_arrays`; or test examples of their own, ``(texts, y)`` or
            ``(texts, y, domain)``, ``(texts, target)``, without either ``(texts,)`` or ``(texts, domain)``.
        tokenizer: of text: bytes, characters, words (if nothing is said), vocabulary:PATH, that of an earlier run, or
            transformers:PATH, a local folder.
        length: with labels or targets, tokens at which a text is cut off; without, tokens read at once, and a longer text is
            several rows. If not given, that of the longest.
        words: tokens at most of a vocabulary of characters or words, 10,000 if not given; of token numbers, which are below it, one
            more than the largest.
        classes: labels are below it; one more than the largest, if not given.
        name: in reports.

    A vocabulary of characters or words is made from the training texts of all clients. Raises DataError, a ValueError of one line.

    """
    for key, value, low in (("length", length, 1), ("words", words, 2)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            fail(key, f"is {value!r}", f"give a whole number from {low}, or leave it out")
    no_rows = (str, bytes, Mapping, Set)  # of a mapping the keys would be read, of a set in any order
    if isinstance(texts, no_rows) or hasattr(texts, "columns") or not isinstance(texts, Iterable):
        fail("texts", f"is a {type(texts).__name__}", "give a list of texts")
    texts = list(texts)
    if y is not None and target is not None:
        fail("y", "labels and targets are given", "give y= labels or target= numbers")
    if y is None and target is None and classes is not None:
        fail("classes", f"is {classes}, and there are no labels", "leave it out, or give y= labels")
    classes, aim = user_data.check_classes(classes, target), y if target is None else target
    own: list[Any] = []
    if isinstance(test, tuple):
        most = 3 - (aim is None)
        if not most - 1 <= len(test) <= most:
            fail(
                "test", f"has {len(test)} entries", "give (texts, y) or (texts, y, domain), or without labels (texts,)"
            )
        own = list(test[0])
        of_own, place = (None, test[1:]) if aim is None else (test[1], test[2:])
        held: Any = _rows("test ", len(texts), len(own), of_own, None, place[0] if place else None, classes)
    else:
        held = test if isinstance(test, int | float) else user_data.flags(test, "test", len(texts))
    rows = _rows("", 0, len(texts), aim, client, domain, classes)
    parts = split(rows, held, classes)
    return put_together(name, tokenised(parts, [*texts, *own], Reading(tokenizer, length, words), foretell=aim is None))


def check_reading(how: Reading, text: str | None, label: str | None, features: Any, classes: int | None) -> None:
    """Refuse options of texts where there is no column of them, and the other way round. Raises DataError."""
    if text is None:
        for key, value in how._asdict().items():
            if value is not None:
                fail(key, f"is {value!r}, and no column is text", "name it as text, or leave this out")
        if label is None:
            fail("label", "is None, and no column is text", "name a column of labels")
    elif features is not None:
        fail("features", f"are given beside text={text!r}", "leave one of them out")
    elif label is None and classes is not None:
        fail("classes", f"is {classes}, and there are no labels", "leave it out, or name a column of labels")


def _rows(prefix: str, first: int, count: int, aim: Any, client: Any, domain: Any, classes: int | None) -> Rows:
    if not count:
        fail(f"{prefix}texts", "there are none", "give some")
    zeros = torch.zeros(count, dtype=torch.int64)
    y, names = (zeros, ()) if aim is None else user_data.aims(aim, prefix, classes, count)
    return Rows(
        f"{prefix}texts",
        torch.arange(first, first + count)[:, None],
        y,
        None if client is None else user_data.codes(client, "client", "client", count),
        None if domain is None else user_data.codes(domain, f"{prefix}domain", "domain", count, rising=True),
        names,
    )


def tokenised(parts: Parts, texts: Sequence[Any], how: Reading, *, foretell: bool, drop_short: bool = False) -> Parts:
    """Return training and test rows whose ``x``, numbers (n, 1) of texts, has become tokens (n, L).

    A text with no token to learn from is left out if `drop_short`, else refused. Raises DataError.
    """
    import pandas as pd  # here, for workers need none of it

    sides = [(part, [texts[i] for i in part.x[:, 0].tolist()]) for part in (parts.train, parts.test)]
    first = 0 if parts.train.where == parts.test.where else len(parts.train.x)  # number of the first of their own
    called = [
        [f"{part.where}, row {number - (part is parts.test) * first}" for number in part.x[:, 0].tolist()]
        for part, _ in sides
    ]
    for where, text in (
        (w, t) for rows, (_, side) in zip(called, sides, strict=True) for w, t in zip(rows, side, strict=True)
    ):
        if np.ndim(text) == 0 and pd.isna(text):
            fail(where, "is missing", "give a text, or leave the row out")
        if isinstance(text, str):
            user_data.check_text(where, text)
    if all(isinstance(text, str) for text in texts):
        made = tokenizer(how.tokenizer or "words", sides[0][1], how.words).cut_at(None if foretell else how.length)
        result, words = [made.rows(side) for _, side in sides], made.words
        parts = parts.called(vocabulary=made)
    else:
        if how.tokenizer is not None:
            fail("tokenizer", f"is {how.tokenizer!r}, and not all rows are text", "give text alone, or leave it out")
        result = [token_numbers(rows, side, how.words) for rows, (_, side) in zip(called, sides, strict=True)]
        words = how.words or 1 + max(max(row, default=0) for side in result for row in side)
        result = result if foretell else [[row[: how.length] for row in side] for side in result]
    window = how.length if foretell else None
    if drop_short:
        kept = [[i for i, row in enumerate(side) if len(row) > foretell] for side in result]
        for (part, _), there in zip(sides, kept, strict=True):
            if not there:
                fail(part.where, "no text has tokens enough to learn from", "give others, or another tokenizer")
        sides = [(part.of(torch.tensor(there)), []) for (part, _), there in zip(sides, kept, strict=True)]
        result = [[side[i] for i in there] for side, there in zip(result, kept, strict=True)]
        called = [[of[i] for i in there] for of, there in zip(called, kept, strict=True)]
    rows = [_padded(of, side, window, foretell=foretell) for of, side in zip(called, result, strict=True)]
    longest = max(x.shape[1] for x, _ in rows)
    train, test = (
        replace(part.of(of), x=torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=PADDING))
        for (part, _), (x, of) in zip(sides, rows, strict=True)
    )
    return Parts(train, test, words if foretell else parts.classes, words, parts.names)


def token_numbers(called: Sequence[str], rows: Sequence[Any], words: int | None) -> list[list[int]]:
    """Return rows of token numbers, below ``words`` where given; ``called`` says what each row is. Raises DataError."""
    result = []
    for where, row in zip(called, rows, strict=True):
        array = np.asarray(row)
        if any(x is None or x != x for x in (user_data.leaves_of(row) if array.dtype.kind in "Of" else ())):
            fail(where, "has a null among its tokens", "fill it in, or leave the row out")
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            fail(where, "is neither text nor a list of token numbers", "make all rows one or the other")
        if array.size and (array.min() < 0 or array.max() >= (words or np.inf)):
            bad = int(array.min() if array.min() < 0 else array.max())
            fail(where, f"has a token {bad}", f"number tokens from 0{f' to {words - 1}' if words else ''}")
        result.append(array.tolist())
    return result


def _padded(called: list[str], texts: list[list[int]], length: int | None, *, foretell: bool) -> tuple[Tensor, Tensor]:
    """Return rows of tokens (m, L), and which text each is of (m,)."""
    rows: list[Tensor] = []
    of: list[int] = []
    for i, text in enumerate(texts):
        if len(text) < 1 + foretell:
            problem = f"has {len(text)} token{'s' * (len(text) != 1)}" + " and none to foresee" * foretell
            fail(called[i], problem, "leave the row out")
        for piece in pieces(text, length):
            rows.append(torch.tensor(piece))
            of.append(i)
    return pad_sequence(rows, batch_first=True, padding_value=PADDING), torch.tensor(of)


def pieces(text: list[int], length: int | None) -> Iterator[list[int]]:
    """Give windows of ``length`` tokens and the one that follows them, the last one shorter."""
    if length is None:
        yield text
        return
    yield from (text[start : start + length + 1] for start in range(0, len(text) - 1, length))
