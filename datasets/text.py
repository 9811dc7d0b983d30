"""Two domains of English text as windows of word numbers, for language models: documents and conversation.

As in agnostic federated learning (Mohri, Sivek & Suresh, ICML 2019): no punctuation, lower case, a vocabulary of the words most
frequent in the training text of both domains. Every line ends in a mark of its own, as is usual for the Penn Treebank.

- `cornell_ptb`, the paper's: documents are the Penn Treebank (Marcus et al., 1993) as prepared by T. Mikolov, conversation the
  lines of the Cornell Movie-Dialogs Corpus (Danescu-Niculescu-Mizil & Lee, 2011), a tenth of the films for testing; 10,000 words.
- `small_texts`: any two files of text, a paragraph or an utterance a line; every tenth block of lines is for testing; 2,000 words.

x is int64 (windows, 36): 35 words to read, each to be followed by the next; y says nothing. Windows follow each other in the text.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import DataError
from fedfleet.datasets.names import Names
from fedfleet.datasets.vocabulary import CUTS, UNKNOWN, Vocabulary
from fedfleet.simulator.plain_text import OtherEncoding, decoded

DOMAINS = ("document", "conversation")
LENGTH = 35  # words a window is read for
PLAIN, END = "plain words", 1
BLOCK, TENTH = 10, 10  # lines of a block; every so many-th block, or film, is for testing

Lines = Iterable[str]


def load_cornell_ptb(folder: Path) -> Dataset:
    """Return documents and conversation from `folder`/cornell_ptb: ptb.train.txt, ptb.test.txt, movie_lines.txt.

    Raises DataError.
    """
    where = folder / "cornell_ptb"
    train, test = _lines(where / "ptb.train.txt"), _lines(where / "ptb.test.txt")
    talk: tuple[list[str], list[str]] = ([], [])
    films: dict[str, int] = {}
    for number, line in enumerate(_lines(where / "movie_lines.txt", "iso-8859-1"), 1):
        fields = line.split(" +++$+++ ")
        if len(fields) != 5:
            raise DataError(
                f"{where / 'movie_lines.txt'}, line {number}: {len(fields)} fields, expected 5: copy the original file"
            )
        film = films.setdefault(fields[2], len(films))
        talk[film % TENTH == TENTH - 1].append(fields[4])
    return windows("cornell_ptb", [train, talk[0]], [test, talk[1]], 10_000)


def load_small_texts(folder: Path) -> Dataset:
    """Return documents and conversation from `folder`/text: document.txt and conversation.txt. Raises DataError."""
    parts = [_split(_lines(folder / "text" / f"{domain}.txt")) for domain in DOMAINS]
    return windows("small_texts", [train for train, _ in parts], [test for _, test in parts], 2_000)


def windows(name: str, train: Sequence[Lines], test: Sequence[Lines], vocabulary: int) -> Dataset:
    """Return windows over the lines of each domain; `vocabulary` counts the unknown word and the end of a line.

    Raises DataError.
    """
    read, held = [[_words(lines) for lines in part] for part in (train, test)]
    counts = Counter(word for lines in read for line in lines for word in line if word != "unk")
    known = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    numbers = {word: i for i, word in enumerate(known, 2)}
    kept = Vocabulary(PLAIN, len(known) + 2, numbers)
    parts = (_examples(name, part, numbers, kept.words) for part in (read, held))
    return Dataset(name, *parts, domains=DOMAINS, names=Names(vocabulary=kept))


def _words(lines: Lines) -> list[list[str]]:
    return [[*words] for line in lines if (words := CUTS[PLAIN](line))]


def _examples(name: str, domains: Sequence[list[list[str]]], numbers: dict[str, int], vocabulary: int) -> Examples:
    cut = [_cut([n for line in lines for n in (*(numbers.get(w, UNKNOWN) for w in line), END)]) for lines in domains]
    for domain, result in zip(DOMAINS, cut, strict=True):
        if not len(result):
            raise DataError(
                f"{name}: the {domain} text has no {LENGTH + 1} words to train or to test on: give more text"
            )
    domain = torch.arange(len(cut)).repeat_interleave(torch.tensor([len(c) for c in cut]))
    return Examples(torch.cat(cut), torch.zeros_like(domain), vocabulary, domain)


def _cut(stream: list[int]) -> Tensor:
    """Return windows (n, LENGTH + 1), each beginning with the last word of the one before."""
    tokens = torch.tensor(stream, dtype=torch.int64)
    if len(tokens) <= LENGTH:
        return torch.zeros(0, LENGTH + 1, dtype=torch.int64)
    return tokens.unfold(0, LENGTH + 1, LENGTH).clone()


def _split(lines: list[str]) -> tuple[list[str], list[str]]:
    parts: tuple[list[str], list[str]] = ([], [])
    for i, line in enumerate(lines):
        parts[i // BLOCK % TENTH == TENTH - 1].append(line)
    return parts


def _lines(path: Path, encoding: str = "utf-8") -> list[str]:
    try:
        return decoded(path.read_bytes(), encoding).splitlines()
    except OSError as e:
        raise DataError(
            f"{path}: cannot be read ({e.strerror}): it is not downloaded, so put it there, or set FEDFLEET_DATA to "
            f"the folder above"
        ) from None
    except OtherEncoding as e:
        raise DataError(f"{path}: {e}") from None
