"""Two domains of text, from files of their layouts made here."""

from pathlib import Path

import pytest
import torch

from fedfleet.datasets import text
from fedfleet.datasets.files import DataError
from tests.refusals import tells


def words(data, row: int, numbers: dict[int, str]) -> list[str]:
    return [numbers.get(int(n), "?") for n in data.x[row]]


def numbered(lines: list[list[str]], size: int) -> dict[int, str]:
    """Words in the order of how often they occur, then of the alphabet, from 2 on."""
    counts: dict[str, int] = {}
    for line in lines:
        for word in line:
            counts[word] = counts.get(word, 0) + 1
    ranked = sorted(counts, key=lambda w: (-counts[w], w))[: size - 2]
    return {0: "?", 1: ".", **dict(enumerate(ranked, 2))}


def test_windows_follow_each_other_without_punctuation_or_capitals():
    train = [["It's a Test, a test!"] * 10, ["Hello -- world_wide"] * 20]
    data = text.windows("made", train, [["a test"] * 30, ["hello"] * 40], 6)
    lines = [["its", "a", "test", "a", "test"]] * 10 + [["hello", "worldwide"]] * 20
    numbers = numbered(lines, 6)
    assert data.train.classes == 6
    stream = (["its", "a", "test", "a", "test", "."] * 10)[: text.LENGTH + 1]
    assert words(data.train, 0, numbers) == [w if w in numbers.values() else "?" for w in stream]
    assert data.train.domain.tolist() == [0, 1]  # 60 and 60 words, 36 a window
    assert (data.test.domain.tolist(), int(data.test.x[0, -1])) == ([0, 0, 1, 1], int(data.test.x[1, 0]))
    assert data.train.x.dtype == torch.int64
    assert not data.train.y.any()


def test_the_vocabulary_is_that_of_training():
    data = text.windows("made", [["a b"] * 20, ["a c"] * 20], [["zebra a"] * 20, ["a"] * 20], 100)
    assert (data.train.classes, data.test.x[0].tolist()) == (5, [0, 2, 1] * 12)


def write_treebank(folder: Path) -> Path:
    where = folder / "cornell_ptb"
    where.mkdir()
    (where / "ptb.train.txt").write_text(" the <unk> of N trees \n" * 20)
    (where / "ptb.test.txt").write_text(" the trees \n" * 20)
    lines = [
        f"L{i} +++$+++ u{i} +++$+++ m{i // 20} +++$+++ ANNA +++$+++ Caf\xe9, film {i // 20}!\n" for i in range(200)
    ]
    (where / "movie_lines.txt").write_text("".join(lines), encoding="iso-8859-1")
    return folder


def test_cornell_and_the_treebank(tmp_path):
    data = text.load_cornell_ptb(write_treebank(tmp_path))
    assert data.domains == ("document", "conversation")
    the, of, n, trees = data.train.x[0, [0, 2, 3, 4]].tolist()
    assert int(data.train.x[0, 1]) == text.UNKNOWN  # what the treebank calls unknown
    assert len({the, of, n, trees, text.UNKNOWN, text.END}) == 6
    assert data.test.x[0, :3].tolist() == [the, trees, text.END]
    talk = data.test.x[data.test.domain == 1][0, :4].tolist()  # of the tenth film, whose number no training line has
    assert talk[2:] == [text.UNKNOWN, text.END]
    assert talk[:2] == data.train.x[data.train.domain == 1][0, :2].tolist()


def test_every_tenth_block_of_small_texts_is_for_testing(tmp_path):
    (tmp_path / "text").mkdir()
    for name in text.DOMAINS:
        lines = [f"{'held' if i // 10 % 10 == 9 else 'read'} line of text" for i in range(200)]
        (tmp_path / "text" / f"{name}.txt").write_text("\n".join(lines))
    data = text.load_small_texts(tmp_path)
    assert data.train.classes == 6  # held is not among the words of training
    assert (data.train.x == text.UNKNOWN).sum() == 0
    assert (data.test.x == text.UNKNOWN).any()


def test_what_cannot_be_read_says_so(tmp_path):
    tells(lambda: text.load_small_texts(tmp_path), "document.txt: cannot be read … so put it there", DataError)
    with pytest.raises(DataError, match="the document text has no 36 words"):
        text.windows("made", [["a"], ["a"] * 99], [["a"] * 99, ["a"] * 99], 10)
    folder = write_treebank(tmp_path)
    (folder / "cornell_ptb" / "movie_lines.txt").write_text("L1 +++$+++ u1\n")
    tells(lambda: text.load_cornell_ptb(folder), "movie_lines.txt, line 1: 2 fields, expected 5", DataError)
