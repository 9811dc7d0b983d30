"""Data in LEAF's JSON: FEMNIST, Shakespeare, Sent140, CelebA and others that its scripts make.

S. Caldas et al., "LEAF: a benchmark for federated settings", 2018, arXiv:1812.01097. A folder `train` and a folder `test` of files

    {"users": [name, …], "num_samples": [n, …], "user_data": {name: {"x": [example, …], "y": [label, …]}, …}}

A user is a client, with its examples in `train`; all of `test` is tested on. What an example is, the data say:

| x | y | what an example becomes |
|---|---|---|
| numbers | an integer | float32, or int64 where all are integers; 784 of them, FEMNIST's, are an image (1, 28, 28) |
| text, as Shakespeare's | the next character | int64 `CHARACTERS`, the next one last, for task=language_model; y says nothing |
| tweets, as Sent140's: lists, text at 4 | 0 or 1 | float32: how often each of the most frequent words of training is there |
| the same, with `tokenizer` | 0 or 1 | int64: its tokens, -1 after the end of each |
| files' names, as CelebA's | an integer | uint8 images out of the folder `images`, resized to `side` |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedfleet.datasets import user_data
from fedfleet.datasets.files import DataError, check_once, ending
from fedfleet.datasets.image_folder import read_images
from fedfleet.datasets.parts import Parts, split
from fedfleet.datasets.texts import Reading, tokenised
from fedfleet.datasets.user_data import Rows, fail
from fedfleet.datasets.vocabulary import WORD, Vocabulary
from fedfleet.simulator.errors import one_line
from fedfleet.simulator.plain_text import OtherEncoding, parsed_json
from fedfleet.simulator.registry import Options

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare; any other is read as a blank."""
SHAKESPEARE = Vocabulary(
    "characters", len(CHARACTERS), {c: i for i, c in enumerate(CHARACTERS)}, unknown=CHARACTERS.index(" ")
)
TEXT_AT = 4  # in a tweet of Sent140: its id, date, query, user, text


class LeafOptions(Options):
    """Data in LEAF's JSON."""

    path: str
    """Folder with the folders ``train`` and ``test``, of .json files."""
    classes: int | None = Field(default=None, ge=1)
    """Labels are below it; one more than the largest, if not given."""
    words: int = Field(default=500, ge=1)
    """Of tweets: the most frequent words, whose numbers are an example; with ``tokenizer`` tokens at most of its vocabulary."""
    tokenizer: str | None = None
    """Of tweets: bytes, characters, words, vocabulary:PATH or transformers:PATH; an example is then its tokens in order."""
    length: int | None = Field(default=None, ge=1)
    """With ``tokenizer``: tokens at which a tweet is cut off; that of the longest if not given."""
    images: str | None = None
    """Of names of files: the folder that they are in."""
    side: int = Field(default=84, ge=1)
    """Of names of files: pixels that both sides are resized to."""
    sha256: str | None = None
    """Digest of what was read; a run says here what it was."""


def read(options: LeafOptions) -> Parts:
    """Return the examples of a folder. Raises DataError."""
    root = Path(options.path).expanduser()
    if options.tokenizer is None and options.length is not None:
        fail(
            "length",
            f"is {options.length}, and there is no tokenizer",
            "set population.dataset.tokenizer, or leave it out",
        )
    sides = [list(_users(root / part)) for part in ("train", "test")]
    users, xs, ys = ([[entry[i] for entry in side] for side in sides] for i in range(3))
    for part, side in zip(("train", "test"), sides, strict=True):
        if not side:
            fail(f"{root / part}", "holds no examples", "make them with LEAF's preprocess.sh")
    result = _encoded(root, xs, ys, options)
    rows = []
    for part, (x, y), of in zip(("train", "test"), result, users, strict=True):
        where = f"{root / part}"
        client = user_data.codes(of, where, "user", len(of)) if part == "train" else None
        rows.append(Rows(where, x, user_data.labels(y, f"{where}: y", options.classes, len(x)), client))
    of_characters = isinstance(xs[0][0], str) and not _is_file(xs[0][0])
    parts = split(rows[0], rows[1], len(CHARACTERS) if of_characters else options.classes)
    if options.tokenizer is None:
        return parts.called(vocabulary=SHAKESPEARE) if of_characters else parts
    asked = Reading(options.tokenizer, options.length, options.words if "words" in options.model_fields_set else None)
    return tokenised(parts, _tweets(f"{root}", [*xs[0], *xs[1]]), asked, foretell=False)


def _users(folder: Path) -> Iterator[tuple[str, Any, Any]]:
    """Give the user, x and y of every example. Raises DataError."""
    files = ending(folder, (".json",)) if folder.is_dir() else []
    if not files:
        fail(f"{folder}", "no file in it ends in .json", "give the folder that has LEAF's train and test")
    check_once(files)
    of: dict[str, Path] = {}
    for file in files:
        for user, x, y in _of_file(file):
            if (other := of.setdefault(user, file)) != file:
                fail(f"{file}", f"user {user!r} is in {other.name}, too", "put all that a user has into one file")
            yield from ((user, a, b) for a, b in zip(x, y, strict=True))


def _of_file(file: Path) -> list[tuple[str, list[Any], list[Any]]]:
    """Return the users of a file in their order, each with x and y. Raises DataError, also where the file contradicts itself."""
    again = "make it again"
    try:
        told = parsed_json(file.read_bytes())
        users, data = [str(user) for user in told["users"]], dict(told["user_data"])
        result = [(user, data[user]["x"], data[user]["y"]) for user in users]
    except OtherEncoding as e:
        raise DataError(f"{file}: {e}") from None
    except (OSError, ValueError) as e:
        fail(f"{file}", f"is no JSON of LEAF's ({one_line(e)})", again)
    except (KeyError, TypeError, IndexError) as e:
        fail(f"{file}", f"is not laid out as LEAF's ({type(e).__name__}: {one_line(e)})", again)
    if twice := [user for user, times in Counter(users).items() if times > 1]:
        fail(f"{file}", f"user {twice[0]!r} is twice in 'users'", again)
    if unnamed := sorted(data.keys() - {*users}):
        fail(f"{file}", f"user {unnamed[0]!r} is in 'user_data' and not in 'users'", again)
    for user, x, y in result:
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            fail(f"{file}", f"user {user!r} has not one y for each x", again)
    counts, counted = told.get("num_samples"), [len(x) for _, x, _ in result]
    if counts is not None and counts != counted:
        at = next((i for i, (a, b) in enumerate(zip(counts, counted, strict=False)) if a != b), None)
        problem = f"'num_samples' has {len(counts)} entries, and 'users' {len(users)}"
        if at is not None:
            problem = f"user {users[at]!r} has {counted[at]} examples, and 'num_samples' says {counts[at]}"
        fail(f"{file}", problem, again)
    return result


def _encoded(root: Path, xs: list[list[Any]], ys: list[list[Any]], options: LeafOptions) -> list[tuple[Tensor, Any]]:
    """Return x and y of the training and of the test examples; with a tokenizer x are numbers (n, 1) of tweets."""
    first = xs[0][0]
    tweets = isinstance(first, list) and len(first) > TEXT_AT and isinstance(first[TEXT_AT], str)
    if options.tokenizer is not None and not tweets:
        fail("tokenizer", f"is {options.tokenizer!r}, and the examples of {root} are no tweets", "leave it out")
    if options.tokenizer is not None:
        numbers = torch.arange(len(xs[0]) + len(xs[1]))[:, None].tensor_split([len(xs[0])])
        return list(zip(numbers, ys, strict=True))
    if isinstance(first, str) and _is_file(first):
        return list(zip(_images(root, xs, options), ys, strict=True))
    if isinstance(first, str):
        return [_characters(f"{root}", x, y) for x, y in zip(xs, ys, strict=True)]
    if tweets:
        return list(zip(_counts(f"{root}", xs, options.words), ys, strict=True))
    result = [user_data.inputs(x, f"{root / part}: x") for part, x in zip(("train", "test"), xs, strict=True)]
    if len({x.dtype for x in result}) > 1:
        result = [x.float() for x in result]
    shape = (1, 28, 28) if result[0].shape[1:] == (784,) else result[0].shape[1:]
    return [(x.reshape(-1, *shape) if x[0].numel() == 784 else x, y) for x, y in zip(result, ys, strict=True)]


def _is_file(text: str) -> bool:
    return text.lower().endswith((".jpg", ".jpeg", ".png"))


def _characters(where: str, x: list[str], y: list[str]) -> tuple[Tensor, Any]:
    length = len(x[0])
    for i, (text, after) in enumerate(zip(x, y, strict=True)):
        if not isinstance(text, str) or len(text) != length or not isinstance(after, str) or len(after) != 1:
            fail(f"{where}, example {i}", f"is not text of {length} characters and one that follows", "make it again")
    windows = SHAKESPEARE.rows([text + after for text, after in zip(x, y, strict=True)])
    return torch.tensor(windows), np.zeros(len(x), dtype=np.int64)


def _counts(where: str, xs: list[list[Any]], words: int) -> list[Tensor]:
    """Return how often each word is in a tweet (n, words); the words are the most frequent of the training tweets."""
    split = [[WORD.findall(text.lower()) for text in _tweets(where, x)] for x in xs]
    often = Counter(word for tweet in split[0] for word in tweet)
    number = {word: i for i, word in enumerate(sorted(often, key=lambda word: (-often[word], word))[:words])}
    result = []
    for side in split:
        x = torch.zeros(len(side), words)
        for row, tweet in zip(x, side, strict=True):
            for word in tweet:
                if word in number:
                    row[number[word]] += 1
        result.append(x)
    return result


def _tweets(where: str, x: list[Any]) -> list[str]:
    """Return the texts of tweets. Raises DataError."""
    result = [tweet[TEXT_AT] if isinstance(tweet, list) and len(tweet) > TEXT_AT else None for tweet in x]
    if not all(isinstance(text, str) for text in result):
        fail(where, "not every example is a tweet, a list with its text at 4", "make them again")
    return [text for text in result if text is not None]


def _images(root: Path, xs: list[list[Any]], options: LeafOptions) -> list[Tensor]:
    if options.images is None:
        fail(
            f"{root}",
            f"examples are names of files, such as {xs[0][0]}",
            "set population.dataset.images to their folder",
        )
    at = Path(options.images).expanduser()
    for name in (name for x in xs for name in x):
        if not isinstance(name, str) or Path(name).name != name:
            fail(f"{root}", f"{name!r} is no name of a file", "make it again")
    return [read_images([at / name for name in x], options.side, 3) for x in xs]
