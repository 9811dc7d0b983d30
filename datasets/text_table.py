"""Texts of a table as tokens: each is tokenised once, and its tokens wait in a nameless file until it is known where they lie.

In memory are a batch of texts, a vocabulary, and some numbers a row.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedfleet.datasets import columns
from fedfleet.datasets.columns import Bad
from fedfleet.datasets.disk import token_type
from fedfleet.datasets.example_table import ExampleTable, Rows
from fedfleet.datasets.texts import Reading, pieces, token_numbers
from fedfleet.datasets.tokens import tokenizer
from fedfleet.datasets.user_data import fail
from fedfleet.datasets.vocabulary import PADDING, Vocabulary

PADDED_BYTES = 1 << 26  # of tokens, padded, at a time
TOKEN = np.dtype(np.int32)

Encode = Callable[[list[str], Sequence[Any]], list[list[int]]]


class TextRows:
    """Rows of tokens, each a text or a piece of one.

    Args:
        table: where the texts are.
        encode: given what each of some texts is called, and these, returns their tokens.
        window: without labels and targets, tokens read at once.
        classes: labels are below it.
        folder: where tokens wait.

    Attributes:
        path: that of the table.
        rows: their number.
        of: (rows,) the row of the table that each is of.
        longest: tokens of the longest.
        most: the largest token.
        dtype: what tokens are kept as on disk.

    Raises DataError.

    """

    def __init__(self, table: ExampleTable, encode: Encode, window: int | None, classes: int | None, folder: Path):
        self.path = table.path
        self._tokens: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        lengths, of, aims, first = [], [], [], 0
        foretell = not table.called.aims
        self.most = 0
        for batch in table.raw():
            name = table.features[0]
            with batch.naming(name):
                texts = _values(batch.columns[name])
                called = [f"{batch.file}: column {name!r}, row {batch.start + i}" for i in range(len(texts))]
                result = encode(called, texts)
                for i, tokens in enumerate(result):
                    if len(tokens) < 1 + foretell:
                        problem = (
                            f"has {len(tokens)} token{'s' * (len(tokens) != 1)}" + " and none to foresee" * foretell
                        )
                        raise Bad(i, problem, "leave the row out")
            cut = [[*pieces(tokens, window)] for tokens in result]
            flat = np.fromiter(itertools.chain(*(piece for text in cut for piece in text)), TOKEN)
            self._tokens.write(flat.tobytes())
            self.most = max(self.most, int(flat.max()))
            lengths.append(np.array([len(piece) for text in cut for piece in text]))
            of.append(np.repeat(np.arange(first, first + len(cut)), [len(text) for text in cut]))
            if not foretell:
                aims.append(table.aims(batch, classes))
            first += len(cut)
        table.check_told_apart()
        self._lengths: NDArray[np.int64] = np.concatenate(lengths)
        self.of: NDArray[np.int64] = np.concatenate(of)
        self._y = np.concatenate(aims)[self.of] if aims else np.zeros(len(self.of), dtype=np.int64)
        self.rows, self.longest, self.dtype = len(self.of), int(self._lengths.max()), TOKEN

    def batches(self, classes: int | None = None) -> Iterator[Rows]:
        """Yield all rows in order: tokens (n, longest) of `dtype`, -1 after the end of each, and labels, targets or zeros."""
        self._tokens.seek(0)
        step = max(1, PADDED_BYTES // (self.dtype.itemsize * self.longest))
        for start in range(0, self.rows, step):
            lengths = self._lengths[start : start + step]
            x = np.full((len(lengths), self.longest), PADDING, dtype=self.dtype)
            x[np.arange(self.longest) < lengths[:, None]] = np.frombuffer(
                self._tokens.read(int(lengths.sum()) * TOKEN.itemsize), TOKEN
            )
            yield Rows(x, self._y[start : start + step])


def tokenised(
    train: ExampleTable,
    tests: ExampleTable | None,
    training: NDArray[np.bool_],
    how: Reading,
    classes: int | None,
    folder: Path,
) -> tuple[TextRows, TextRows | None, int, Vocabulary | None]:
    """Return the rows of both tables, as wide as the longest of all, how many tokens there are, and which, where that is known.

    `training` (rows,) are the rows of `train` that a vocabulary is made of. Raises DataError.
    """
    foretell, vocabulary = not train.called.aims, None
    if train.of_text:
        cut = None if foretell else how.length
        made = tokenizer(how.tokenizer or "words", _training(train, training), how.words).cut_at(cut)

        def encode(called: list[str], texts: Sequence[Any]) -> list[list[int]]:
            return made.rows(texts)

        words, vocabulary = made.words, made
    else:
        if how.tokenizer is not None:
            fail("tokenizer", f"is {how.tokenizer!r}, and {train.path} has token numbers", "leave it out")

        def encode(called: list[str], texts: Sequence[Any]) -> list[list[int]]:
            return [row if foretell else row[: how.length] for row in token_numbers(called, texts, how.words)]

        words = how.words
    window = how.length if foretell else None
    rows = TextRows(train, encode, window, classes, folder)
    held = None if tests is None else TextRows(tests, encode, window, classes, folder)
    both = (rows, held) if held else (rows,)
    words = words or 1 + max(one.most for one in both)
    for one in both:
        one.longest, one.dtype = max(each.longest for each in both), token_type(words)
    return rows, held, words, vocabulary


def _training(table: ExampleTable, training: NDArray[np.bool_]) -> Iterator[str]:
    first, name = 0, table.features[0]
    for batch in table.raw():
        with batch.naming(name):
            texts = _values(batch.columns[name])
        yield from itertools.compress(texts, training[first : first + len(texts)])
        first += len(texts)


def _values(column: Any) -> list[Any]:
    column = columns.plain(column)
    column.validate(full=True)  # text may be none in UTF-8
    return column.to_pylist()
