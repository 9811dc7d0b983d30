"""Tokenizers by name: what text becomes before a net reads it.

    bytes              the bytes of its UTF-8, 256 tokens, of which none is made from data
    characters         characters, the most frequent of the training text
    words              words and marks in lower case, the most frequent of the training text
    vocabulary:PATH    the vocabulary of an earlier run, or of clients on disk: its file, or the folder that it lies in
    transformers:PATH  a tokenizer of Hugging Face's in a local folder, with the special tokens that it puts around a text

Vocabularies are made from the training text of all clients together, which a server would have to be told of: ``bytes`` and
those that are given need none. In these token 0 is everything else, and what a text without any token becomes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedfleet.datasets.user_data import fail
from fedfleet.datasets.vocabulary import PREFIX, Vocabulary, counted, pretrained, pretrained_digest, read_vocabulary

KEPT = "vocabulary:"
MOST = 10_000  # tokens of a vocabulary, if nothing is said
MADE = ("characters", "words")
NAMES = ("bytes", *MADE, f"{KEPT}PATH", f"{PREFIX}PATH")


def tokenizer(name: str, training: Iterable[str], words: int | None, key: str = "tokenizer") -> Vocabulary:
    """Return the vocabulary of a name; one that is made has ``words`` tokens at most. Raises DataError, which calls it ``key``."""
    if not isinstance(name, str):
        fix = f"keep it by its save_pretrained(PATH), and give {PREFIX}PATH"
        fail(key, f"is a {type(name).__name__}, and a run names what it read", fix)
    if name in MADE:
        return counted(name, training, words or MOST)
    if name != "bytes" and not name.startswith((PREFIX, KEPT)):
        fail(key, f"is {name!r}", f"choose one of {', '.join(NAMES)}")
    if words is not None:
        fail("words", f"is {words}, and {name} has a vocabulary of its own", "leave it out")
    if name == "bytes":
        return Vocabulary(name, 256)
    if name.startswith(KEPT):
        result = read_vocabulary(Path(name.removeprefix(KEPT)).expanduser(), key).cut_at(None)
        result.check()
        return result
    return Vocabulary(name, len(pretrained(name, key)), source=pretrained_digest(name, key))
