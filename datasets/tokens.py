"""Tokenizers by name: what text becomes before a net reads it.

    bytes              the bytes of its UTF-8, 256 tokens, of which none is made from data
    characters         characters, the most frequent of the training text
    words              words and marks in lower case, the most frequent of the training text
    transformers:PATH  a tokenizer of Hugging Face's in a local folder, with the special tokens that it puts around a text

Vocabularies are made from the training text of all clients together, which a server would have to be told of: ``bytes`` and
``transformers:PATH`` need none. In these token 0 is everything else, and what a text without any token becomes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fedfleet.datasets.given import fail
from fedfleet.simulator.errors import one_line

PREFIX = "transformers:"
WORD = re.compile(r"[\w']+|[.,!?;]")
UNKNOWN, MOST = 0, 10_000  # tokens of a vocabulary, if nothing is said
Cut = Callable[[str], Sequence[str]]
CUTS: dict[str, Cut] = {"characters": lambda text: text, "words": lambda text: WORD.findall(text.lower())}
NAMES = ("bytes", *CUTS, f"{PREFIX}PATH")


class Tokenizer(NamedTuple):
    """How many tokens there are, and what makes them of texts: of each the first ``length``, where that is given."""

    words: int
    encode: Callable[[Sequence[str], int | None], list[list[int]]]


def tokenizer(name: str, training: Iterable[str], words: int | None, key: str = "tokenizer") -> Tokenizer:
    """Return the tokenizer of a name; a vocabulary has ``words`` tokens at most. Raises DataError, which calls it ``key``."""
    if not isinstance(name, str):
        mend = f"keep it by its save_pretrained(PATH), and give {PREFIX}PATH"
        fail(key, f"is a {type(name).__name__}, and a run names what it read", mend)
    if name in CUTS:
        return _counted(CUTS[name], training, words or MOST)
    if name != "bytes" and not name.startswith(PREFIX):
        fail(key, f"is {name!r}", f"choose one of {', '.join(NAMES)}")
    if words is not None:
        fail("words", f"is {words}, and {name} has a vocabulary of its own", "leave it out")
    if name == "bytes":
        return Tokenizer(256, lambda texts, length: [list(text.encode()[:length]) for text in texts])
    return _pretrained(name, key)


def _counted(cut: Cut, training: Iterable[str], words: int) -> Tokenizer:
    often = Counter(piece for text in training for piece in cut(text))
    kept = sorted(often, key=lambda piece: (-often[piece], piece))[: words - 1]
    number = {piece: i for i, piece in enumerate(kept, UNKNOWN + 1)}

    def encode(texts: Sequence[str], length: int | None) -> list[list[int]]:
        return [[number.get(piece, UNKNOWN) for piece in cut(text)[:length]] or [UNKNOWN] for text in texts]

    return Tokenizer(len(kept) + 1, encode)


def _pretrained(name: str, key: str) -> Tokenizer:
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if not path.is_dir():
        fail(key, f"is {name!r}, and {path} is no folder", "give the folder that a tokenizer was saved to")
    if find_spec("transformers") is None:
        fail(key, f"is {name!r}, and transformers is not installed", "pip install 'fedfleet[transformers]'")
    from transformers import AutoTokenizer  # here, for it takes seconds to import

    try:
        found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as e:  # of any of the kinds that the library has
        mend = "give the folder that a tokenizer was saved to, by save_pretrained"
        fail(key, f"is {name!r}, of which transformers reads none ({type(e).__name__}: {one_line(e)[:200]})", mend)

    def encode(texts: Sequence[str], length: int | None) -> list[list[int]]:
        cut = {"truncation": True, "max_length": length} if length is not None else {}
        return found([*texts], verbose=False, **cut)["input_ids"] if texts else []

    return Tokenizer(len(found), encode)
