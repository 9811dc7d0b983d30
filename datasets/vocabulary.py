"""Vocabularies: which number each token has, how new texts are read, and the file that keeps this.

    {"tokenizer": "words", "words": 10000, "length": 40, "tokens": {"the": 1, "a": 2, …}}

The file lists no tokens where texts are read as bytes, or by a Hugging Face tokenizer; of the latter it has a digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedfleet.datasets.user_data import fail
from fedfleet.files.documents import text_of
from fedfleet.simulator.errors import one_line

VOCABULARY = "vocabulary.json"
PREFIX = "transformers:"
WORD = re.compile(r"[\w']+|[.,!?;]")
MARKS = re.compile(r"[^\w\s]|_")
UNKNOWN = 0
PADDING = -1
"""What stands after the end of a text in the place of a token, so that texts of several lengths are one tensor."""
SHORT = 12  # digits of a digest
Cut = Callable[[str], Sequence[str]]
CUTS: Mapping[str, Cut] = {
    "characters": lambda text: text,
    "words": lambda text: WORD.findall(text.lower()),
    "plain words": lambda text: MARKS.sub("", text.lower()).split(),
}
"""How a text is cut into the pieces that are tokens; "plain words" are those of data sets of language, without marks."""


class Encoded(NamedTuple):
    """Texts as a net takes them: tokens (n, L) int64, 0 after the end of each, and where there are any, (n, L) bool."""

    tokens: Tensor
    mask: Tensor


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """Tokens of texts.

    Attributes:
        tokenizer: by its name, see `tokens`.
        words: how many tokens there are; all are below.
        tokens: of pieces of text the number of each, where there is such a list.
        length: tokens at which a text is cut off; None: it is not.
        source: of a tokenizer of Hugging Face's the digest of its tokens.
        unknown: the number of any other piece.

    """

    tokenizer: str
    words: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    length: int | None = None
    source: str | None = None
    unknown: int = UNKNOWN

    def __repr__(self) -> str:
        """Return a line."""
        return f"Vocabulary({self.tokenizer}, {self.words:,} tokens)"

    @property
    def digest(self) -> str:
        """What tells it from others that number tokens otherwise, whatever the length."""
        told = [self.tokenizer.partition(":")[0], self.words, sorted(self.tokens.items()), self.source, self.unknown]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:SHORT]

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, cut off at ``length``. Raises DataError."""
        length = self.length
        if self.tokenizer == "bytes":
            return [list(text.encode()[:length]) for text in texts]
        if self.tokenizer.startswith(PREFIX):
            cut = {"truncation": True, "max_length": length} if length is not None else {}
            return pretrained(self.tokenizer)(list(texts), verbose=False, **cut)["input_ids"] if texts else []
        cut_up, number, unknown = CUTS[self.tokenizer], self.tokens, self.unknown
        return [[number.get(piece, unknown) for piece in cut_up(text)[:length]] or [unknown] for text in texts]

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return texts as nets read them, cut off at ``length``.

        Raises DataError, a ValueError of one line, for what is no list of texts.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            fail("texts", f"is {one_line(repr(texts))[:60]}, no list of texts", "give a list of them")
        self.check()
        rows = [torch.tensor(row, dtype=torch.int64) for row in self.rows(texts)]
        padded = pad_sequence(rows, batch_first=True, padding_value=PADDING)
        return Encoded(padded.clamp(min=0), padded != PADDING)

    def check(self) -> None:
        """Refuse a tokenizer of Hugging Face's whose folder has another by now. Raises DataError."""
        if self.source is not None and (result := pretrained_digest(self.tokenizer)) != self.source:
            where = self.tokenizer.removeprefix(PREFIX)
            fail(where, f"it is another tokenizer by now ({result}, not {self.source})", "bring back what it was")

    def cut_at(self, length: int | None) -> Vocabulary:
        """Return it for texts that are cut off at another length."""
        return replace(self, length=length)

    def dumped(self) -> str:
        """Return it as it is written to a file."""
        return json.dumps(_File.model_validate(vars(self)).model_dump(), ensure_ascii=False, indent=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    tokenizer: str
    words: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=1)] | None
    source: str | None
    unknown: Annotated[int, Field(ge=0)]
    tokens: Mapping[str, Annotated[int, Field(ge=0)]]


def read_vocabulary(path: Path, key: str = "tokenizer") -> Vocabulary:
    """Return the vocabulary in a file, or in the folder of a run or of clients that has one. Raises DataError."""
    file = path / VOCABULARY if path.is_dir() else path
    try:
        result = _File.model_validate_json(text_of(file))
    except (OSError, UnicodeError) as e:
        fix = f"give a {VOCABULARY}, or the folder of a run that read texts"
        fail(key, f"{file} cannot be read ({getattr(e, 'strerror', None) or one_line(e)})", fix)
    except ValidationError as e:
        fail(key, f"{file} is no vocabulary ({e.error_count()} faults)", f"give the {VOCABULARY} of a run")
    if len({*result.tokens.values()}) < len(result.tokens):
        fail(key, f"{file} numbers two tokens alike", f"give the {VOCABULARY} of a run")
    known = result.tokenizer in ("bytes", *CUTS) or result.tokenizer.startswith(PREFIX)
    if not known or max(result.tokens.values(), default=0) >= result.words:
        what = "numbers a token beyond its words" if known else f"is of the tokenizer {result.tokenizer!r}"
        fail(key, f"{file} {what}", f"give the {VOCABULARY} of a run")
    return Vocabulary(**result.model_dump(exclude={"format"}))


def counted(name: str, training: Iterable[str], words: int) -> Vocabulary:
    """Return the vocabulary of the most frequent pieces of training texts: ``words`` tokens, of which 0 is all else."""
    often = Counter(piece for text in training for piece in CUTS[name](text))
    kept = sorted(often, key=lambda piece: (-often[piece], piece))[: words - 1]
    return Vocabulary(name, len(kept) + 1, {piece: i for i, piece in enumerate(kept, UNKNOWN + 1)})


def pretrained(name: str, key: str = "tokenizer") -> Any:
    """Return a tokenizer of Hugging Face's out of a local folder. Raises DataError."""
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if not path.is_dir():
        fail(key, f"is {name!r}, and {path} is no folder", "give the folder that a tokenizer was saved to")
    if find_spec("transformers") is None:
        fail(key, f"is {name!r}, and transformers is not installed", "pip install 'fedfleet[transformers]'")
    try:
        return _loaded(str(path), tuple((at.name, at.stat().st_mtime_ns) for at in sorted(path.iterdir())))
    except Exception as e:  # of any of the kinds that the library has
        fix = "give the folder that a tokenizer was saved to, by save_pretrained"
        fail(key, f"is {name!r}, of which transformers reads none ({type(e).__name__}: {one_line(e)[:200]})", fix)


@lru_cache(4)
def _loaded(path: str, files: tuple[tuple[str, int], ...]) -> Any:
    """Return what is in a folder as long as its files are the same."""
    from transformers import AutoTokenizer  # here, for it takes seconds to import

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def pretrained_digest(name: str, key: str = "tokenizer") -> str:
    """Return the digest of a tokenizer of Hugging Face's: of all that makes tokens of a text. Raises DataError."""
    result = pretrained(name, key)
    told: Any = sorted(result.get_vocab().items())
    whole = getattr(result, "backend_tokenizer", None)  # with its merges, and the marks it puts around
    if whole is not None:
        told = {k: v for k, v in json.loads(whole.to_str()).items() if k not in ("truncation", "padding")}  # of a call
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:SHORT]
